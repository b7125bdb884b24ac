"""int8 linear layers beside what diffusers, peft, accelerate and transformers do to a model."""

import functools
import itertools
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch
from attn_support.oracle import error_of
from attn_support.randomness import some
from attn_support.tiny_pipelines import SOME
from torch import Tensor, nn

from pascal_attn_core import patch_attention_int8, patch_linear_int8
from pascal_attn_core.int8 import Int8Weight
from pascal_attn_core.int8.attention import AttentionBinding
from pascal_attn_core.int8.stored import FLOATS_8
from pascal_attn_core.patching.forward import ReplacedForward
from tools import int8_files_table, int8_table
from tools.families.proof import outputs

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["to_q", "to_k", "to_v"]}


def call(model: nn.Module) -> Tensor:
    latent, text, pooled, ids = (
        torch.randn(*size, generator=torch.Generator().manual_seed(3))
        for size in ((1, 4, 16, 16), (1, 9, 96), (1, 64), (1, 6))
    )
    more = {"text_embeds": pooled, "time_ids": ids}
    return model(latent, torch.tensor([400]), text, added_cond_kwargs=more).sample


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return call(model)


@pytest.fixture
def unet() -> nn.Module:
    torch.manual_seed(0)
    model, _ = int8_table.MODELS["SDXL UNet"]()
    return model.eval().requires_grad_(False)


def add_lora(model: nn.Module) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(**LORA))
    model.eval()


# The layers of these models are a few numbers wide.
PATCHES = {
    "linear": (functools.partial(patch_linear_int8, include="*"), 0.3),
    "attention": (patch_attention_int8, 0.05),
}


@pytest.mark.parametrize("kind", PATCHES)
@pytest.mark.parametrize("name", SOME)
def test_every_layer_of_a_family_and_back(name: str, kind: str, tiny: Any) -> None:
    family, (patch_int8, most) = tiny.family(name), PATCHES[kind]
    model = family.build()
    expected = outputs(family, model)
    with patch_int8(model, max_error=1.0) as patch:
        out, report = outputs(family, model), patch.report()
    if kind == "attention":
        exact = {line.why for line in report.lines if line.state != "on"}
        others = ("the int8 mode has no float mask", "head_dim must be a multiple of 4")
        assert all(why.startswith(others) for why in exact)
        assert report.count("on") or exact
    else:
        assert report.count("on") >= 0.9 * len(report.lines) - 1
    assert (error_of(out, expected) > 0) == bool(report.count("on"))
    assert error_of(out, expected) < most
    assert torch.equal(outputs(family, model), expected)


