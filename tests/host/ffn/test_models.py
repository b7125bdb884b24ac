"""Feed-forward modules of real models are found, sliced, and change no output; what cannot be sliced is named."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import torch
import transformers
from torch import Tensor, nn

from pascal_attn_core.ffn import FfnReport, patch_ffn
from tools.families import families
from tools.families.proof import outputs


def _same_output_sliced(model: nn.Module, call: Callable[[nn.Module], Tensor], tokens: int = 8) -> FfnReport:
    torch.manual_seed(0)
    for parameter in model.parameters():  # the tiny defaults are so small that nothing shows in the output
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    model.eval()
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = call(model)
        with patch_ffn(model, chunk_tokens=tokens, min_tokens=tokens) as patch:
            torch.testing.assert_close(call(model), expected, rtol=1e-4, atol=1e-4)
            report = patch.report()
            assert list(model.state_dict()) == keys
        assert torch.equal(call(model), expected)
    return report


DIFFUSERS = {
    "FluxTransformer2DModel": (2, 1),
    "WanTransformer3DModel (text to video)": (1, 0),
    "SD3Transformer2DModel (SD3)": (3, 0),
    "LTXVideoTransformer3DModel": (1, 0),
    "UNet2DConditionModel (Stable Diffusion 1.5)": (4, 0),
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers_models(name: str) -> None:
    chunked, cannot = DIFFUSERS[name]
    family = next(family for family in families() if family.name == name)
    report = _same_output_sliced(family.build(), lambda model: outputs(family, model), tokens=4)
    counts = report.count("on"), report.count("unable"), len(report.lines)
    assert counts == (chunked, cannot, chunked + cannot), report.text()
    if cannot:
        assert "single_transformer_blocks.0 (FluxSingleTransformerBlock)" in report.text()


IDS_OF_TEXT = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, **IDS_OF_TEXT,
}  # fmt: skip


def _transformers(name: str, **sizes: Any) -> nn.Module:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def _logits(model: nn.Module) -> Tensor:
    out = model(input_ids=torch.randint(0, 90, (2, 48), generator=torch.Generator().manual_seed(0)))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((f"{name}ForCausalLM", SMALL) for name in ("Llama", "Gemma2", "Qwen2", "Phi3")),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),  # its linear layers differ
        ("T5EncoderModel", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "feed_forward_proj": "gated-gelu"}),
    ],
)
def test_models_of_transformers(name: str, sizes: dict[str, Any]) -> None:
    report = _same_output_sliced(_transformers(name, **{"vocab_size": 100, **IDS_OF_TEXT, **sizes}), _logits)
    assert (report.count("on"), len(report.lines)) == (2, 2), report.text()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: diffusers.SanaTransformer2DModel(num_layers=1), r"got .*: .*convolution"),
        (lambda: _transformers("MixtralForCausalLM", **SMALL, num_local_experts=4), r"got .*: .*experts"),
    ],
    ids=["convolutions", "experts"],
)
def test_what_cannot_be_sliced_is_named(make: Callable[[], nn.Module], words: str) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match=words):
        patch_ffn(model)


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
            names = ["0.shared_experts", *(f"0.experts.{place}" for place in range(4))]
            assert [line.name for line in report.lines] == names, report.text()
            assert report.count("on") == 5, report.text()
