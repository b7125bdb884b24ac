"""int8 linear layers beside what diffusers, peft, accelerate and transformers do to a model."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch
from attn_support.randomness import some
from attn_support.tiny_pipelines import SOME
from torch import Tensor, nn

from pascal_attn_core import patch_attention_int8, patch_ffn, patch_linear_int8
from pascal_attn_core.diffusers import PascalAttnProcessor
from pascal_attn_core.int8 import Int8Weight
from pascal_attn_core.int8.attention import find_attention
from pascal_attn_core.int8.stored import FLOATS_8
from pascal_attn_core.patching.forward import ReplacedForward
from tools import int8_files_table, int8_table
from tools.families.proof import outputs

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["to_q", "to_k", "to_v"]}


def difference(out: Tensor, expected: Tensor) -> float:
    return ((out - expected).float().norm() / expected.float().norm()).item()


@pytest.fixture
def unet() -> nn.Module:
    torch.manual_seed(0)
    model, _ = int8_table.MODELS["SDXL UNet"]()
    return model.eval().requires_grad_(False)


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


@pytest.mark.parametrize("name", SOME)
def test_every_layer_of_a_family_and_back(name: str, tiny: Any) -> None:
    family = tiny.family(name)
    model = family.build()
    expected = outputs(family, model)
    with patch_linear_int8(model, include="*", max_error=1.0) as patch:
        out = outputs(family, model)
        report = patch.report()
    assert report.count("int8") >= 0.9 * len(report.lines) - 1
    assert 0 < difference(out, expected) < 0.3  # the layers of these models are a few numbers wide
    assert torch.equal(outputs(family, model), expected)


@pytest.mark.parametrize("name", SOME)
def test_every_attention_layer_of_a_family_and_back(name: str, tiny: Any) -> None:
    family = tiny.family(name)
    model = family.build()
    expected = outputs(family, model)
    with patch_attention_int8(model, max_error=1.0) as patch:
        out = outputs(family, model)
        report = patch.report()
    exact = {line.why for line in report.lines if line.state != "int8"}
    assert all(why.startswith(("the int8 mode has no float mask", "head_dim must be a multiple of 4")) for why in exact)
    assert report.count("int8") or exact
    assert (difference(out, expected) > 0) == bool(report.count("int8"))
    assert difference(out, expected) < 0.05
    assert torch.equal(outputs(family, model), expected)


@pytest.mark.parametrize(("name", "layers"), some([("Flux", 4), ("SDXL UNet", 24), ("Wan", 6)], 2))
@torch.no_grad()
def test_lora_hooks_limits_and_both_patches_at_once(name: str, layers: int) -> None:
    """Hooks of accelerate are there first and removed meanwhile, or put over the patch; both leave it in place."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    torch.manual_seed(1)
    model, call = int8_table.MODELS[name]()
    model.add_adapter(peft.LoraConfig(**LORA))
    model.eval().requires_grad_(False)
    expected = call(model, torch.float32)
    found = [module for _, module in find_attention(model)]
    for module in found[::2]:
        hooks.add_hook_to_module(module, hooks.ModelHook())
    with patch_attention_int8(model) as attention, patch_linear_int8(model) as linear:
        first = call(model, torch.float32)
        for number, module in enumerate(found):
            (hooks.add_hook_to_module if number % 2 else hooks.remove_hook_from_module)(
                module, *[hooks.ModelHook()] * (number % 2)
            )
        out = call(model, torch.float32)
        assert attention.report().count("int8") == len(attention.report().lines) == layers
        assert {line.calls for line in attention.report().lines} == {2}
        assert linear.report().count("int8") > 4 * layers
    assert 0 < difference(out, expected) < 0.02
    assert 0 < difference(first, expected) < 0.02
    for module in found[1::2]:
        hooks.remove_hook_from_module(module)
    assert torch.equal(call(model, torch.float32), expected)
    assert not any(isinstance(vars(module).get("forward"), ReplacedForward) for module in found)
    with patch_attention_int8(model, max_error=0) as attention:
        torch.testing.assert_close(call(model, torch.float32), expected, rtol=1e-4, atol=1e-4)
        assert attention.report().count("float") == layers


@pytest.mark.parametrize("name", some(int8_table.MODELS, 2))
def test_whole_models_err_no_more_than_in_bfloat16(name: str) -> None:
    with torch.no_grad():
        errors, report = int8_table.errors_of(name, seed=0)
    assert report.count("int8") > 0.6 * len(report.lines)
    assert errors["float32"] < 1e-5 < errors["int8, rest in float32"] < errors["bfloat16"]
    assert errors["int8, rest in float16"] < errors["bfloat16"]
    assert errors["float32"] < 1e-5 < errors["int8 attention"] < errors["bfloat16"]
    assert report.median_error is not None
    assert report.median_error < 0.01


@pytest.mark.parametrize(("model", "file"), [("Flux", "Q4_K"), ("Z-Image", "float8_e4m3fn")])
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
        assert len([line for line in report.of("int8") if line.format == file]) > 20
        assert report.worst is not None
        assert 0.004 < report.worst.error < 0.015


