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
_MOST_PARTS = 16
RARE = 32  # one row in so many may be further off than the limit
_SLICE_NUMBERS = 1 << 22  # of a weight that are held in float32
# A rotation costs time in every call: it should make the error this much smaller.
_WORTH = 0.75


class Times(NamedTuple):
    """Milliseconds of one call, as it was and as it is where the layer is on."""

    before: float
    after: float


class Sample(NamedTuple):
    """Rows ``[M, K]`` that stand for a whole input, and counts ``[M, parts]``, as
    :func:`..reference.checks.in_float64` has it: the number of rows of each of the input's :func:`parts_of` that each
    row stands for."""

    rows: Tensor
    counts: Tensor


class Errors(NamedTuple):
    """How far a result is from the exact one, relative, in the 2-norm.

    Attributes:
        error: the largest of a part of the input (:func:`parts_of`).
        rows: the largest such that more than one row in 32 of a part is as far off: few tokens beside many others.
        worst_row: the largest of one row.
    """

    error: float
    rows: float
    worst_row: float

    @property
    def judged(self) -> float:
        """The number by which a layer is judged."""
        return max(self.error, self.rows)

    def or_larger(self, other: Errors | None) -> Errors:
        """The larger of each."""
        return self if other is None else Errors(*map(max, self, other))


def sample_of(x: Tensor, most: int, seed: int) -> Sample:
    """At most ``most`` rows of ``x`` ``[..., K]``; ``seed``: of the draw."""
    flat = x.detach().reshape(-1, x.shape[-1])
    chosen, counts = chosen_rows(flat, most, seed)
    parts = parts_of(x)
    part = torch.div(chosen * parts, max(1, flat.shape[0]), rounding_mode="floor")
    return Sample(flat[chosen], counts[:, None] * F.one_hot(part.to(counts.device), parts))


def outputs_of(count: int, rows: int, seed: int) -> slice | Tensor:
    """Which of a layer's outputs are looked at with a sample of so many rows: few with few rows, else all."""
    if rows != FEW_ROWS:
        return slice(None)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:FEW_OUTPUTS]


def parts_of(x: Tensor) -> int:
    """The number of equal parts of an input ``[..., K]`` that are judged one by one, since only one of them may have
    the outliers: the items of a batch of up to 16. Of a larger one, and of rows ``[M, K]``, halves, thirds or sixths:
    guidance puts two or three branches into one call, one after the other."""
    count = x.shape[0] if x.dim() > 1 else 1
    return count if x.dim() > 2 and 0 < count <= _MOST_PARTS else math.gcd(count, 6)


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


def relative_error(sample: Sample, weight: Tensor, matrix: Int8Matrix) -> Errors:
    """The :class:`Errors` of the product of a sample with ``weight`` ``[N, K]`` and with that weight in 8 bits, both in
    float32."""
    step = max(1, _SLICE_NUMBERS // weight.shape[1])
    slices = [slice(start, start + step) for start in range(0, weight.shape[0], step)]
    rounded = int8_linear(sample[0], matrix, out_dtype=torch.float32)
    return error_of(sample, rounded, ((some, weight[some].float()) for some in slices))


def error_of(sample: Sample, rounded: Tensor, weights: Iterable[tuple[slice, Tensor]]) -> Errors:
    """The errors of a sample's product in 8 bits, ``rounded`` ``[M, N]``. ``weights``: slices of the N rows of the
    weight, and those rows in float32."""
    rows, counts = sample
    wide, squares = rows.float(), torch.zeros(2, len(rows), dtype=torch.float64, device=counts.device)
    for some, weight in weights:
        exact = F.linear(wide, weight)
        squares += torch.stack([row_squares(part) for part in (rounded[:, some] - exact, exact)])
    return errors_of(squares[0], squares[1], counts)


def row_squares(rows: Tensor) -> Tensor:
    """The sum of squares of each of ``rows`` ``[..., K]`` as float64: squares of float32 would be 0 or infinite for
    some."""
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return in_float64((rows / largest).square().sum(dim=-1)) * in_float64(largest).square().squeeze(-1)


def errors_of(wrong: Tensor, size: Tensor, counts: Tensor) -> Errors:
    """The errors of rows; 0 where there is none, also beside a result of 0. inf or NaN in either make them inf.

    Args:
        wrong, size: float64 ``[M]``, the sums of squares of each row of the error and of the exact result.
        counts: ``[M, parts]``, as :class:`Sample` has it.
    """
    pairs = (wrong @ counts, size @ counts), (wrong, size)
    whole, rows = (torch.where(above == 0, 0.0, above / below) for above, below in pairs)
    order = rows.argsort(descending=True)  # NaN counts as the largest
    rows, counts = rows[order], counts[order]
    so_far = counts.cumsum(dim=0)
    is_many = (counts > 0) & (so_far > (so_far[-1:] / RARE).clamp_min(1.0))
    many = torch.where(is_many, rows[:, None], 0.0)
    largest = torch.stack([whole.amax(), many.amax(), rows.amax()]).sqrt()
    return Errors(*largest.nan_to_num(math.inf, math.inf).tolist())


def errors_by_rotation(sample: Sample, weight: Tensor) -> dict[int, Errors]:
    """:func:`relative_error` without a rotation (0) and with the largest group that divides the columns."""
    sizes = (0, *[size for size in ROTATIONS if weight.shape[1] % size == 0][:1])
    return {size: relative_error(sample, weight, quantize_rows(weight, size)) for size in sizes}


def best_rotation(errors: dict[int, Errors], max_error: float) -> int:
    """The rotation to take: none (0), unless one is worth its time, or only with it the error is within its limit."""
    size, without = min(errors, key=lambda size: errors[size].judged), errors[0].judged
    is_needed = errors[size].judged <= max_error < without
    return size if is_needed or errors[size].judged < _WORTH * without else 0
