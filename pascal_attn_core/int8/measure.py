"""What 8 bits cost a layer: its error on real inputs, with each rotation, and its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .product import int8_linear
from .quantize import ROTATIONS, Int8Matrix, quantize_rows

SAMPLE_ROWS = 512
_SLICE_NUMBERS = 1 << 22  # of a weight that are held in float32
# A rotation costs time in every call: it should make the error this much smaller.
_WORTH = 0.75
Clock = Callable[[list[Callable[[], Any]], torch.device], list[float]]


class Times(NamedTuple):
    """Milliseconds of one call, in float and in 8 bits."""

    in_float: float
    in_int8: float


def rotations_for(columns: int) -> tuple[int, ...]:
    """Those to try for a layer: none, and the largest groups that divide its columns."""
    return (0, *[size for size in ROTATIONS if columns % size == 0][:1])


def sample_of(x: Tensor) -> Tensor:
    """Rows of ``x`` ``[..., K]``, at most SAMPLE_ROWS, evenly spread."""
    flat = x.detach().reshape(-1, x.shape[-1])
    return flat[:: max(1, -(-flat.shape[0] // SAMPLE_ROWS))]


def relative_error(rows: Tensor, weight: Tensor, matrix: Int8Matrix) -> float:
    """``|y8 - y| / |y|`` (root of the sum of squares) of the product of ``rows`` ``[M, K]`` with ``weight`` ``[N, K]``
    and with that weight in 8 bits, both in float32; 0 where both are zero. inf or NaN in either make it inf."""
    rounded = int8_linear(rows, matrix, out_dtype=torch.float32)
    wide, squares = rows.float(), torch.zeros(2, dtype=torch.float64, device=rows.device)
    step = max(1, _SLICE_NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        exact = F.linear(wide, weight[start : start + step].float())
        found = rounded[:, start : start + step]
        squares += torch.stack(
            [(found - exact).square().sum(dtype=torch.float64), exact.square().sum(dtype=torch.float64)]
        )
    difference, size = squares.sqrt().tolist()
    if not (difference < float("inf") and size < float("inf")):
        return float("inf")
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def errors_by_rotation(x: Tensor, weight: Tensor) -> dict[int, float]:
    """:func:`relative_error` for each rotation, on a sample of ``x`` ``[..., K]``."""
    rows = sample_of(x)
    return {size: relative_error(rows, weight, quantize_rows(weight, size)) for size in rotations_for(weight.shape[1])}


def best_rotation(errors: dict[int, float], max_error: float) -> int:
    """None, unless one is worth its time, or only with it the error is within its limit."""
    size = min(errors, key=lambda size: errors[size])
    is_needed = errors[size] <= max_error < errors[0]
    return size if is_needed or errors[size] < _WORTH * errors[0] else 0


def times_of(x: Tensor, weight: Tensor, bias: Tensor | None, matrix: Int8Matrix, clock: Clock) -> Times:
    """Of one call, timed in turn."""
    with torch.no_grad():
        bias = None if bias is None else bias.to(x.dtype)
        of_float, of_int8 = clock(
            [lambda: F.linear(x, weight.to(x.dtype), bias), lambda: int8_linear(x, matrix, bias)], x.device
        )
    return Times(of_float, of_int8)
