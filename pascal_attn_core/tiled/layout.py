"""Views of a call as units: one key/value head of one batch element together with the query heads that share it.

Nothing is copied here. Leading dimensions that cannot be merged into one (a head-inside-token layout, an expanded
batch) are walked one index at a time instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall, accumulate_dtype
from ..device import CPU_LIKE
from ..lazy_mask import LazyMask


@dataclass(slots=True)
class Units:
    """Tensors that belong together, one entry of the first dimension per unit.

    query ``[U, G, L, D]``, key ``[U, S, D]``, value ``[U, S, Dv]``, mask ``[U, G, L, S]`` (expanded view) or None;
    ``extra`` holds further tensors given to :func:`unit_views`, each ``[U, ...]``.
    ``index`` is the number of the first unit, counting batch-major over the whole call.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    extra: tuple[Tensor | None, ...]
    index: int = 0

    def __len__(self) -> int:
        return self.key.shape[0]


def unit_views(
    call: AttentionCall, per_query: tuple[Tensor | None, ...] = (), per_key: tuple[Tensor, ...] = ()
) -> Iterator[Units]:
    """The call cut into as few :class:`Units` as its strides allow.

    Args:
        per_query: tensors ``[*batch, Hq, L, ...]`` (output, lse, gradients of query) to view as ``[U, G, L, ...]``.
        per_key: tensors ``[*batch, Hkv, S, ...]`` to view as ``[U, S, ...]``.
    """
    heads, groups = (call.num_kv_heads, call.groups)
    lead = (*call.batch, heads)
    query = _grouped(_with_lead(call.query, (*call.batch, call.num_heads)), groups)
    key, value = _with_lead(call.key, lead), _with_lead(call.value, lead)
    mask = None
    if isinstance(call.attn_mask, Tensor):
        full = (*call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv)
        mask = _grouped(call.attn_mask.expand(full), groups)
    queries = [None if t is None else _grouped_rest(t, call, groups) for t in per_query]
    keys = [t if t.dim() > 2 else t[None] for t in per_key]
    index = 0
    for tensors in _merged([query, key, value, mask, *queries, *keys], len(lead)):
        merged_query, merged_key, merged_value, merged_mask, *extra = tensors
        assert merged_query is not None
        assert merged_key is not None
        assert merged_value is not None
        units = Units(merged_query, merged_key, merged_value, merged_mask, tuple(extra), index)
        index += len(units)
        yield units


def unit_spans(units: Units, call: AttentionCall, step: int) -> list[tuple[int, int]]:
    """Ranges of at most ``step`` units; under a mask that is a rule none crosses from one batch element to the next."""
    period = call.num_kv_heads if isinstance(call.attn_mask, LazyMask) else len(units)
    spans, first = [], 0
    while first < len(units):
        end = first + period - (units.index + first) % period if period < len(units) else len(units)
        last = min(first + step, end, len(units))
        spans.append((first, last))
        first = last
    return spans


def _with_lead(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    shape = (*lead, *tensor.shape[-2:])
    return tensor if tensor.shape == shape else tensor.expand(shape)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[..., Hq, L, X]`` as ``[..., Hkv, G, L, X]``."""
    return tensor.unsqueeze(-3) if groups == 1 else tensor.unflatten(-3, (-1, groups))


def _grouped_rest(tensor: Tensor, call: AttentionCall, groups: int) -> Tensor:
    """Like :func:`_grouped` for tensors with any number of dimensions after the tokens."""
    if call.query.dim() == 2:
        tensor = tensor[None]
    head_dim = len(call.batch)
    return tensor.unflatten(head_dim, (-1, groups))


def _merged(tensors: list[Tensor | None], num_lead: int) -> Iterator[list[Tensor | None]]:
    """Each tensor with its leading dimensions merged into one; split over the first of them where strides forbid."""
    if num_lead == 1:
        yield tensors
        return
    lead = next(t for t in tensors if t is not None).shape[:num_lead]
    if all(t is None or _mergeable(t, num_lead) for t in tensors):
        units = math.prod(lead)
        yield [None if t is None else t.view(units, *t.shape[num_lead:]) for t in tensors]
        return
    for i in range(lead[0]):
        yield from _merged([None if t is None else t[i] for t in tensors], num_lead - 1)


def _mergeable(tensor: Tensor, num_lead: int) -> bool:
    sizes, strides = tensor.shape, tensor.stride()
    inner = None
    for dim in reversed(range(num_lead)):
        if sizes[dim] == 1:
            continue
        if inner is not None and strides[dim] != sizes[inner] * strides[inner]:
            return False
        inner = dim
    return True


def is_matrix(tensor: Tensor) -> bool:
    """Whether the last two dimensions can go to a matrix product as they are: rows that do not overlap, each
    contiguous. Anything else torch would copy behind our back."""
    rows, columns = tensor.shape[-2:]
    return (columns == 1 or tensor.stride(-1) == 1) and (rows == 1 or tensor.stride(-2) >= columns)


def rows_overlap(tensor: Tensor) -> bool:
    """Whether elements of the last two dimensions share memory, as ``as_strided`` and ``expand`` make them."""
    row, column = tensor.stride()[-2:]
    if column == 1 and row >= tensor.shape[-1]:
        return False  # nearly all
    steps = sorted((stride, size) for stride, size in zip((row, column), tensor.shape[-2:]) if size > 1)
    if not steps or steps[0][0] == 0:
        return bool(steps)
    return len(steps) > 1 and steps[1][0] <= steps[0][0] * (steps[0][1] - 1)


def copies(call: AttentionCall) -> tuple[bool, bool, bool]:
    """(query, key and value, output): whether a block of each has to be copied to or from a buffer."""
    converts = call.query.dtype != accumulate_dtype(call.query.dtype)
    folds = call.groups > 1 and call.seq_len_q > 1
    kv = converts or not (is_matrix(call.key) and is_matrix(call.value))
    return converts or folds or not is_matrix(call.query), kv, converts or folds


def may_read(call: AttentionCall) -> bool:
    """Whether values on the call's device may be read by the host now."""
    device = call.query.device
    if device.type == "meta":
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def worth_looking(call: AttentionCall) -> bool:
    """On a GPU a look at the values waits for the device: worth it for large calls only."""
    return call.query.device.type in CPU_LIKE or call.num_scores >= 1 << 26
