"""flash-attn's attention modules against plain attention; generation with a cache against generation without."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, Largest, assert_same_gradients, plain, rand
from torch import Tensor, nn

from pascal_attn_core.flash_attn.modules import generation
from pascal_attn_core.flash_attn.modules import inner_attention as inner
from pascal_attn_core.flash_attn.modules.mha import MHA, LinearResidual, update_kv_cache


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
    torch.testing.assert_close(cross(x, other, mixer_subset=slice(0, 1)), cross(x, other)[:, :1])
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
    ({}, {"inference_params": generation.InferenceParams(4, 1)}, "layer_idx must be given"),
    ({"layer_idx": 0}, {"inference_params": generation.InferenceParams(1, 1)}, "the cache must have room"),
    ({"layer_idx": 0}, {"inference_params": generation.InferenceParams(4, 1, 2)}, "has no cache"),
]


@pytest.mark.parametrize(("options", "arguments", "words"), WRONG)
def test_what_does_not_fit_is_refused(options: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MHA(**{"embed_dim": 32, "num_heads": 4, **options})(torch.zeros(1, 2, 32), **arguments)


class Tiny(nn.Module, generation.GenerationMixin):
    def __init__(self, **options: Any):
        super().__init__()
        self.embed = nn.Embedding(11, 32, dtype=F64)
        self.layers = nn.ModuleList(MHA(32, 4, causal=True, layer_idx=i, dtype=F64, **options) for i in range(2))
        self.head = nn.Linear(32, 11, dtype=F64)

    def forward(
        self, ids: Tensor, position_ids: Any = None, inference_params: Any = None, num_last_tokens: int = 0
    ) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, inference_params=inference_params)
        return SimpleNamespace(logits=self.head(x[:, -num_last_tokens:]))


GENERATING: list[dict[str, Any]] = [
    {},
    {"use_flash_attn": True},
    {"use_flash_attn": True, "rotary_emb_dim": 8, "num_heads_kv": 2},
    {"rotary_emb_dim": 4, "rotary_emb_interleaved": True},
    {"use_flash_attn": True, "use_alibi": True, "window_size": (3, 0)},
]


@pytest.mark.parametrize("options", GENERATING)
def test_generation_with_a_cache(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, ids = Tiny(**options).eval(), torch.randint(0, 11, (2, 3))
    result = model.generate(ids, 9, return_dict_in_generate=True, output_scores=True)
    assert result.sequences.shape == (2, 9)
    tokens = ids
    with torch.no_grad():
        for scores in result.scores:
            logits = model(tokens).logits[:, -1]
            torch.testing.assert_close(scores, logits)
            tokens = torch.cat([tokens, logits.argmax(-1)[:, None]], 1)
    assert torch.equal(tokens, result.sequences)
    taught = generation.decode(ids, model, 9, teacher_outputs=tokens.flip(0)[:, :5])
    assert torch.equal(taught.sequences[:, 3:5], tokens.flip(0)[:, 3:5])
    end = int(tokens[0, 4])
    assert generation.decode(ids[:1], model, 9, eos_token_id=end).sequences.shape[1] <= 9
    assert model.generate(ids, 9, top_k=4, top_p=0.8, temperature=0.5, vocab_size=7).max() < 11
    with pytest.raises(NotImplementedError, match="cg is not supported"):
        generation.decode(ids, model, 9, cg=True)


@pytest.mark.parametrize("use_flash_attn", [False, True])
def test_sequences_that_differ_in_length_and_several_tokens_at_once(use_flash_attn: bool) -> None:
    torch.manual_seed(0)
    layer = MHA(32, 4, causal=True, layer_idx="a", rotary_emb_dim=8, use_flash_attn=use_flash_attn, dtype=F64)  # type: ignore[arg-type]
    x = rand(2, 8, 32)
    lengths = torch.tensor([3, 5]).int()
    params = generation.InferenceParams(10, 4, batch_size_offset=1)
    with torch.no_grad():
        layer(x[:, :5], inference_params=params)
        params.seqlen_offset, params.lengths_per_sample = 5, torch.tensor([9, 3, 5, 9]).int()
        with pytest.raises(ValueError, match="seqlen_offsets"):
            layer(x[:, :2], inference_params=params)
    params = generation.InferenceParams(10, 2)
    with torch.no_grad():
        layer(x[:, :5], inference_params=params)
        params.seqlen_offset, params.lengths_per_sample = 5, lengths
        new = torch.stack([x[0, 3:6], x[1, 5:8]])
        out = layer(new, inference_params=params)
        expected = layer(x[:1, :6])[0, 3:], layer(x[1:])[0, 5:]
    torch.testing.assert_close(out, torch.stack(expected))
    params.reset(6, 1)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (6, 1, 0)
    assert not params.lengths_per_sample.any()


def test_the_cache_itself() -> None:
    layer = MHA(32, 4, 2, layer_idx=0, dtype=torch.bfloat16)
    assert layer.allocate_inference_cache(3, 7).shape == (3, 7, 2, 2, 8)
    assert layer.allocate_inference_cache(3, 7).dtype == torch.bfloat16
    caches = generation.allocate_inference_cache(3, 7, 2, 8, 2, "cpu", torch.float32)
    assert list(caches) == [0, 1]
    params = generation.InferenceParams(7, 3, 2, 1, caches)
    kv = torch.randn(2, 3, 2, 2, 8)
    seen = update_kv_cache(kv, params, 1)
    assert seen.shape == (2, 5, 2, 2, 8)
    assert torch.equal(caches[1][1:3, 2:5], kv)
    assert generation.allocate_inference_cache(1, 2, 1, 4, ["x"], "cpu")["x"].dtype == torch.float16


def test_sampling() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(4000, 4)
    assert set(generation.sample(logits).tolist()) == {1}
    assert set(generation.sample(logits, top_k=2).tolist()) == {1, 2}
    counts = generation.sample(logits, top_k=0, temperature=2.0).bincount() / 4000
    torch.testing.assert_close(counts, (logits[0] / 2).softmax(0), atol=0.03, rtol=0)
    assert set(generation.sample(logits, top_k=0, top_p=0.7).tolist()) == {1, 2}
    assert torch.equal(logits[0], torch.tensor([0.0, 3.0, 2.0, 1.0]))
    kept = logits[:1].clone()
    generation.modify_logits_for_top_k_filtering(kept, 2)
    assert kept[0].tolist() == [-math.inf, 3.0, 2.0, -math.inf]
    kept = logits[:1].clone()
    generation.modify_logits_for_top_p_filtering(kept, 1.0)
    assert torch.equal(kept, logits[:1])
    with pytest.raises(ValueError, match="top_p must be from 0 to 1"):
        generation.sample(logits, top_k=3, top_p=1.5)
