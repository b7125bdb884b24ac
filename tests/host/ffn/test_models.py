"""Feed-forward modules of real models are found, sliced, and change no output; what cannot be sliced is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pascal_attn_core.ffn import FfnReport, patch_ffn

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 90, (2, 48), generator=torch.Generator().manual_seed(0))


def _same_output_sliced(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> FfnReport:
    torch.manual_seed(0)
    for parameter in model.parameters():  # the tiny defaults are so small that nothing shows in the output
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    model.eval()
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = call(model)
        with patch_ffn(model, chunk_tokens=8, min_tokens=8) as patch:
            torch.testing.assert_close(call(model), expected, rtol=1e-4, atol=1e-4)
            report = patch.report()
            assert list(model.state_dict()) == keys
        assert torch.equal(call(model), expected)
    return report


# --- diffusers ---


def _flux() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 24, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(24, 3),
    }  # fmt: skip
    return model, inputs


def _wan() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=256, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }  # fmt: skip
    return model, inputs


def _sd3() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 12, 32),
        "pooled_projections": torch.randn(1, 64), "timestep": torch.tensor([1.0]),
    }  # fmt: skip
    return model, inputs


def _ltx() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=1, caption_channels=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 32, 8), "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([1.0]), "encoder_attention_mask": torch.ones(1, 12),
        "num_frames": 2, "height": 4, "width": 4,
    }  # fmt: skip
    return model, inputs


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": 1, "encoder_hidden_states": torch.randn(2, 7, 16)}
    return model, inputs


@pytest.mark.parametrize(
    ("make", "chunked", "cannot"),
    [(_flux, 2, 2), (_wan, 2, 0), (_sd3, 3, 0), (_ltx, 1, 0), (_unet, 4, 0)],
    ids=["Flux", "Wan", "SD3", "LTX", "UNet"],
)
def test_diffusers_models(make: Callable[[], tuple[nn.Module, dict]], chunked: int, cannot: int) -> None:
    model, inputs = make()
    report = _same_output_sliced(model, lambda model: model(**inputs, return_dict=False)[0])
    assert report.count("chunked") == chunked, report.text()
    assert report.count("cannot be") == cannot, report.text()
    assert len(report.lines) == chunked + cannot
    if cannot:
        assert "single_transformer_blocks.0 and 1 more (FluxSingleTransformerBlock)" in report.text()


def test_convolutional_feed_forwards_are_named() -> None:
    with torch.device("meta"):
        model = diffusers.SanaTransformer2DModel(num_layers=1)
    with pytest.raises(ValueError, match=r"got .*: .*convolution"):
        patch_ffn(model)


# --- Transformers ---

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS_OF_TEXT = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _logits(model: nn.Module) -> Tensor:
    out = model(input_ids=IDS)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen2", "Phi3"])
def test_decoders_of_transformers(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL)
    report = _same_output_sliced(getattr(transformers, f"{name}ForCausalLM")(config), _logits)
    assert (report.count("chunked"), len(report.lines)) == (2, 2), report.text()


def test_gpt2_and_its_linear_layers_by_another_name() -> None:
    config = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, **IDS_OF_TEXT)
    report = _same_output_sliced(transformers.GPT2LMHeadModel(config), _logits)
    assert [line.name for line in report.lines] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert report.count("chunked") == 2


def test_t5_encoder() -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    report = _same_output_sliced(transformers.T5EncoderModel(config), _logits)
    assert (report.count("chunked"), len(report.lines)) == (2, 2), report.text()


def test_bert_pairs_are_named_with_the_models_own_remedy() -> None:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ValueError, match=r"got encoder\.layer\.0: .*chunk_size_feed_forward"):
        patch_ffn(transformers.BertModel(config))


def test_mixtures_of_experts_are_named_and_left_alone() -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    with pytest.raises(ValueError, match=r"got .*: .*experts"):
        patch_ffn(transformers.MixtralForCausalLM(config))


def test_generation_gives_the_same_tokens() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    expected = model.generate(IDS[:1], max_new_tokens=8, do_sample=False)
    with patch_ffn(model, chunk_tokens=8, min_tokens=8) as patch:
        assert torch.equal(model.generate(IDS[:1], max_new_tokens=8, do_sample=False), expected)
        assert patch.report().count("chunked") == 2


# --- mixtures, quantised weights, adapters ---


def test_the_experts_of_a_mixture_are_sliced_each_by_itself() -> None:
    hidream = pytest.importorskip("diffusers.models.transformers.transformer_hidream_image")
    torch.manual_seed(0)
    mixture = nn.Sequential(hidream.MOEFeedForwardSwiGLU(64, 256, 4, 2)).eval()
    nn.init.normal_(mixture[0].gate.weight)
    inputs = [torch.randn(2, tokens, 64) for tokens in (384, 300, 384, 512)]
    with torch.no_grad():
        expected = [mixture(x) for x in inputs]
        for include in (None, "0"):
            with patch_ffn(mixture, include=include, chunk_tokens=64, min_tokens=8) as patch:
                for x, wanted in zip(inputs, expected):
                    torch.testing.assert_close(mixture(x), wanted, rtol=1e-4, atol=1e-5)
                report = patch.report()
            assert [line.name for line in report.lines] == [
                "0.shared_experts",
                *(f"0.experts.{place}" for place in range(4)),
            ], report.text()
            assert report.count("chunked") == 5, report.text()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_weights_quantised_by_quanto(kind: str, grad: bool) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = nn.Sequential(diffusers.models.attention.FeedForward(64, activation_fn="geglu")).eval()
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    model.requires_grad_(False)
    x = torch.randn(2, 384, 64, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        with patch_ffn(model, include="0", chunk_tokens=100) as patch:
            out = model(x)
            assert patch.report().count("chunked") == 1, patch.report().text()
    torch.testing.assert_close(out, expected)
    if grad:
        wanted, found = (torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, out))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("grad", [False, True])
def test_loha(grad: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(diffusers.models.attention.FeedForward(64, activation_fn="geglu"))
    config = peft.LoHaConfig(r=4, target_modules=["proj", "net.2"], init_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    x = torch.randn(2, 384, 64)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with torch.set_grad_enabled(grad):
        expected = adapted(x)
        with patch_ffn(adapted.base_model.model, include="0", chunk_tokens=100) as patch:
            out = adapted(x)
            assert patch.report().count("chunked") == 1, patch.report().text()
    torch.testing.assert_close(out, expected)
    if grad:
        wanted, found = (torch.autograd.grad(y.square().mean(), trained) for y in (expected, out))
        for one, two in zip(found, wanted):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * two.abs().max().item())
        adapted.train()  # it draws a number in each call, to drop the adapter or not
        with patch_ffn(adapted.base_model.model, include="0", chunk_tokens=100) as patch:
            adapted(x)
            assert patch.report().count("refused") == 1, patch.report().text()
