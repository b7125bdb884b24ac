"""Models that diffusers has loaded from GGUF files, beside what peft and accelerate do to them."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("accelerate", reason="diffusers loads GGUF files with accelerate")

import accelerate
import diffusers
import gguf
import torch
from attn_support.oracle import error_of
from diffusers.quantizers.gguf import utils
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_functions
from torch import Tensor, nn

from pascal_attn_core import patch_gguf
from pascal_attn_core.gguf import int8 as ways
from pascal_attn_core.gguf import matrix as matrices
from pascal_attn_core.int8 import patch_linear_int8
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

pytestmark = pytest.mark.filterwarnings("ignore")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16")  # those that the package gguf can write
SIZES: dict[str, Any] = {
    "patch_size": 1, "in_channels": 32, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip


def sane_blocks(name: str, rows: int, columns: int) -> Tensor:
    """uint8 ``[rows, bytes]``: random codes with scales of weights, whatever the format."""
    weights, size, _ = FORMATS[name]
    blocks = torch.randint(0, 256, (rows, columns // weights, size), dtype=torch.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "BF16": (0,)}
    for at in places.get(name, (0, 2) if name.endswith("_1") or name in ("Q4_K", "Q5_K") else (0,)):
        scales = torch.rand(rows, columns // weights, 1) * (2e-4 if weights == 256 else 2e-2)
        blocks[..., at : at + 2] = scales.to(torch.bfloat16 if name == "BF16" else torch.float16).view(torch.uint8)
    return blocks.flatten(1)


def layer(name: str, rows: int = 64, columns: int = 512, dtype: torch.dtype = torch.float32) -> GGUFLinear:
    found = GGUFLinear(columns, rows, True, compute_dtype=dtype)
    quant_type = gguf.GGMLQuantizationType[name]
    found.weight = GGUFParameter(sane_blocks(name, rows, columns), quant_type=quant_type)
    return found.requires_grad_(False)


def flux(folder: Path, name: str = "Q4_0") -> nn.Module:
    """A tiny Flux from a GGUF file."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**SIZES)
    model.save_config(folder)
    writer = gguf.GGUFWriter(folder / "model.gguf", "flux")
    for key, value in model.state_dict().items():
        numbers, kind = value.numpy(), gguf.GGMLQuantizationType[name]
        if value.dim() == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(key, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, numbers)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    options = {"config": str(folder), "quantization_config": diffusers.GGUFQuantizationConfig()}
    return diffusers.FluxTransformer2DModel.from_single_file(str(folder / "model.gguf"), **options).eval()


