"""The cost of 8 bits for a layer: its error on real inputs, with each rotation, and its time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.checks import in_float64, rows_to_check
from ..reference.int8_rows import ROTATIONS, Int8Matrix, quantize_rows
from .product import int8_linear

SAMPLE_ROWS = 512
FEW_ROWS, FEW_OUTPUTS = 128, 1024  # of a check that costs little
_SLICE_NUMBERS = 1 << 22  # of a weight that are held in float32
# A rotation costs time in every call: it should make the error this much smaller.
_WORTH = 0.75


class Times(NamedTuple):
    """Milliseconds of one call, in float and in 8 bits."""

    in_float: float
    in_int8: float


class Sample(NamedTuple):
    """Rows ``[M, K]`` that stand for a whole input, and counts ``[M, branches]``, as
    :func:`..reference.checks.in_float64` has it: the number of rows of each of the input's :func:`branches` that each
    row stands for."""

    rows: Tensor
    counts: Tensor


def sample_of(x: Tensor, most: int, seed: int) -> Sample:
    """At most ``most`` rows of ``x`` ``[..., K]``."""
    flat = x.detach().reshape(-1, x.shape[-1])
    chosen, counts = chosen_rows(flat, most, seed)
    parts = branches(x.shape[0]) if x.dim() > 2 else 1
    branch = torch.div(chosen * parts, max(1, flat.shape[0]), rounding_mode="floor")
    return Sample(flat[chosen], counts[:, None] * F.one_hot(branch.to(counts.device), parts))


def branches(batch: int) -> int:
    """The number of equal parts of a batch that are judged one by one: guidance puts two or three branches into one
    call, one after the other, and only one of them may have the outliers."""
    return math.gcd(batch, 6)


def chosen_rows(flat: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of at most ``most`` rows ``[M, K]``, see :func:`..reference.checks.rows_to_check`, and float64 how many
    rows each stands for: those of largest norm for themselves, the drawn ones for all other rows."""
    chosen, count = rows_to_check(flat, most, seed), flat.shape[0]
    counts = in_float64(torch.ones(len(chosen), device=flat.device))
    if len(chosen) < count:
        largest = -(-most // 4)
        norms = torch.linalg.vector_norm(flat[chosen], dim=1, dtype=torch.float32)
        drawn = norms.topk(len(chosen) - largest, largest=False).indices
        counts[drawn.to(counts.device)] = (count - largest) / len(drawn)
    return chosen, counts


def relative_error(sample: Sample, weight: Tensor, matrix: Int8Matrix) -> float:
    """``|y8 - y| / |y|`` (root of the sum of squares) of the product of a sample with ``weight`` ``[N, K]`` and with
    that weight in 8 bits, both in float32, the largest of its :func:`branches`; 0 where both are zero. inf or NaN in
    either make it inf."""
    step = max(1, _SLICE_NUMBERS // weight.shape[1])
    slices = [slice(start, start + step) for start in range(0, weight.shape[0], step)]
    rounded = int8_linear(sample[0], matrix, out_dtype=torch.float32)
    return error_of(sample, rounded, ((some, weight[some].float()) for some in slices))


def error_of(sample: Sample, rounded: Tensor, weights: Iterable[tuple[slice, Tensor]]) -> float:
    """The relative error of a sample's product in 8 bits, ``rounded`` ``[M, N]``, as :func:`relative_error` has it.
    ``weights``: slices of the N rows of the weight, and those rows in float32."""
    rows, counts = sample
    wide, squares = rows.float(), torch.zeros(2, counts.shape[1], dtype=torch.float64, device=counts.device)
    for some, weight in weights:
        exact = F.linear(wide, weight)
        wrong = rounded[:, some] - exact
        squares += in_float64(torch.stack([part.square().sum(dim=1) for part in (wrong, exact)])) @ counts
    errors = torch.where(squares[0] == 0, 0.0, squares[0] / squares[1])
    return errors.amax().sqrt().nan_to_num(float("inf")).item()


def errors_by_rotation(sample: Sample, weight: Tensor) -> dict[int, float]:
    """:func:`relative_error` without a rotation (0) and with the largest group that divides the columns."""
    sizes = (0, *[size for size in ROTATIONS if weight.shape[1] % size == 0][:1])
    return {size: relative_error(sample, weight, quantize_rows(weight, size)) for size in sizes}


def best_rotation(errors: dict[int, float], max_error: float) -> int:
    """The rotation to take: none (0), unless one is worth its time, or only with it the error is within its limit."""
    size = min(errors, key=lambda size: errors[size])
    is_needed = errors[size] <= max_error < errors[0]
    return size if is_needed or errors[size] < _WORTH * errors[0] else 0
