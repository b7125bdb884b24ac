"""Sequences of different lengths in one call: what the answer is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core.reference import reference_sdpa

from ..oracle import assert_close, assert_gradients_close, cast, gradients, plain_dtype


def ends_of(lengths: list[int]) -> list[int]:
    """Where each sequence starts and the last one ends."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def each_alone(
    query: Tensor, key: Tensor, value: Tensor, q_lengths: list[int], k_lengths: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """(out ``[1, Hq, total, Dv]``, lse ``[1, Hq, total]``) by the definition, zero and -inf behind the last sequence.
    query ``[1, Hq, total, D]``; key, value likewise; options of ``reference_sdpa``."""
    q_ends, k_ends = ends_of(q_lengths), ends_of(k_lengths)
    parts = [
        reference_sdpa(query[..., q0:q1, :], key[..., k0:k1, :], value[..., k0:k1, :], enable_gqa=True, **options)
        for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:])
    ]
    rest = query[..., q_ends[-1] :, :]
    out = torch.cat([*(out for out, _ in parts), rest.new_zeros(*rest.shape[:-1], value.shape[-1])], dim=-2)
    return out, torch.cat([*(lse for _, lse in parts), rest.new_full(rest.shape[:-1], -torch.inf)], dim=-1)


def definitions(
    inputs: Sequence[Tensor], lengths: tuple[list[int], list[int]], dtype: torch.dtype, **options: Any
) -> list[tuple[list[Tensor], tuple[Tensor, Tensor]]]:
    """(leaves, :func:`each_alone` of them) in float64, in what plain attention is computed in, and as torch's is."""
    dtypes = torch.float64, plain_dtype(dtype), plain_dtype(dtype, as_torch=True)
    made = [[cast(t, own) for t in inputs] for own in dtypes]
    return [(leaves, each_alone(*leaves, *lengths, **options)) for leaves in made]  # type: ignore[misc]


def assert_each_alone(
    out: Tensor, lse: Tensor, inputs: Sequence[Tensor], lengths: tuple[list[int], list[int]], **options: Any
) -> None:
    """Output, lse and gradients of packed inputs are as close to :func:`each_alone` as :mod:`..oracle` asks."""
    dtype = inputs[0].dtype
    finite = [t.detach().nan_to_num().requires_grad_() for t in inputs]
    (wide, exact), (_, plain), (rounded, similar) = definitions(finite, lengths, dtype, **options)
    for what, *three in zip(("out", "lse"), (out, lse), exact, plain):
        assert_close(*three, what, dtype=dtype)
    grad_out = torch.randn(out.shape, device=out.device).to(dtype).double()
    answers = ((out, lse), inputs), (exact, wide), (similar, rounded)
    found = [gradients(o, leaves, grad_out, s) for (o, s), leaves in answers]
    assert_gradients_close(*found, exact[1].detach(), dtype)