def call(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    latent, text, pooled = (torch.randn(size, generator=generator) for size in ((1, 16, 32), (1, 5, 32), (1, 32)))
    ids = torch.zeros(16, 3), torch.zeros(5, 3)
    return model(latent, text, pooled, torch.tensor([0.5]), *ids[::-1]).sample


def with_adapter(folder: Path) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    """A model with a LoRA, and a function that gives its output and the gradients of the LoRA."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = flux(folder)
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "proj_mlp", "to_out.0"]))
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert trained

    def step() -> list[Tensor]:
        out = call(model)
        return [out, *torch.autograd.grad(out.square().sum(), trained)]

    return model, step


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer in several slices."""
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 1000)


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_have_the_bits_of_the_hosts(name: str) -> None:
    blocks = torch.randint(0, 256, (500, FORMATS[name].bytes), dtype=torch.uint8)
    right = dequantize_functions[gguf.GGMLQuantizationType[name]](blocks, *FORMATS[name][:2])
    found = expand(blocks, name, torch.float16, table=torch.float32).to(right.dtype)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_of_each_format_is_the_hosts(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(name, dtype=dtype), torch.randn(2, 3, 512).to(dtype)
    expected = module(x)
    with patch_gguf(module) as patch:
        assert torch.equal(module(x), expected)
        assert [state[1:] for state in patch.report().states] == [("on", name)]
        monkeypatch.setattr(matrices, "slice_weights", lambda _: 5000)
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(out, module(x))
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_whole_model_from_a_file_and_back(name: str, tmp_path: Path, slices: None) -> None:
    model = flux(tmp_path, name)
    parts, before = dict(model.named_parameters()), call(model)
    with patch_gguf(model) as patch:
        assert patch.sites == sum(isinstance(module, GGUFLinear) for module in model.modules()) > 10
        torch.testing.assert_close(call(model), before, rtol=1e-4, atol=1e-5)
        assert all(value is parts[key] for key, value in model.named_parameters())
        assert list(model.state_dict()) == list(parts)
    assert not any("forward_native" in vars(module) for module in model.modules())
    assert torch.equal(call(model), before)


def test_copies_and_pickles_are_without_it() -> None:
    module, x = layer("Q4_K"), torch.randn(3, 512)
    expected = module(x)
    with patch_gguf(module):  # diffusers' parameters cannot be copied
        copied = copy.deepcopy(module, {id(module.weight): module.weight})
        stored = pickle.loads(pickle.dumps(copy.deepcopy(module, {id(module.weight): None})))
    assert copied.forward_native.__self__ is copied
    assert torch.equal(copied(x), expected)
    assert stored.forward_native.__func__ is GGUFLinear.forward_native


def test_memory_never_holds_the_expanded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer("Q4_K", 1024, 1024), torch.randn(4, 1024)
    whole = 4 * 1024 * 1024
    assert measure(module, x).extra_bytes > whole
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 1 << 16)
    with patch_gguf(module):
        assert measure(module, x).extra_bytes < whole / 4
        x.requires_grad_()
        assert measure(lambda: module(x).sum().backward()).extra_bytes < whole / 4


def test_adapters_are_trained_with_the_gradients_of_the_host(tmp_path: Path, slices: None) -> None:
    model, step = with_adapter(tmp_path)
    expected = step()
    with patch_gguf(model):
        for found, right in zip(step(), expected):
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level", "model"])
def test_beside_the_hooks_of_offloading(tmp_path: Path, slices: None, kind: str, is_before: bool) -> None:
    model, cpu = flux(tmp_path), torch.device("cpu")
    expected = call(model)
    patch = patch_gguf(model) if is_before else None
    if kind == "model":
        accelerate.cpu_offload_with_hook(model, cpu)
    else:
        diffusers.hooks.apply_group_offloading(model, cpu, cpu, offload_type=kind, num_blocks_per_group=1)
    with patch or patch_gguf(model) as patch:
        assert patch.sites > 10
        torch.testing.assert_close(call(model), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(call(model), expected)


def test_what_is_chosen_and_what_is_left_alone() -> None:
    other = layer("Q8_0")
    other.weight.quant_type = gguf.GGMLQuantizationType.IQ2_XXS
    model = nn.ModuleDict({"a": layer("Q8_0"), "b": layer("Q4_K"), "c": other, "d": nn.Linear(4, 4)})
    with patch_gguf(model, exclude="b") as patch:
        assert {state.name: state.state for state in patch.report().states} == {"a": "on", "c": "refused"}
        assert "IQ2_XXS is not one of Q4_0" in patch.left_alone["c"]
        with pytest.raises(ValueError, match="a: its product has been replaced already"):
            patch_gguf(model, include="a")
    assert [state.state for state in patch.report().states] == ["off", "refused"]
    with pytest.raises(ValueError, match="must have something to patch, got nothing"):
        patch_gguf(model["d"])


def test_layers_that_diffusers_own_kernels_compute_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "ops", object())
    with pytest.raises(ValueError, match=r"the model\): diffusers computes it by kernels of its own"):
        patch_gguf(layer("Q8_0"))


