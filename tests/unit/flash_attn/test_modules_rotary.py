"""Rotary embedding against complex multiplication in float64: forward, gradients, in place, offsets, packed."""

import itertools
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same_gradients, leaves_of, near, rand
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core.flash_attn.modules import rotary as module

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def turned(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """``x [..., tokens, heads, dim]`` by places ``[..., tokens]``, as complex numbers."""
    half = cos.shape[1]
    x = x.double()
    body, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = body.unflatten(-1, (half, 2)) if interleaved else body.unflatten(-1, (2, half)).transpose(-1, -2)
    factor = torch.complex(cos.double()[places], sin.double()[places])[..., None, :]
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    out = out.flatten(-2) if interleaved else out.transpose(-1, -2).flatten(-2)
    return torch.cat([out, rest], -1)


def tables(positions: int, half: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    angles = torch.rand(positions, half, dtype=F64) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


_BATCHES = itertools.product(
    (F64, torch.float32, torch.bfloat16, torch.float16), (False, True), (False, True),
    ((16, 8), (10, 3), (7, 2), (300, 150)), (0, 3, "tensor"),
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "interleaved", "inplace", "sizes", "offset"), some(_BATCHES, 7))
def test_a_batch(dtype: torch.dtype, interleaved: bool, inplace: bool, sizes: tuple[int, int], offset: Any) -> None:
    dim, half = sizes
    torch.manual_seed(0)
    batch, tokens = 2, 5
    cos, sin = tables(12, half, dtype)
    x = rand(batch, tokens, 3, dim).to(dtype).requires_grad_()
    offsets = torch.tensor([1, 6]) if offset == "tensor" else offset
    places = torch.arange(tokens) + (offsets[:, None] if offset == "tensor" else torch.full((batch, 1), offset))
    (reference,) = leaves_of([x])
    expected = turned(reference, cos, sin, places, interleaved)
    out = module.apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    near(out, expected, CLOSE[dtype])
    assert_same_gradients(out, [x], expected, [reference], CLOSE[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 2, "tensor"])
@pytest.mark.parametrize("lengths", [[3, 0, 4, 1], [5], [0, 0, 2]])
def test_packed_sequences_and_what_lies_behind_them(interleaved: bool, offset: Any, lengths: list[int]) -> None:
    cos, sin = tables(14, 4)
    total, behind = sum(lengths), 2
    x = rand(total + behind, 2, 10).requires_grad_()
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    offsets = torch.arange(len(lengths)) if offset == "tensor" else offset
    starts = offsets if offset == "tensor" else torch.full((len(lengths),), offset)
    places = torch.cat([torch.arange(n) + start for n, start in zip(lengths, starts)])
    (reference,) = leaves_of([x])
    expected = torch.cat([turned(reference[:total], cos, sin, places, interleaved), reference[total:]])
    out = module.apply_rotary_emb(
        x, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=ends, max_seqlen=max(lengths)
    )
    near(out, expected, CLOSE[F64])
    assert_same_gradients(out, [x], expected, [reference], CLOSE[F64])


@pytest.mark.parametrize("kind", ["packed", "gqa", "kv", "strided"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_in_place(kind: str, interleaved: bool) -> None:
    torch.manual_seed(0)
    cos, sin = tables(9, 4)
    shape = {"packed": (2, 5, 3, 2, 10), "strided": (2, 5, 3, 2, 10), "gqa": (2, 5, 6, 10), "kv": (2, 5, 2, 2, 10)}
    leaf = torch.randn(shape[kind], dtype=F64)
    if kind == "strided":
        leaf = leaf.transpose(0, 1).contiguous().transpose(0, 1)
    leaf.requires_grad_()
    reference = leaf.detach().clone().requires_grad_()
    places = torch.arange(5)[None] + torch.tensor([[1], [3]])
    offsets = torch.tensor([1, 3])
    *rotated, v = reference.split([4, 1, 1], 2) if kind == "gqa" else reference.unbind(2)
    parts = [*(turned(t, cos, sin, places, interleaved) for t in rotated), v]
    expected = torch.cat(parts, 2) if kind == "gqa" else torch.stack(parts, 2)
    same = module.apply_rotary_emb_kv_ if kind == "kv" else module.apply_rotary_emb_qkv_
    of_keys = () if kind == "kv" else (None, None)
    heads = {"num_heads_q": 4} if kind == "gqa" else {}
    out = same(leaf, cos, sin, *of_keys, interleaved, offsets, **heads)
    assert out.data_ptr() == leaf.data_ptr()
    torch.testing.assert_close(leaf.detach(), expected.detach())
    assert_same_gradients(out, [leaf], expected, [reference], 1e-7)
    with torch.no_grad():
        again = reference.detach().clone()
        assert same(again, cos, sin, seqlen_offsets=offsets, **heads) is again


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["packed", "gqa", "apart"])
def test_the_module(interleaved: bool, form: str) -> None:
    torch.manual_seed(0)
    dim, tokens, offset = 8, 6, 2
    rotary = module.RotaryEmbedding(dim, base=500.0, interleaved=interleaved)
    assert not rotary.state_dict()
    length = tokens + offset
    angles = torch.arange(length, dtype=F64)[:, None] * 500.0 ** (-torch.arange(0, dim, 2, dtype=F64) / dim)
    places = (torch.arange(tokens) + offset).expand(2, tokens)
    q, k, v = (torch.randn(2, tokens, heads, 10) for heads in (2, 2, 2))
    want_q, want_k = (turned(t, angles.cos(), angles.sin(), places, interleaved) for t in (q, k))
    if form == "packed":
        q, k, v = rotary(torch.stack([q, k, v], 2), seqlen_offset=offset).unbind(2)
    elif form == "gqa":
        q, k, v = rotary(torch.cat([q, k, v], 2), seqlen_offset=offset, num_heads_q=2).split(2, 2)
    else:
        given, kv = q.clone(), torch.stack([k, v], 2)
        q, out = rotary(given, kv, seqlen_offset=offset)
        assert out is kv
        assert torch.equal(given, q)
        k, v = out.unbind(2)
    near(q, want_q, CLOSE[torch.float32])
    near(k, want_k, CLOSE[torch.float32])


WRONG = [
    (lambda x, c, s: module.apply_rotary_emb(x[0], c, s), r"x must be \[B, tokens, heads, head_dim\]"),
    (lambda x, c, s: module.apply_rotary_emb(x, c[:2], s[:2]), "cos must have 4 positions, got 2"),
    (lambda x, c, s: module.apply_rotary_emb(x, c, s, seqlen_offsets=3), "cos must have 7 positions, got 6"),
    (lambda x, c, s: module.apply_rotary_emb(x, c, s, seqlen_offsets=-1), "must not be negative"),
    (lambda x, c, s: module.apply_rotary_emb(x, c, s[:3]), "sin must be"),
    (lambda x, c, s: module.apply_rotary_emb(x[..., :3], c, s), r"\[positions, at most 1\]"),
    (lambda x, c, s: module.apply_rotary_emb(x, c, s, seqlen_offsets=torch.tensor([1])), "seqlen_offsets must be"),
    (lambda x, c, s: module.apply_rotary_emb(x[0], c, s, cu_seqlens=torch.tensor([0, 4])), "max_seqlen must be given"),
    (lambda x, c, s: module.apply_rotary_emb(x, c.clone().requires_grad_(), s), "must not require a gradient"),
    (lambda x, c, s: module.apply_rotary_emb_qkv_(x, c, s), "qkv must be"),
    (lambda x, c, s: module.apply_rotary_emb_qkv_(x, c, s, num_heads_q=1), "num_heads_q = 1"),
    (lambda x, c, s: module.apply_rotary_emb_kv_(x[:, :, None], c, s), "kv must be"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(call: Any, words: str) -> None:
    cos, sin = tables(6, 4)
    x = torch.randn(2, 4, 2, 8, dtype=F64)
    before = x.clone()
    with pytest.raises(ValueError, match=words) as caught:
        call(x, cos, sin)
    assert isinstance(caught.value, RuntimeError)
    assert torch.equal(x, before)


@pytest.mark.torch_2_5
def test_it_compiles_as_one_graph() -> None:
    cos, sin = tables(6, 4, torch.float32)
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    compiled = torch.compile(lambda t: module.apply_rotary_emb(t, cos, sin), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module.apply_rotary_emb(x, cos, sin))
    compiled(x).sum().backward()
    assert x.grad is not None
