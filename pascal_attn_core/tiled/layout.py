"""Views of a call as units: one key/value head of one batch element together with the query heads that share it.

Nothing is copied here. Leading dimensions that cannot be merged into one (a head-inside-token layout, an expanded
batch) are walked one index at a time instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..call import AttentionCall, has_heads_inside_tokens
from ..call.lazy_mask import LazyMask
from ..machine.device import CPU_LIKE
from .tiles import Ranges

Shape = tuple[int, ...]


class Units(NamedTuple):
    """Tensors that belong together, one entry of the first dimension per unit.

    query ``[U, G, L, D]``, key ``[U, S, D]``, value ``[U, S, Dv]``, mask ``[U, G, L, S]`` (expanded view) or None;
    ``extra`` holds further tensors, each ``[U, ...]`` or None.
    ``first`` is the number of the first unit, counting batch-major over the whole call.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    extra: Sequence[Any]
    first: int


class UnitViews(NamedTuple):
    """The shapes in which the tensors of a call are viewed as units.

    Attributes:
        walked: sizes of the leading dimensions that strides forbid to merge with those behind them.
        size: units at each index of these dimensions.
        lead: number of dimensions in ``[*batch, Hq]``; 0 where the query has neither.
        per_query: ``[*walked, size, G]``, which takes the place of these dimensions; per_key: ``[*walked, size]``.
        inputs: for query, key, value, and a mask that is a tensor: the shape to expand it to, and to view that in.
    """

    walked: Shape
    size: int
    lead: int
    per_query: Shape
    per_key: Shape
    inputs: tuple[tuple[Shape, Shape], ...]


def unit_views(
    call: AttentionCall, per_query: Sequence[Tensor | None] = (), per_key: Sequence[Tensor] = ()
) -> UnitViews:
    """The views of a call, of its output (by :func:`~pascal_attn_core.call.empty_output`), and of further tensors
    ``[*batch, Hq, L, ...]`` and ``[*batch, Hkv, S, ...]``, with as few dimensions to walk as their strides allow."""
    q_lead, kv_lead = call.out_shape[:-2], (*call.batch, call.num_kv_heads)
    rows, keys = (*q_lead, call.seq_len_q), (*kv_lead, call.seq_len_kv)
    full = [(*rows, call.head_dim), (*keys, call.head_dim), (*keys, call.head_dim_v)]
    inputs = [call.query, call.key, call.value]
    if isinstance(call.attn_mask, Tensor):
        full.append((*rows, call.seq_len_kv))
        inputs.append(call.attn_mask)
    walked: Shape = ()
    if call.batch:
        wide = [t.expand(shape) for t, shape in zip(inputs, full)]
        head = len(call.batch)
        strides = [t.stride()[: head + 1] for t in (*wide[1:3], *per_key)]
        by_query = [t.stride() for t in (wide[0], *wide[3:], *per_query) if t is not None]
        if has_heads_inside_tokens(call):
            by_query.append((call.seq_len_q * call.num_heads, 1))
        strides += [(*each[:head], each[head] * call.groups) for each in by_query]  # of the first head of each group
        # Dimensions that must stay so that all behind them are one dimension in every tensor.
        walked = kv_lead[: next(n for n in range(len(kv_lead)) if all(_mergeable(kv_lead[n:], s[n:]) for s in strides))]
    size = math.prod(kv_lead[len(walked) :])
    by_unit = (*walked, size)
    leads = ((*by_unit, call.groups), by_unit, by_unit, (*by_unit, call.groups))
    views = tuple((shape, (*lead, *shape[-2:])) for shape, lead in zip(full, leads))
    return UnitViews(walked, size, len(q_lead), leads[0], by_unit, views)


def unit_spans(count: int, call: AttentionCall, step: int) -> Ranges:
    """Ranges of at most ``step`` of the units ``0 ... count - 1``; under rules none crosses from one
    batch element to the next."""
    period = call.num_kv_heads if call.score_rule or isinstance(call.attn_mask, LazyMask) else count
    return [
        (first, min(first + step, start + period))
        for start in range(0, count, max(1, period))
        for first in range(start, start + period, step)
    ]


def _mergeable(sizes: Shape, strides: Shape) -> bool:
    inner = None
    for dim in reversed(range(len(sizes))):
        if sizes[dim] == 1:
            continue
        if inner is not None and strides[dim] != sizes[inner] * strides[inner]:
            return False
        inner = dim
    return True


def is_matrix(tensor: Tensor) -> bool:
    """Whether the last two dimensions can go to a matrix product as they are: each row contiguous, and none
    overlapping. torch would copy anything else, unasked."""
    rows, columns = tensor.shape[-2:]
    return (columns == 1 or tensor.stride(-1) == 1) and (rows == 1 or tensor.stride(-2) >= columns)


def is_padding(mask: Tensor) -> bool:
    """Whether a mask is the same for all queries."""
    return mask.dim() < 2 or mask.shape[-2] == 1 or mask.stride(-2) == 0


def rows_overlap(tensor: Tensor) -> bool:
    """Whether elements of the last two dimensions share memory, as ``as_strided`` and ``expand`` make them."""
    row, column = tensor.stride()[-2:]
    if column == 1 and row >= tensor.shape[-1]:
        return False  # nearly all
    steps = sorted((stride, size) for stride, size in zip((row, column), tensor.shape[-2:]) if size > 1)
    if not steps or steps[0][0] == 0:
        return bool(steps)
    return len(steps) > 1 and steps[1][0] <= steps[0][0] * (steps[0][1] - 1)


def slides_by_one(query: Tensor) -> bool:
    """Whether heads or batch elements begin one element after each other, as ``as_strided`` makes sliding windows. From
    such a query torch's CPU kernel returns memory that it has not written to."""
    if query.shape[-1] == 1:
        return False
    return any(size > 1 and stride == 1 for size, stride in zip(query.shape[:-2], query.stride()[:-2]))


def copies(call: AttentionCall) -> tuple[bool, bool, bool]:
    """(query, key and value, output): whether a block of each has to be copied to or from a buffer."""
    converts = call.query.dtype != call.sums_dtype
    folds = call.groups > 1 and call.seq_len_q > 1
    kv = converts or not (is_matrix(call.key) and is_matrix(call.value))
    return converts or folds or not is_matrix(call.query), kv, converts or folds


def worth_looking(call: AttentionCall) -> bool:
    """On a GPU a look at the values waits for the device: worth it for large calls only."""
    return call.query.device.type in CPU_LIKE or call.num_scores >= 1 << 26