@pytest.mark.parametrize(("name", "layers"), some([("Flux", 4), ("SDXL UNet", 24), ("Wan", 6)], 3))
@torch.no_grad()
def test_lora_hooks_limits_and_both_patches_at_once(name: str, layers: int) -> None:
    """Hooks of accelerate are there first and removed meanwhile, or put over the patch; both leave it in place."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    torch.manual_seed(1)
    model, call = int8_table.MODELS[name]()
    add_lora(model)
    model.requires_grad_(False)
    expected = call(model, torch.float32)
    found = [found.module for found in AttentionBinding(max_error=0.02).find(model)]
    for module in found[::2]:
        hooks.add_hook_to_module(module, hooks.ModelHook())
    with patch_attention_int8(model) as attention, patch_linear_int8(model) as linear:
        first = call(model, torch.float32)
        for number, module in enumerate(found):
            (hooks.add_hook_to_module if number % 2 else hooks.remove_hook_from_module)(
                module, *[hooks.ModelHook()] * (number % 2)
            )
        out = call(model, torch.float32)
        assert attention.report().count("on") == len(attention.report().lines) == layers
        assert {line.calls for line in attention.report().lines} == {2}
        assert linear.report().count("on") > 4 * layers
    assert 0 < error_of(out, expected) < 0.02
    assert 0 < error_of(first, expected) < 0.02
    for module in found[1::2]:
        hooks.remove_hook_from_module(module)
    assert torch.equal(call(model, torch.float32), expected)
    assert not any(isinstance(vars(module).get("forward"), ReplacedForward) for module in found)
    with patch_attention_int8(model, max_error=0) as attention:
        torch.testing.assert_close(call(model, torch.float32), expected, rtol=1e-4, atol=1e-4)
        assert attention.report().count("refused") == layers


@pytest.mark.parametrize("name", some(["Flux", *(name for name in int8_table.MODELS if name != "Flux")], 4))
def test_whole_models_err_no_more_than_in_bfloat16(name: str) -> None:
    with torch.no_grad():
        errors, report = int8_table.errors_of(name, seed=0)
    assert report.count("on") > 0.6 * len(report.lines)
    assert errors["float32"] < 1e-5 < errors["int8, rest in float32"] < errors["bfloat16"]
    assert errors["int8, rest in float16"] < errors["bfloat16"]
    assert errors["float32"] < 1e-5 < errors["int8 attention"] < errors["bfloat16"]
    assert report.median_error is not None
    assert report.median_error < 0.01


@pytest.mark.parametrize(("model", "file"), some([("Z-Image", "float8_e4m3fn"), ("Flux", "Q4_K")], 2))
def test_whole_models_from_a_file_err_less_than_in_bfloat16_and_layers_with_outliers_by_1_5_percent_at_most(
    model: str, file: str
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    pytest.importorskip("accelerate", reason="diffusers loads GGUF files with accelerate")
    with torch.no_grad():
        errors, *reports = int8_files_table.errors_of(model, file)
    assert 1e-4 < errors["8 bits"] < errors["bfloat16"]
    assert errors["the file itself"] < 0.1
    for report in reports:
        assert len([line for line in report.of("on") if line.format == file]) > 20
        assert report.worst is not None
        assert 0.004 < report.worst.error < 0.015


@pytest.mark.parametrize("when", some(["after", "before"], 2))
def test_lora_stays_in_float(unet: nn.Module, when: str) -> None:
    base = run(unet)
    if when == "before":
        add_lora(unet)
    patch = patch_linear_int8(unet)
    run(unet)
    if when == "after":
        add_lora(unet)
    out = run(unet)
    assert not any("lora_" in line.name for line in patch.report().of("on"))
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert isinstance(layer.base_layer.weight, Int8Weight)
    assert type(layer.lora_A["default"].weight) is nn.Parameter
    unet.disable_adapters()
    assert error_of(run(unet), base) < 0.02
    unet.enable_adapters()
    patch.remove()
    expected = run(unet)
    assert error_of(expected, base) > 0.1
    assert error_of(out, expected) < 0.02


@pytest.mark.parametrize("is_safe", some([False, True], 2))
def test_adapters_are_fused_into_rounded_weights_and_taken_out(unet: nn.Module, is_safe: bool) -> None:
    base = run(unet)
    add_lora(unet)
    expected = run(unet)
    patch = patch_linear_int8(unet)
    run(unet)
    for change in (lambda: unet.fuse_lora(safe_fusing=is_safe), unet.unfuse_lora):
        change()
        assert error_of(run(unet), expected) < 0.02
    patch.remove()
    assert error_of(run(unet), expected) < 1e-5
    unet.disable_adapters()
    assert error_of(run(unet), base) < 1e-5


def test_training_an_adapter_over_rounded_weights(unet: nn.Module) -> None:
    patch = patch_linear_int8(unet)
    run(unet)
    add_lora(unet)
    unet.train()

    def gradients() -> dict[str, Tensor]:
        unet.zero_grad()
        call(unet).square().mean().backward()
        return {name: p.grad.clone() for name, p in unet.named_parameters() if p.grad is not None}

    found = gradients()
    patch.remove()
    expected = gradients()
    assert set(found) == set(expected)
    assert all("lora_" in name for name in found)
    assert max(error_of(found[name], expected[name]) for name in found) < 0.15
    assert sum(error_of(found[name], expected[name]) for name in found) / len(found) < 0.05


@pytest.mark.parametrize(("offload", "is_first"), some([("block_level", True), ("leaf_level", False)], 2))
def test_group_offload_moves_the_integers(unet: nn.Module, offload: str, is_first: bool) -> None:
    hooks = pytest.importorskip("diffusers.hooks.group_offloading", reason="this diffusers has no group offloading")
    blocks = {"num_blocks_per_group": 1} if offload == "block_level" else {}
    expected = run(unet)
    patch = patch_linear_int8(unet) if is_first else None
    before = run(unet)
    hooks.apply_group_offloading(unet, onload_device=CPU, offload_device=CPU, offload_type=offload, **blocks)
    patch = patch_linear_int8(unet) if patch is None else patch
    out = run(unet)
    assert torch.equal(out, before) == is_first
    assert patch.report().count("on") > 100
    assert torch.equal(run(unet), out)
    assert 0 < error_of(out, expected) < 0.02


@pytest.mark.parametrize(("dtype", "is_first"), some(itertools.product(FLOATS_8, [False, True]), 4), ids=str)
def test_weights_that_are_cast_for_each_call_are_taken(unet: nn.Module, dtype: torch.dtype, is_first: bool) -> None:
    patch = patch_linear_int8(unet) if is_first else None
    if is_first:
        run(unet)
    unet.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=torch.float32)
    patch = patch or patch_linear_int8(unet)
    out = run(unet)
    assert patch.report().count("on") > 100
    formats = {line.format for line in patch.report().of("on")}
    assert formats == {"float32" if is_first else str(dtype).removeprefix("torch.")}
    assert torch.equal(run(unet), out)
    patch.remove()
    assert {type(each) for each in unet.parameters()} == {nn.Parameter}
    expected = run(unet)
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight.dtype == dtype
    # Rounded to 8-bit floats now, weights that were rounded to integers before are other numbers.
    assert 0 < error_of(out, expected) < (0.2 if is_first else 0.02)


@pytest.mark.parametrize("is_first", some([True, False], 2))
def test_sequential_offload_brings_the_float_weights_back_and_the_report_says_why(unet, is_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = run(unet)
    patch = patch_linear_int8(unet) if is_first else None
    if is_first:
        run(unet)
    accelerate.cpu_offload(unet, execution_device=CPU, offload_buffers=True)
    patch = patch or patch_linear_int8(unet)
    assert torch.equal(run(unet), expected)
    state, why = ("refused", "its weight was replaced") if is_first else ("waiting", "its weight is absent")
    assert patch.report().count("on") == 0
    assert all(line.why.startswith(why) for line in patch.report().of(state)[:1]), patch.report().text()
    patch.remove()
    assert torch.equal(run(unet), expected)
