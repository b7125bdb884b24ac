"""flash-attn's attention modules against plain attention."""

from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, Largest, assert_same_gradients, plain, rand

from pascal_attn_core.flash_attn.modules import inner_attention as inner
from pascal_attn_core.flash_attn.modules.mha import MHA, LinearResidual


def test_alibi_slopes() -> None:
    assert inner.get_alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    assert inner.get_alibi_slopes(1) == pytest.approx([2.0**-8])
    assert inner.get_alibi_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_modules(causal: bool) -> None:
    slopes = torch.tensor(inner.get_alibi_slopes(2))
    options: dict[str, Any] = {"softmax_scale": 0.4, "window_size": (3, 3), "alibi_slopes": slopes}
    qkv, kv = rand(2, 6, 3, 2, 8), rand(2, 9, 2, 2, 8)
    alone = inner.FlashSelfAttention(causal, **options)
    assert not alone.state_dict()
    torch.testing.assert_close(alone(qkv), plain(*qkv.unbind(2), causal=causal, **options)[0])
    torch.testing.assert_close(alone(qkv, causal=not causal), plain(*qkv.unbind(2), causal=not causal, **options)[0])
    cross = inner.FlashCrossAttention(causal, **options)
    torch.testing.assert_close(cross(qkv[:, :, 0], kv), plain(qkv[:, :, 0], *kv.unbind(2), causal=causal, **options)[0])
    ends, ends_k = torch.tensor([0, 4, 6]).int(), torch.tensor([0, 2, 9]).int()
    packed = alone(qkv[0], cu_seqlens=ends, max_seqlen=4)
    torch.testing.assert_close(packed[:4], alone(qkv[:1, :4])[0])
    packed = cross(qkv[0, :, 0], kv[0], None, ends, 4, ends_k, 7)
    torch.testing.assert_close(packed[4:], cross(qkv[:1, 4:6, 0], kv[:1, 2:9])[0])
    with pytest.raises(ValueError, match="cu_seqlens_k must be given"):
        cross(qkv[0, :, 0], kv[0], None, ends, 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_modules_with_padding(causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    qkv, q, kv = rand(2, 5, 3, 4, 8).requires_grad_(), rand(2, 3, 4, 8), rand(2, 7, 2, 2, 8)
    keep, keep_k = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool)
    if padded:
        keep[0, :2], keep_k[1, 5:] = False, False
    mask, mask_k = (keep, keep_k) if padded else (None, None)
    out = inner.SelfAttention(causal)(qkv, key_padding_mask=mask)
    for b in range(2):
        expected, _ = plain(*(t[b : b + 1, keep[b]] for t in qkv.unbind(2)), causal=causal)
        torch.testing.assert_close(out[b, keep[b]], expected[0])
    out.pow(2).sum().backward()
    assert qkv.grad.isfinite().all()
    cross = inner.CrossAttention(causal)(q, kv, key_padding_mask=mask_k)
    for b in range(2):
        expected, _ = plain(q[b : b + 1], *(t[b : b + 1, keep_k[b]] for t in kv.unbind(2)), causal=causal)
        torch.testing.assert_close(cross[b], expected[0])
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        inner.SelfAttention()(qkv, key_padding_mask=keep.int())
    with pytest.raises(ValueError, match=r"key_padding_mask must be \[2, 5\]"):
        inner.SelfAttention()(qkv, key_padding_mask=keep_k)


def test_padding_never_makes_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 3000
    q, kv = torch.randn(1, tokens, 1, 8), torch.randn(1, tokens, 2, 1, 8)
    keep = torch.ones(1, tokens, dtype=torch.bool)
    keep[:, -100:] = False
    with Largest() as seen, torch.no_grad():
        inner.CrossAttention(causal=True)(q, kv, key_padding_mask=keep)
        inner.SelfAttention(causal=True)(torch.randn(1, tokens, 3, 1, 8), key_padding_mask=keep)
    assert seen.elements < tokens * tokens // 2


LAYERS: list[dict[str, Any]] = [
    {},
    {"num_heads_kv": 2, "causal": True},
    {"use_flash_attn": True, "use_alibi": True, "window_size": (4, 0), "causal": True},
    {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "causal": True, "qkv_proj_bias": False},
    {"rotary_emb_dim": 2, "num_heads_kv": 1, "use_flash_attn": True, "checkpointing": True},
    {"return_residual": True, "checkpointing": True},
]


@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_is_its_parts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MHA(32, 4, dtype=F64, **options)
    layer.double()
    x = rand(2, 6, 32).requires_grad_()
    heads_kv = options.get("num_heads_kv", 4)
    qkv = layer.Wqkv(x)
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in qkv.split([32, 8 * heads_kv, 8 * heads_kv], -1))
    if options.get("rotary_emb_dim"):
        q, kv = layer.rotary_emb(q.clone(), torch.stack([k, v], 2))
        k, v = kv.unbind(2)
    rule = {name: options[name] for name in ("causal", "window_size") if name in options}
    slopes = torch.tensor(inner.get_alibi_slopes(4), dtype=F64) if options.get("use_alibi") else None
    expected, _ = plain(q, k, v, alibi_slopes=slopes, **rule)
    expected = layer.out_proj(expected.flatten(-2))
    out = layer(x)
    if options.get("return_residual"):
        assert out[1] is x
        out = out[0]
    torch.testing.assert_close(out, expected)
    leaves = [x, *layer.parameters()]
    assert_same_gradients(out, leaves, expected, leaves, 1e-7)