def test_a_layer_that_others_wrapped_while_patched_passes_calls_through(monkeypatch, caplog) -> None:
    module, x = layer("Q8_0"), torch.randn(3, 512)
    expected = module(x)
    with patch_gguf(module):
        inner = module.forward_native
        module.forward_native = lambda inputs: inner(inputs) + 1
    assert "ours stays underneath" in caplog.text
    monkeypatch.setattr(matrices, "slice_weights", lambda _: pytest.fail("still expanded by us"))
    assert torch.equal(module(x), expected + 1)


def test_a_weight_that_was_replaced_is_the_hosts() -> None:
    module, x = layer("Q8_0"), torch.randn(3, 512)
    with patch_gguf(module):
        module.weight = nn.Parameter(torch.randn(64, 512))
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))


@pytest.mark.parametrize("name", [name for name in FORMATS if not ways.why_not(name, 512)])
def test_int8_takes_layers_of_each_format(name: str) -> None:
    module, x = layer(name), torch.randn(2, 65, 512)
    x[..., ::64] *= 50  # eight channels
    parameter, before = module.weight, module(x)
    exact = nn.functional.linear(x, expand(parameter.as_tensor().view(-1, FORMATS[name].bytes), name).view(64, 512))
    with patch_linear_int8(module, include=GGUFLinear) as patch:
        out = module(x)
        (line,) = patch.report().lines
        assert (line.state, line.format, line.way, line.shape) == ("on", name, "int_mm", (64, 512))
        assert line.float_bytes == line.int8_bytes == parameter.numel()
        assert line.error == pytest.approx(error_of(out - module.bias, exact), rel=0.3)
        assert 0.002 < line.error < 0.015
        assert module.weight is parameter
        assert torch.equal(module(x), out)  # the call that is measured is computed in the same way
    assert torch.equal(module(x), before)
    assert "forward_native" not in vars(module)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_int8_on_a_whole_model_from_a_file(name: str, tmp_path: Path, slices: None) -> None:
    model = flux(tmp_path, name)
    parts, before = dict(model.named_parameters()), call(model)
    with patch_linear_int8(model) as patch:
        assert 0 < error_of(call(model), before) < 0.01
        report = patch.report()
        assert report.count("on") == report.able > 10
        assert all(value is parts[key] for key, value in model.named_parameters())
        assert re.search(r"GGUF weights [\d.]+ MiB, as the file has them", report.sentence())
        assert f"{name}, " in report.text()
    assert torch.equal(call(model), before)


def test_int8_leaves_what_it_cannot_take_and_what_errs_too_much() -> None:
    model = nn.ModuleDict({name: layer(name) for name in ("BF16", "Q2_K", "Q8_0")})
    x = torch.randn(9, 512)
    expected = model["Q8_0"](x)
    with patch_linear_int8(model, include=GGUFLinear, max_error=0.001) as patch:
        assert torch.equal(model["Q8_0"](x), expected)
        with pytest.raises(ValueError, match="its product has been replaced already"):
            patch_gguf(model["Q8_0"])
    whys = {line.name: (line.state, line.why) for line in patch.report().lines}
    assert whys["Q8_0"][0] == "refused"
    assert "is above 0.10%" in whys["Q8_0"][1]
    assert whys["BF16"] == ("unable", "its format BF16 holds no whole numbers")
    assert "Q2_K has a minimum for every 16 weights" in whys["Q2_K"][1]
    with patch_gguf(model), pytest.raises(ValueError, match="its product has been replaced already"):
        patch_linear_int8(model, include=GGUFLinear)


def test_int8_holds_no_expanded_weight_and_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer("Q4_K", 768, 512), torch.randn(4, 512)
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 1 << 15)
    patch = patch_linear_int8(module, include=GGUFLinear)
    for _ in range(2):  # measured, and not
        assert measure(module, x).extra_bytes < 4 * 512 * 768 / 2
    gone = weakref.ref(module)
    patch.remove()
    del module, patch
    gc.collect()
    assert gone() is None
