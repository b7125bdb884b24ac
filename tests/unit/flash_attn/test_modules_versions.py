"""flash-attn 1's and 3's names against plain attention, packing helpers, and the kind of error that programs expect."""

import pickle
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same_gradients, plain, rand
from torch import Tensor

from pascal_attn_core import flash_attn as fa2
from pascal_attn_core.flash_attn.modules import padding, version1, version3
from pascal_attn_core.flash_attn.options import FlashArgumentError


def upper_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Query i sees keys 0 ... i; ``[tokens, heads, dim]``."""
    scores = torch.einsum("lhd,shd->hls", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hls,shd->lhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("packed", [False, True])
def test_version_1_looks_from_the_upper_left(packed: bool) -> None:
    lengths, key_lengths = [3, 5, 2], [5, 3, 2]
    ends, key_ends = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, key_lengths))
    q, kv = rand(10, 2, 8).requires_grad_(), rand(10, 2, 2, 8).requires_grad_()
    function = version1.flash_attn_unpadded_kvpacked_func if packed else version1.flash_attn_unpadded_func
    rest = (ends, key_ends, 5, 5, 0.0)
    out, lse, none = function(q, *([kv] if packed else kv.unbind(1)), *rest, causal=True, return_attn_probs=True)
    assert none is None
    assert lse.shape == (3, 2, 5)
    pieces = list(zip(q.split(lengths), kv.split(key_lengths)))
    expected = [upper_left(one, *other.unbind(1)) for one, other in pieces]
    wanted = torch.cat([part for part, _ in expected])
    torch.testing.assert_close(out, wanted)
    for b, (_, part) in enumerate(expected):
        torch.testing.assert_close(lse[b, :, : lengths[b]], part, check_dtype=False)
        assert (lse[b, :, lengths[b] :] == -torch.inf).all()
    assert_same_gradients(out, (q, kv), wanted, (q, kv), 1e-7)


def test_version_1s_other_names() -> None:
    qkv, ends = rand(6, 3, 2, 8), torch.tensor([0, 4, 6]).int()
    expected = fa2.flash_attn_varlen_qkvpacked_func(qkv, ends, 4, causal=True)
    torch.testing.assert_close(version1.flash_attn_unpadded_qkvpacked_func(qkv, ends, 4, 0.0, causal=True), expected)
    layer = version1.FlashAttention(softmax_scale=0.3)
    batch = rand(2, 5, 3, 2, 8)
    whole = plain(*batch.unbind(2), softmax_scale=0.3, causal=True)[0]
    torch.testing.assert_close(layer(batch, causal=True)[0], whole)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    out, weights = layer(batch, keep)
    assert weights is None
    assert not out[0, 3:].any()
    torch.testing.assert_close(out[:1, :3], plain(*batch[:1, :3].unbind(2), softmax_scale=0.3)[0])
    torch.testing.assert_close(layer(qkv, cu_seqlens=ends, max_s=4)[0][:4], layer(qkv[None, :4])[0][0])
    mha = version1.FlashMHA(16, 2, causal=True, dtype=F64)
    assert list(mha.state_dict()) == ["Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"]
    x = rand(2, 5, 16)
    heads = mha.Wqkv(x).unflatten(-1, (3, 2, 8))
    torch.testing.assert_close(mha(x)[0], mha.out_proj(plain(*heads.unbind(2), causal=True)[0].flatten(-2)))
    with pytest.raises(ValueError, match="need_weights must be False"):
        mha(x, need_weights=True)


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 3.0}])
def test_version_3(flags: dict[str, Any]) -> None:
    q, k, v = rand(2, 5, 4, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 8)
    expected, lse = plain(q, k, v, **flags)
    torch.testing.assert_close(version3.flash_attn_func(q, k, v, **flags), expected)
    out, got = version3.flash_attn_func(q, k, v, return_attn_probs=True, num_splits=4, pack_gqa=True, **flags)
    torch.testing.assert_close((out, got.double()), (expected, lse))
    torch.testing.assert_close(
        version3.flash_attn_func(q, k, v, 0.3, True), plain(q, k, v, softmax_scale=0.3, causal=True)[0]
    )
    gqa = torch.cat([q, k[:, :5], v[:, :5]], 2)
    torch.testing.assert_close(
        version3.flash_attn_qkvpacked_func(gqa, num_heads_q=4, **flags), plain(q, k[:, :5], v[:, :5], **flags)[0]
    )
    qkv = rand(2, 5, 3, 2, 8)
    torch.testing.assert_close(version3.flash_attn_qkvpacked_func(qkv, **flags), plain(*qkv.unbind(2), **flags)[0])


def test_version_3_of_concatenated_sequences() -> None:
    (ends, key_ends), (q, k, v) = (
        (torch.tensor(n).int() for n in ([0, 4, 6], [0, 3, 8])),
        (rand(n, 2, 8) for n in (6, 8, 8)),
    )
    out, lse = version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 6)
    torch.testing.assert_close(out[4:], plain(q[None, 4:], k[None, 3:], v[None, 3:], causal=True)[0][0])
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, **{name: torch.tensor([3, 2])})


@pytest.mark.parametrize("paged", [False, True])
def test_version_3s_cache(paged: bool) -> None:
    pages, q, new = [rand(4, 4, 2, 8) for _ in range(2)], rand(2, 2, 4, 8), [rand(2, 2, 2, 8) for _ in range(2)]
    table, lengths = torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([3, 5]).int()
    whole = [t[table.long()].flatten(1, 2) for t in pages]
    caches, given = (pages, {"page_table": table}) if paged else (whole, {})
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True, **given}
    out, lse = version3.flash_attn_with_kvcache(q, *(t.clone() for t in caches), *new, **options)
    assert lse.shape == (2, 4, 2)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (torch.cat([t[b, :length], more[b]])[None] for t, more in zip(whole, new))
        torch.testing.assert_close(out[b], plain(q[b : b + 1], keys, values, causal=True)[0][0])


@pytest.mark.parametrize("name", ["q_descale", "attention_chunk", "k_descale", "v_descale", "qv"])
def test_version_3_refuses_what_would_change_the_result(name: str) -> None:
    q = rand(1, 2, 1, 8)
    value: Any = 4 if name == "attention_chunk" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        version3.flash_attn_func(q, q, q, **{name: value})
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        version3.flash_attn_with_kvcache(q, q, q, **{name: value})


def test_several_sequences_in_a_row_of_a_batch() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = rand(3, 6, 4).requires_grad_()
    tokens, indices, ends, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (ends.tolist(), ends.dtype) == ([0, 2, 5, 8, 10, 16], torch.int32)
    assert longest == 6
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    torch.testing.assert_close(padding.pad_input(tokens, indices, 3, 6)[2], x[2])
    with pytest.raises(TypeError, match="whole numbers"):
        padding.unpad_input_for_concatenated_sequences(x, lengths.double())


def test_rows_and_what_they_came_from() -> None:
    x, indices = rand(5, 2, 3).requires_grad_(), torch.tensor([4, 1])
    rows, same = padding.index_first_axis_residual(x, indices)
    torch.testing.assert_close(rows, x[indices])
    (rows.sum() + 2 * same.sum()).backward()
    assert x.grad[:, 0, 0].tolist() == [2, 3, 2, 2, 3]


def test_errors_are_of_flash_attns_kind_too() -> None:
    error = pickle.loads(pickle.dumps(FlashArgumentError("words")))
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "words"
    cache, q, table = torch.zeros(4, 16, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 2).int()
    for arguments in ({"cache_seqlens": 33}, {"cache_seqlens": 32, "k": q, "v": q}):
        with pytest.raises(RuntimeError, match="block_table"):
            fa2.flash_attn_with_kvcache(q, cache, cache, block_table=table, **arguments)
    for wrong in (
        lambda: fa2.flash_attn_func(q[0], q, q),
        lambda: fa2.flash_attn_func(q, q, q, dropout_p=2.0),
        lambda: fa2.flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 5]), torch.tensor([0, 1])),
        lambda: fa2.flash_attn_qkvpacked_func(torch.zeros(1, 2, 2, 1, 8)),
    ):
        with pytest.raises(RuntimeError):
            wrong()
