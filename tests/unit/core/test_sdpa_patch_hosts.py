"""The process-wide switch under other machinery: modes, torch's modules, checkpoints, compilers, models of others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from attn_support.sdpa_switch import TILED, TORCH, qkv, served, torch_stays_torch  # noqa: F401
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as taken_by_name
from torch.overrides import TorchFunctionMode

from pascal_attn_core import AttentionConfig, record
from pascal_attn_core.sdpa_patch import disable, enable, patch_sdpa


class Watch(TorchFunctionMode):
    """Somebody else's mode, as diffusers has one for skipped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_modes_of_others_see_the_call_once_under_torchs_name() -> None:
    q, k, v = qkv(tokens=40)
    enable(TILED)
    with Watch() as watch:
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))
    assert watch.calls == 1
    with torch.device("cpu"):
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("switch", [enable, patch_sdpa])
def test_torchs_own_transformer_keeps_working(batch_first: bool, train: bool, switch: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).train(train)
    x = torch.randn(3, 7, 16) if batch_first else torch.randn(7, 3, 16)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    cases: list[dict[str, Any]] = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    for case in cases:
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                expected = model(x, **case)
                with switch(TILED) or contextlib.nullcontext():
                    actual = model(x, **case)
                disable()
            keep = torch.ones(3, 7, dtype=torch.bool) if "src_key_padding_mask" not in case else ~padding
            keep = keep if batch_first else keep.T
            torch.testing.assert_close(actual[keep], expected[keep])
    if train:
        with patch_sdpa(TILED):
            assert served(lambda: model(x).sum().backward())


class Block(nn.Module):
    """Attention by the attribute and by the name, as models have it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + taken_by_name(q, k, y, scale=0.1)


def test_compiled_models_follow_the_switch() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 20, 24)
    model = Block()
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert not served(lambda: compiled(x))
    enable(TILED)
    with record() as seen:
        torch.testing.assert_close(compiled(x), expected)
    assert seen.routes() == {"tiled": 1}
    disable()
    assert not served(lambda: compiled(x))
    with patch_sdpa(TILED), record() as seen:
        torch.testing.assert_close(compiled(x), expected)
    assert seen.routes() == {"tiled": 2}
    assert not served(lambda: compiled(x))


@pytest.mark.torch_2_5
def test_torchscript_and_traces_hold_torchs_operator() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = qkv()
    expected = TORCH(q, k, v)
    with patch_sdpa(TILED):
        scripted = torch.jit.script(attend)
        traced = torch.jit.trace(attend, (q, k, v))
        exported = torch.export.export(Block(), (torch.randn(1, 2, 20, 24),))
    for function in (scripted, traced):
        torch.testing.assert_close(function(q, k, v), expected)
        assert "aten::scaled_dot_product_attention" in str(function.inlined_graph)
    assert "pascal" not in str(exported.graph)


def test_a_scripted_multihead_attention_compiles_under_the_switch() -> None:
    enable()
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(torch.jit.script(model)(x, x, x)[0], model(x, x, x)[0])


def test_transformers_models_give_the_same_under_the_switch() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    tokens = torch.randint(0, 64, (2, 10))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        enable(TILED)
        with record() as seen:
            actual = model(tokens, attention_mask=mask).logits
        assert seen.routes() == {"tiled": 2}
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
        again = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, generated)


def test_diffusers_models_give_the_same_under_the_switch() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 8)
    with torch.no_grad():
        expected = model(x, 3, text).sample
        with patch_sdpa(TILED), record() as seen:
            actual = model(x, 3, text).sample
    assert seen.routes().keys() == {"tiled"}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_patched_pipeline_decides_over_the_switch() -> None:
    redirect = pytest.importorskip("pascal_attn_core.diffusers.redirect")
    q, k, v = qkv()
    enable(AttentionConfig(route="math"))
    with redirect.SdpaRedirect(TILED).mode, record() as seen:
        F.scaled_dot_product_attention(q, k, v)
    assert seen.routes() == {"tiled": 1}
