"""flash-attn's functions for sequences of many lengths: each is as if alone, nothing is padded, and packing helps."""

import itertools
import math
from typing import Any

import pytest
import torch
from attn_support.flash_attn import oracle
from attn_support.flash_attn.oracle import F64, FLAGS, assert_same, assert_same_gradients, inputs, leaves_of, plain
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core import flash_attn as fa
from pascal_attn_core.flash_attn.modules.raw import flash_attn_varlen_forward


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], **flags: Any
) -> tuple[Tensor, Tensor]:
    """Each sequence by :func:`plain`; zeros and -inf behind the last."""
    slopes = flags.pop("alibi_slopes", None)
    outs, all_lse = [], []
    parts = zip(q[: sum(q_lengths)].split(q_lengths), k[: sum(k_lengths)].split(k_lengths),
                v[: sum(k_lengths)].split(k_lengths))  # fmt: skip
    for number, (a, b, c) in enumerate(parts):
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[number]
        out, lse = plain(a[None], b[None], c[None], alibi_slopes=own, **flags)
        outs.append(out[0])
        all_lse.append(lse[0])
    rest = len(q) - sum(q_lengths)
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    all_lse.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(all_lse, dim=1)


LENGTHS = [
    ([5, 5, 5], [5, 5, 5]),
    ([3, 0, 7, 7, 1], [3, 0, 7, 7, 1]),
    ([4, 2, 2, 6], [9, 5, 5, 0]),
    ([0, 0], [3, 4]),
    ([1, 1, 1], [4, 9, 2]),
]


@pytest.mark.parametrize(("flags", "lengths", "spare"), some(itertools.product(FLAGS, LENGTHS, (0, 3)), 3))
def test_varlen_is_each_sequence_alone(flags: dict[str, Any], lengths: tuple[list[int], ...], spare: int) -> None:
    q_lengths, k_lengths = lengths
    flags = oracle.with_slopes(flags, len(q_lengths), 4)
    q, k, v = (
        t[0].detach().requires_grad_() for t in inputs(1, sum(q_lengths) + spare, sum(k_lengths) + spare, 4, 2, 8)
    )
    ends = ends_of(q_lengths), ends_of(k_lengths)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, *ends, max(q_lengths), max(k_lengths), **flags, return_attn_probs=True
    )
    expected, expected_lse = one_by_one(*(same := leaves_of([q, k, v])), q_lengths, k_lengths, **flags)
    assert_same(out, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")
    if out.requires_grad:
        assert_same_gradients(out, (q, k, v), expected, same)
    with torch.no_grad():
        again, lse, _ = fa.flash_attn_varlen_func(q, k, v, *ends, **flags, return_attn_probs=True)
    assert_same(again, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_is_padded_to_the_longest(requires_grad: bool) -> None:
    lengths = [512, *[2] * 64]
    q, k, v = (torch.randn(sum(lengths), 1, 8, requires_grad=requires_grad) for _ in range(3))
    with oracle.Largest() as largest:
        out = fa.flash_attn_varlen_func(q, k, v, ends_of(lengths), ends_of(lengths))
        if requires_grad:
            out.sum().backward()
    assert largest.elements <= q.numel()


@pytest.mark.parametrize("attend", [fa.flash_attn_varlen_func, flash_attn_varlen_forward])
def test_pages_of_keys_are_refused(attend: Any) -> None:
    q, ends = torch.randn(7, 2, 4, dtype=F64), ends_of([7])
    with pytest.raises(NotImplementedError, match="block_table is not supported"):
        attend(q, q, q, ends, ends, 7, 7, 0.0, None, True, block_table=torch.zeros(1, 1).int())


@pytest.mark.parametrize(
    ("ends", "kind", "words"),
    [
        (torch.tensor([0, 4, 2]), ValueError, "cu_seqlens_q must start at 0 and never decrease"),
        (torch.tensor([1, 4, 6]), ValueError, "must start at 0"),
        (torch.tensor([0, 4, 99]), ValueError, "end within the 6 tokens"),
        (torch.tensor([0.0, 4.0]), TypeError, "whole numbers"),
        ([0, 4], TypeError, "cu_seqlens_q must be a tensor"),
        (torch.tensor([[0, 4]]), ValueError, r"cu_seqlens_q must be \[B \+ 1\]"),
    ],
)
def test_wrong_lengths_are_named(ends: Any, kind: type[Exception], words: str) -> None:
    q = torch.ones(6, 2, 4)
    with pytest.raises(kind, match=words):
        fa.flash_attn_varlen_func(q, q, q, ends, ends)


def test_unpadding_and_padding_are_inverse() -> None:
    hidden = torch.randn(3, 5, 2, 4, dtype=F64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, ends, longest, used = fa.unpad_input(hidden, mask)
    assert tokens.shape == (6, 2, 4)
    assert (ends.tolist(), ends.dtype) == ([0, 2, 2, 6], torch.int32)
    assert (longest, used.tolist()) == (4, [2, 0, 4])
    back = fa.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, hidden * mask[:, :, None, None])
    (grad,) = torch.autograd.grad(back.sum(), hidden)
    assert torch.equal(grad, mask[:, :, None, None].expand_as(grad).to(F64))
