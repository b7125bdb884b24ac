"""Pascal Second Card inside the host: see ``comfy_checks``. The second device is a thread on the CPU."""

import torch
from comfy_checks import check, close, pack, replaced, runs
from comfy_inproc import load_model, load_pack, sample
from comfy_patch_checks import patched

NODES = load_pack()


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
def before_the_patch_and_behind_it():
    model = load_model("sd15")
    expected, _ = latents(with_patch(model))
    for place in (lambda m: with_second(with_patch(m)), lambda m: with_patch(with_second(m))):
        out, run = latents(place(model))
        assert torch.equal(out, expected)
        assert run.routes().get("several"), run.line()
        assert run.shares["cpu #2"] == run.shares["cpu"]
        assert run.warnings == []


@check
def without_the_patch_it_patches_by_itself():
    model = load_model("flux")
    stock = sample(model, "flux", steps=2)
    out, run = latents(with_second(model), "flux", cfg=1.0)
    close(out, stock)
    assert run.unique_id == "9"
    assert run.count("taken") or run.count(), run.line()


@check
def the_model_itself_stays_what_it_was():
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


@check
def a_device_that_fails_changes_no_picture():
    model = with_second(with_patch(load_model("sd15")))
    expected, _ = latents(model)

    def broken(tensor, device):
        raise RuntimeError("CUDA error: unspecified launch failure")

    core = pack("core.machine.runtime")
    with core.using(core.Runtime("cpu")), replaced(pack("core.routes.several"), "_copied", broken):
        out, run = latents(model)
    assert torch.equal(out, expected)
    assert any("cpu failed (RuntimeError: CUDA error: unspecified launch failure)" in note for note in run.notes)
