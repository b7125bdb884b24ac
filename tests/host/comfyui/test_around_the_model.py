"""What ComfyUI puts around a diffusion model: a ControlNet beside it, torch.compile over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CONTROLNET = """
import comfy.cldm.cldm, comfy.controlnet, comfy.ops, importlib

def randomised(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return module

mappings = load_pack()
patch = mappings["PascalAttentionPatch"]().patch
runs = importlib.import_module(mappings["PascalAttentionPatch"].__module__.rpartition(".")[0] + ".engine.runs")
network = comfy.cldm.cldm.ControlNet(
    image_size=32, in_channels=4, hint_channels=3, model_channels=320, num_res_blocks=[1], channel_mult=[1],
    transformer_depth=[1], transformer_depth_middle=1, context_dim=768, num_heads=8, use_spatial_transformer=True,
    legacy=False, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
control = comfy.controlnet.ControlNet(randomised(network), load_device=torch.device("cpu"))
control.set_cond_hint(torch.rand(1, 3, 128, 128), 1.0, (0.0, 1.0))

def sampled(model):
    def conditioned(seed):
        [[tensor, extra]] = conditioning("sd15", seed)
        return [[tensor, {**extra, "control": control, "control_apply_to_uncond": True}]]
    latent = torch.zeros(1, 4, 16, 16)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    return comfy.sample.sample(model, noise, 2, 3.0, "euler", "simple", conditioned(1), conditioned(2), latent,
                               disable_pbar=True, seed=0)

model = load_model("sd15")
stock = sampled(model)
for coverage in ("attention override", "whole model"):
    runs.forget()
    patched, = patch(model, "tiled", 0, 0, coverage, 0, True)
    largest = (stock - sampled(patched)).abs().max().item() / stock.abs().max().item()
    [run] = runs.remembered()
    taken = {k: t.count for k, t in run.tallies.items() if k.outcome == "taken"}
    beside = sum(count for kind, count in taken.items() if kind.block.startswith("ControlNet call"))
    print("RESULT", coverage, beside, run.count("taken"), run.count("passed to ComfyUI"), largest, sep="|")
print("AGAIN", torch.equal(stock, sampled(model)))
"""


def test_a_controlnet_is_served_under_whole_model(host_script: Callable[..., str]) -> None:
    out = host_script(CONTROLNET, "--use-pytorch-cross-attention")
    results = [line.split("|")[1:] for line in out.splitlines() if line.startswith("RESULT|")]
    (override, whole) = (
        (int(beside), int(taken), int(left), float(error)) for _, beside, taken, left, error in results
    )
    assert override[0] == 0
    assert whole[0] > 0
    assert whole[1] == override[1] + whole[0]
    assert whole[2] == override[2] == 0
    assert max(override[3], whole[3]) < 1e-4
    assert "AGAIN True" in out


COMPILED = """
import importlib, torch._dynamo
from comfy_api.torch_helpers import set_torch_compile_wrapper
mappings = load_pack()
patch = mappings["PascalAttentionPatch"]().patch
runs = importlib.import_module(mappings["PascalAttentionPatch"].__module__.rpartition(".")[0] + ".engine.runs")
model = load_model("sd15")
stock = sample(model, "sd15")
for first in ("patch", "compile"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runs.forget()
    used = model
    if first == "patch":
        used, = patch(used, "tiled", 0, 0, "attention override", 0, True)
    used = used.clone()
    set_torch_compile_wrapper(model=used, backend="aot_eager")
    if first == "compile":
        used, = patch(used, "tiled", 0, 0, "attention override", 0, True)
    largest = (stock - sample(used, "sd15")).abs().max().item() / stock.abs().max().item()
    [run] = runs.remembered()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    print("RESULT", first, largest, breaks, len(run.warnings), run.line(), sep="|")
"""


def test_torch_compile_before_and_after_the_patch_breaks_no_graph(host_script: Callable[..., str]) -> None:
    out = host_script(COMPILED, "--use-pytorch-cross-attention")
    results = [line.split("|")[1:] for line in out.splitlines() if line.startswith("RESULT|")]
    assert [first for first, *_ in results] == ["patch", "compile"]
    for _, largest, breaks, warnings, line in results:
        assert float(largest) < 1e-4
        assert (int(breaks), int(warnings)) == (0, 0)
        assert "compiled by torch.compile" in line


@pytest.mark.parametrize("name", ["sd15", "wan_t2v"])
def test_loading_the_pack_twice_under_two_names_is_harmless(host_script: Callable[..., str], name: str) -> None:
    """A clone beside a registry install, or pip's package beside the pack: both serve, neither disturbs the other."""
    code = f"""
import importlib.util
first = load_pack()["PascalAttentionPatch"]
spec = importlib.util.spec_from_file_location("second_copy", str(PACK / "__init__.py"))
second = importlib.util.module_from_spec(spec)
sys.modules["second_copy"] = second
spec.loader.exec_module(second)
model = load_model({name!r})
stock = sample(model, {name!r})
patched = first().patch(model, "tiled", 0, 0, "attention override", 0, True)[0]
both = second.NODE_CLASS_MAPPINGS["PascalAttentionPatch"]().patch(patched, "tiled", 0, 0, "whole model", 0, True)[0]
for used in (patched, both, patched):
    print("ERROR", (stock - sample(used, {name!r})).abs().max().item() / stock.abs().max().item())
"""
    errors = [float(line.split()[1]) for line in host_script(code).splitlines() if line.startswith("ERROR")]
    assert len(errors) == 3
    assert max(errors) < 1e-4