def test_the_blocks_of_the_table_are_near_their_weights() -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    weights = torch.randn(8, 256)
    blocks = int8_files_table.q4_k(weights).numpy()
    expanded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    assert difference(torch.from_numpy(expanded), weights) < 0.1


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_stays_in_float(unet: nn.Module, when: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = run(unet)
    torch.manual_seed(1)
    if when == "before":
        unet.add_adapter(peft.LoraConfig(**LORA))
        unet.eval()
    patch = patch_linear_int8(unet)
    run(unet)
    if when == "after":
        unet.add_adapter(peft.LoraConfig(**LORA))
        unet.eval()
    out = run(unet)
    names = {line.name for line in patch.report().of("int8")}
    assert not any("lora_" in name for name in names)
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert isinstance(layer.base_layer.weight, Int8Weight)
    assert type(layer.lora_A["default"].weight) is nn.Parameter
    unet.disable_adapters()
    assert difference(run(unet), base) < 0.02
    unet.enable_adapters()
    patch.remove()
    expected = run(unet)
    assert difference(expected, base) > 0.1
    assert difference(out, expected) < 0.02


@pytest.mark.parametrize("is_safe", [False, True])
def test_adapters_are_fused_into_rounded_weights_and_taken_out(unet: nn.Module, is_safe: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    base = run(unet)
    unet.add_adapter(peft.LoraConfig(**LORA))
    unet.eval()
    expected = run(unet)
    patch = patch_linear_int8(unet)
    run(unet)
    unet.fuse_lora(safe_fusing=is_safe)
    assert difference(run(unet), expected) < 0.02
    unet.unfuse_lora()
    assert difference(run(unet), expected) < 0.02
    patch.remove()
    assert difference(run(unet), expected) < 1e-5
    unet.disable_adapters()
    assert difference(run(unet), base) < 1e-5


def test_training_an_adapter_over_rounded_weights(unet: nn.Module) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    patch = patch_linear_int8(unet)
    run(unet)
    torch.manual_seed(1)
    unet.add_adapter(peft.LoraConfig(**LORA))
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
    assert max(difference(found[name], expected[name]) for name in found) < 0.15
    assert sum(difference(found[name], expected[name]) for name in found) / len(found) < 0.05


def test_with_our_attention_and_chunked_feed_forward(unet: nn.Module) -> None:
    expected = run(unet)
    unet.set_attn_processor(PascalAttnProcessor())
    chunks, patch = patch_ffn(unet, num_chunks=2, min_tokens=32), patch_linear_int8(unet)
    out = [run(unet) for _ in range(3)]
    assert torch.equal(out[1], out[2])
    assert difference(out[2], expected) < 0.02
    assert chunks.report().count("chunked") > 0
    assert patch.report().count("int8") > 0


@pytest.mark.parametrize(("offload", "is_first"), [("leaf_level", False), ("block_level", True)])
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
    assert patch.report().count("int8") > 100
    assert torch.equal(run(unet), out)
    assert 0 < difference(out, expected) < 0.02


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", FLOATS_8, ids=str)
def test_weights_that_are_cast_for_each_call_are_taken(unet: nn.Module, dtype: torch.dtype, is_first: bool) -> None:
    patch = patch_linear_int8(unet) if is_first else None
    if is_first:
        run(unet)
    unet.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=torch.float32)
    patch = patch or patch_linear_int8(unet)
    out = run(unet)
    assert patch.report().count("int8") > 100
    formats = {line.format for line in patch.report().of("int8")}
    assert formats == {"float32" if is_first else str(dtype).removeprefix("torch.")}
    assert torch.equal(run(unet), out)
    patch.remove()
    assert {type(each) for each in unet.parameters()} == {nn.Parameter}
    expected = run(unet)
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight.dtype == dtype
    # Rounded to 8-bit floats now, weights that were rounded to integers before are other numbers.
    assert 0 < difference(out, expected) < (0.2 if is_first else 0.02)


def test_sequential_offload_brings_the_float_weights_back_and_the_report_says_so(unet: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = run(unet)
    patch = patch_linear_int8(unet)
    run(unet)
    accelerate.cpu_offload(unet, execution_device=CPU, offload_buffers=True)
    assert torch.equal(run(unet), expected)
    report = patch.report()
    assert report.count("int8") == 0
    assert "its weight was replaced" in report.of("float")[0].why
    patch.remove()
    assert torch.equal(run(unet), expected)


def test_offloaded_before_it_waits_and_says_why(unet: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = run(unet)
    accelerate.cpu_offload(unet, execution_device=CPU, offload_buffers=True)
    patch = patch_linear_int8(unet)
    assert torch.equal(run(unet), expected)
    assert {line.why for line in patch.report().of("waiting")} == {
        "its weight is absent when it is called: a hook loads it"
    }


def test_saved_models_have_float_weights(unet: nn.Module, tmp_path: Path) -> None:
    expected = run(unet)
    patch_linear_int8(unet)
    run(unet)
    unet.save_pretrained(tmp_path)
    assert torch.equal(run(type(unet).from_pretrained(tmp_path)), expected)


def test_a_language_model_generates() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 100, (1, 12))
    with torch.no_grad():
        expected = model(tokens).logits
        patch = patch_linear_int8(model, weights="free")
        out = model(tokens).logits
    report = patch.report()
    assert [line.name for line in report.lines if line.state != "int8"] == ["lm_head"]
    assert 0 < difference(out, expected) < 0.03
    generated = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 17)
    with torch.no_grad():  # with and without the cache, so with one row and with many
        assert torch.equal(model(generated[:, :-1]).logits.argmax(-1)[:, 11:], generated[:, 12:])