def test_what_a_checkpoint_is_called() -> None:
    ends = ["weight", "bias"]
    names = {
        (): ["Wqkv", "out_proj"],
        (("cross_attn", True),): ["Wq", "Wkv", "out_proj"],
        (("use_alibi", True), ("use_flash_attn", True), ("rotary_emb_dim", 8)): ["Wqkv", "out_proj"],
    }
    for options, parts in names.items():
        assert list(MHA(32, 4, **dict(options)).state_dict()) == [f"{part}.{end}" for part in parts for end in ends]  # type: ignore[arg-type]


def test_sequences_of_different_lengths_and_cross_attention() -> None:
    ends = torch.tensor([0, 4, 4, 6]).int()
    for heads_kv in (4, 2):
        layer = MHA(32, 4, heads_kv, causal=True, use_flash_attn=True, dtype=F64)
        x = rand(6, 32)
        out = layer(x, cu_seqlens=ends, max_seqlen=4)
        torch.testing.assert_close(out, torch.cat([layer(x[None, :4])[0], layer(x[None, 4:])[0]]))
    cross = MHA(32, 4, 2, cross_attn=True, dtype=F64)
    x, other = rand(2, 3, 32), rand(2, 5, 32)
    kv = cross.Wkv(other).unflatten(-1, (2, 2, 8))
    expected = plain(cross.Wq(x).unflatten(-1, (4, 8)), *kv.unbind(2))[0]
    torch.testing.assert_close(cross(x, other), cross.out_proj(expected.flatten(-2)))
    out, residual = LinearResidual(3, 2)(x[..., :3].float())
    assert (out.shape, residual.shape) == ((2, 3, 2), (2, 3, 3))


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_heads": 5}, {}, "embed_dim must be a multiple of num_heads"),
    ({"num_heads_kv": 3}, {}, "num_heads must be a multiple of num_heads_kv"),
    ({"use_alibi": True}, {}, "need use_flash_attn=True"),
    ({"cross_attn": True, "rotary_emb_dim": 4}, {}, "rotary_emb_dim must be 0 with cross_attn"),
    ({}, {"x_kv": torch.zeros(1, 2, 32)}, "must be None without cross_attn"),
    ({}, {"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens needs use_flash_attn"),
    ({"use_flash_attn": True}, {"cu_seqlens": torch.tensor([0, 2])}, "max_seqlen must be given"),
    ({"use_flash_attn": True}, {"key_padding_mask": torch.ones(1, 2).bool()}, "unpad the input instead"),
]


@pytest.mark.parametrize(("options", "arguments", "words"), WRONG)
def test_what_does_not_fit_is_refused(options: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MHA(**{"embed_dim": 32, "num_heads": 4, **options})(torch.zeros(1, 2, 32), **arguments)
    for name in ("inference_params", "mixer_subset"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            MHA(32, 4)(torch.zeros(1, 2, 32), **{name: object()})
