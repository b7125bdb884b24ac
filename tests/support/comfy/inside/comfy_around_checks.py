"""This module has what ComfyUI puts around a diffusion model, and a second card on the CPU: see ``comfy_checks``."""

import comfy.controlnet
import torch
import torch._dynamo
from comfy_checks import Skip, check, close, pack, replaced, run_of, runs
from comfy_ffn_checks import patched as ffn_chunking
from comfy_inproc import conditioning, load_model, load_pack, sample, wan
from comfy_int8_checks import NEAR
from comfy_int8_checks import patched as int8_linear
from comfy_other_packs import tiny_controlnet
from comfy_patch_checks import patched
from comfy_tiny_models import random_weights

NODES = load_pack()
OVERRIDE, WHOLE = "attention override", "whole model"


@check
def a_controlnet_is_served_under_whole_model():
    network = tiny_controlnet()
    network.load_state_dict(random_weights(network))
    control = comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"))
    control.set_cond_hint(torch.rand(1, 3, 128, 128), 1.0, (0.0, 1.0))
    more = {"control": control, "control_apply_to_uncond": True}
    texts = [[[tensor, {**extra, **more}] for tensor, extra in conditioning("sd15", seed)] for seed in (1, 2)]
    model, taken = load_model("sd15"), {}
    stock = sample(model, "sd15", steps=2, cfg=3.0, texts=texts)
    for coverage in (OVERRIDE, WHOLE):
        ours = patched(model, coverage=coverage)
        run = run_of(lambda: sample(ours, "sd15", steps=2, cfg=3.0, texts=texts), stock)  # noqa: B023
        assert run.count("passed to ComfyUI") == 0, run.line()
        beside = [tally.count for kind, tally in run.tallies.items() if kind.block.startswith("ControlNet call")]
        taken[coverage] = run.count("taken"), sum(beside)
    assert taken[OVERRIDE][1] == 0 < taken[WHOLE][1], taken
    assert taken[WHOLE][0] == taken[OVERRIDE][0] + taken[WHOLE][1], taken
    assert torch.equal(sample(model, "sd15", steps=2, cfg=3.0, texts=texts), stock)


@check
def torch_compile_before_and_after_the_patch_breaks_no_graph():
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def compiled(model):
        model = model.clone()
        set_torch_compile_wrapper(model=model, backend="aot_eager")
        return model

    model = load_model("sd15")
    stock = sample(model, "sd15")
    for place in (lambda m: compiled(patched(m, coverage=OVERRIDE)), lambda m: patched(compiled(m), coverage=OVERRIDE)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = run_of(lambda: sample(place(model), "sd15"), stock)  # noqa: B023
        assert not torch._dynamo.utils.counters["graph_break"]
        assert run.warnings == []
        assert "compiled by torch.compile" in run.line()


@check
def copies_for_another_device_have_changes_of_their_own():
    base, stock = wan()
    if not hasattr(base, "deepclone_multigpu"):
        raise Skip("this host has no copies for several devices")
    for patch, part, most in ((ffn_chunking, "feed-forward", 2e-5), (int8_linear, "int8", NEAR)):
        model = patch(base)
        sample(model)
        copy = model.deepclone_multigpu()
        assert copy.model is not model.model
        for each in (model, copy):
            assert run_of(lambda: close(sample(each), stock, most)).part == part  # noqa: B023


def with_patch(model):
    return patched(model, route="auto")


def with_second(model, least_tokens=64):
    with replaced(pack("second_card"), "_other_card", lambda home, wanted: ("cpu", "")):
        return NODES["PascalSecondCard"]().patch(model, "auto", least_tokens, "9")[0]


def latents(model, name="sd15", cfg=3.0):
    with runs() as found:
        out = sample(model, name, steps=2, cfg=cfg)
    (run,) = found
    return out, run


@check
def a_second_card_before_the_patch_and_behind_it():
    model = load_model("sd15")
    expected, _ = latents(with_patch(model))
    for place in (lambda m: with_second(with_patch(m)), lambda m: with_patch(with_second(m))):
        out, run = latents(place(model))
        assert torch.equal(out, expected)
        assert run.routes().get("several"), run.line()
        assert run.shares["cpu #2"] == run.shares["cpu"]
        assert run.warnings == []


@check
def a_second_card_without_the_patch_patches_by_itself():
    model = load_model("flux")
    stock = sample(model, "flux", steps=2)
    out, run = latents(with_second(model), "flux", cfg=1.0)
    close(out, stock)
    assert run.unique_id == "9"
    assert run.count("taken") or run.count(), run.line()


@check
def beside_a_second_card_the_model_itself_stays_what_it_was():
    model = load_model("sd15")
    stock = sample(model, "sd15", steps=2)
    alone = with_patch(model)
    expected, _ = latents(alone)
    with_second(model)
    shared, run = latents(with_second(alone))
    assert run.shares
    assert torch.equal(shared, expected)
    assert torch.equal(sample(model, "sd15", steps=2), stock)
    again, run = latents(alone)
    assert torch.equal(again, expected)
    assert run.shares == {}
