"""flash_attn_with_kvcache against plain float64 attention over caches that are written out by hand."""

import functools
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same, rand
from torch import Tensor

from pascal_attn_core.flash_attn import flash_attn_func, flash_attn_with_kvcache
from pascal_attn_core.flash_attn.modules.rotary import apply_rotary_emb

HEADS, KV_HEADS, DIM = 4, 2, 8


def caches(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    return rand(rows, tokens, KV_HEADS, DIM), rand(rows, tokens, KV_HEADS, DIM)


def each_alone(q: Tensor, keys: list[Tensor], values: list[Tensor], **flags: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of sequences ``[S_b, Hkv, D]`` one by one."""
    parts = [
        flash_attn_func(one[None], k[None], v[None], return_attn_probs=True, **flags)
        for one, k, v in zip(q, keys, values)
    ]
    return torch.cat([out for out, _, _ in parts]), torch.cat([lse for _, lse, _ in parts])


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window_size": (4, 0)}, {"softmax_scale": 0.2}], ids=str)
@pytest.mark.parametrize("lengths", [7, [7, 7], [3, 11], [0, 3], None], ids=str)
def test_a_cache_is_read_up_to_its_length(flags: dict[str, Any], lengths: Any) -> None:
    q, (k, v) = rand(2, 3, HEADS, DIM), caches(2, 12)
    given = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, return_softmax_lse=True, **flags)
    each = [12, 12] if lengths is None else [lengths] * 2 if isinstance(lengths, int) else lengths
    expected, expected_lse = each_alone(
        q, [k[b, :n] for b, n in enumerate(each)], [v[b, :n] for b, n in enumerate(each)], **flags
    )
    assert_same(out, expected)
    assert_same(lse, expected_lse)
    assert out.is_contiguous()


@pytest.mark.parametrize("lengths", [[5, 5], [2, 9]], ids=str)
def test_new_tokens_are_written_in_place_and_seen(lengths: list[int]) -> None:
    q, (k, v) = rand(2, 3, HEADS, DIM), caches(2, 12)
    new_k, new_v = caches(2, 3)
    before_k, before_v, seqlens = k.clone(), v.clone(), torch.tensor(lengths, dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=seqlens, causal=True)
    for b, n in enumerate(lengths):
        before_k[b, n : n + 3], before_v[b, n : n + 3] = new_k[b], new_v[b]
    assert torch.equal(k, before_k)
    assert torch.equal(v, before_v)
    assert seqlens.tolist() == lengths
    keys, values = ([t[b, : n + 3] for b, n in enumerate(lengths)] for t in (before_k, before_v))
    assert_same(out, each_alone(q, keys, values, causal=True)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, DIM])
@pytest.mark.parametrize("flags", [{"causal": True}, {"window_size": (6, 6)}, {}], ids=str)
def test_rotary_embedding_turns_by_place(flags: dict[str, Any], rotary_dim: int, interleaved: bool) -> None:
    q, (k, v), (new_k, new_v), lengths = rand(2, 3, HEADS, DIM), caches(2, 12), caches(2, 3), [4, 7]
    angle = torch.arange(12, dtype=F64)[:, None] * torch.rand(rotary_dim // 2, dtype=F64)
    cos, sin = angle.cos(), angle.sin()
    old_k = k.clone()
    out = flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cos, sin, torch.tensor(lengths), rotary_interleaved=interleaved, **flags
    )
    queries, keys, values = [], [], []
    turn = functools.partial(apply_rotary_emb, cos=cos, sin=sin, interleaved=interleaved)
    for b, n in enumerate(lengths):
        turned = turn(q[b][None] if flags else q[b][:, None], seqlen_offsets=n)
        queries.append(turned.reshape(3, HEADS, DIM))
        keys.append(torch.cat([old_k[b, :n], turn(new_k[b][None], seqlen_offsets=n)[0]]))
        values.append(torch.cat([v[b, :n], new_v[b]]))
        assert_same(k[b, : n + 3], keys[b])
    assert_same(out, each_alone(torch.stack(queries), keys, values, **flags)[0])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_seqlens": None}, ValueError, "cache_seqlens must be given with k and v"),
    ({"cache_seqlens": 11}, ValueError, r"room for 2 new tokens after \[11, 11\], got 12"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be from 0 to 12"),
    ({"cache_seqlens": torch.tensor([1.0, 2.0])}, TypeError, "cache_seqlens must be whole numbers"),
    ({"cache_seqlens": torch.tensor([1])}, ValueError, r"cache_seqlens must be \[2\], got \[1\]"),
    ({"cache_batch_idx": torch.tensor([0, 1])}, NotImplementedError, "cache_batch_idx is not supported"),
    ({"cache_leftpad": torch.tensor([1, 0])}, NotImplementedError, "cache_leftpad is not supported"),
    ({"k_cache": rand(3, 12, KV_HEADS, DIM)}, ValueError, r"k_cache must be \[2, tokens, heads, head_dim\]"),
    ({"block_table": torch.zeros(2, 1).int()}, NotImplementedError, "block_table is not supported"),
    ({"v": None}, TypeError, "v must be a tensor"),
    ({"k": rand(2, 2, 1, DIM)}, ValueError, "k"),
    ({"v_cache": rand(2, 11, KV_HEADS, DIM)}, ValueError, r"v_cache must be \[2, 12, 2, head_dim\], got"),
    ({"k": None, "v": None, "rotary_cos": rand(12, 4)}, ValueError, "rotary_cos and rotary_sin must come with k"),
    ({"rotary_cos": rand(12, 4)}, TypeError, "rotary_sin must be a tensor"),
    ({"rotary_cos": rand(4, 4), "rotary_sin": rand(4, 4)}, ValueError, "rotary_cos must have"),
    ({"rotary_cos": rand(12, 5), "rotary_sin": rand(12, 5)}, ValueError, r"\[positions, at most 4\]"),
    ({"q": rand(2, 2, HEADS, DIM).requires_grad_()}, NotImplementedError, "no backward pass"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), BAD, ids=[words for _, _, words in BAD])
def test_what_cannot_be_is_refused_before_the_cache_is_touched(change: dict[str, Any], kind, words: str) -> None:
    k_cache, v_cache = caches(2, 12)
    before = k_cache.clone(), v_cache.clone()
    k, v = caches(2, 2)
    given = {"q": rand(2, 2, HEADS, DIM), "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 5}
    with pytest.raises(kind, match=words):
        flash_attn_with_kvcache(**(given | change))
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
