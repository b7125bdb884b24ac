"""Are the scores of a block provably bounded? See :mod:`.softmax` for what that saves."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ..device import CPU_LIKE
from .layout import Units

BOUNDED_BITS = 60.0
# 2^60 * 2^log2(S) * |v| must stay below the largest number of the sums' dtype, 2^127 or 2^1023.
_VALUE_BITS = {torch.float32: 66.0, torch.float64: 960.0}


class _Converter(Protocol):
    dtype: torch.dtype

    def converted(self, part: Tensor) -> Tensor: ...


def max_norm(rows: Tensor) -> Tensor:
    """Largest Euclidean norm among the rows of ``[..., N, D]``: a 0-dim tensor, not finite if some value is not."""
    return torch.linalg.vector_norm(rows, dim=-1).amax()


def query_limits(
    units: Units,
    spans: list[tuple[int, int]],
    key_ranges: list[tuple[int, int]],
    factor: float,
    keys_at_once: int,
    convert: _Converter,
) -> list[float]:
    """Per span of units: the largest |query row| for which every |score| is at most BOUNDED_BITS and no sum of
    2^score * value can overflow. 0 = no row qualifies; inf = all of its rows do.

    Args:
        key_ranges: per span, the first and one-past-last key that anybody may look at.
        factor: scale * log2(e), which turns query . key into bits.
    On a GPU, where each look at a value waits for the device, the queries themselves are included and the answer is
    inf or 0, from one look for all spans.
    """
    on_gpu = units.key.device.type not in CPU_LIKE
    bits = []
    for (u0, u1), (j0, j1) in zip(spans, key_ranges):
        if j1 <= j0:
            bits.append(torch.zeros((), dtype=convert.dtype, device=units.key.device))
            continue
        most = _max_norm_in_parts(units.key[u0:u1, j0:j1], keys_at_once, convert) * abs(factor)
        if on_gpu:
            query = units.query[u0:u1].flatten(0, 1)
            most = most * torch.linalg.vector_norm(query, dim=-1, dtype=convert.dtype).amax()
        bits.append(torch.where(_values_fit(units.value[u0:u1, j0:j1], convert.dtype), most, math.inf))
    if on_gpu:
        return [math.inf if b <= BOUNDED_BITS else 0.0 for b in torch.stack(bits).tolist()]
    return [BOUNDED_BITS / b if b > 0 else math.inf if b == 0 else 0.0 for b in map(float, bits)]


def _max_norm_in_parts(keys: Tensor, keys_at_once: int, convert: _Converter) -> Tensor:
    norms = [
        max_norm(convert.converted(keys[:, first : first + keys_at_once]))
        for first in range(0, keys.shape[1], keys_at_once)
    ]
    return norms[0] if len(norms) == 1 else torch.stack(norms).amax()


def _values_fit(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == torch.float16 or not value.numel():  # at most 65504 = 2^16
        return torch.ones((), dtype=torch.bool, device=value.device)
    limit = 2.0 ** (_VALUE_BITS[dtype] - math.log2(max(2, value.shape[1])))
    low, high = torch.aminmax(value)
    return (low >= -limit) & (high <= limit)
