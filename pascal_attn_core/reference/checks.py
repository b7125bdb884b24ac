"""Is it right? How far an answer is from the right one, what rounding explains, and which rows to look at.

Whatever tries a kernel, a module or a host on a small call, or watches one while it works, asks here. Code that runs
in the middle of a user's call does so through :func:`..machine.own_thread.in_own_thread`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# An exact answer may be twice as far off as plain attention, and some units in the last place where that is lucky.
_FACTOR, _ULPS = 2.0, 16.0
WITHOUT_FLOAT64 = ("mps", "xpu")
_TF32_EPS = 2.0**-10


class Gap(NamedTuple):
    """The distance between an answer and the right one.

    Attributes:
        error: largest absolute difference; infinite where the shapes differ, or the answer is NaN where the right one
            is a number.
        largest: largest absolute value of the right answer.
    """

    error: float
    largest: float

    @property
    def relative(self) -> float:
        """The error in units of the largest value."""
        return self.error / self.largest if self.largest else (math.inf if self.error else 0.0)

    def is_rounding(self, *dtypes: torch.dtype) -> bool:
        """Whether rounding to these dtypes explains the error, see :func:`tolerance`."""
        return self.relative <= tolerance(*dtypes)


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64: on the CPU for Apple's GPUs and Intel's, some of which have none, else where it is."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()


def gap(found: Tensor, right: Tensor) -> Gap:
    """The distance of ``found`` from ``right``, in float64. Elements in which ``right`` is NaN or infinite do not
    count."""
    if found.shape != right.shape:
        return Gap(math.inf, 0.0)
    if not right.numel():
        return Gap(0.0, 0.0)
    found, right = in_float64(found.detach().to(right.device)), in_float64(right.detach())
    known = right.isfinite()
    apart, sizes = (torch.where(known, t.abs(), 0.0).max() for t in (found - right, right))
    error, largest = torch.stack([apart, sizes]).tolist()
    return Gap(math.inf if math.isnan(error) else error, largest)


def tolerance(*dtypes: torch.dtype) -> float:
    """The largest relative error of numbers that were computed with these dtypes: the square root of the coarsest
    one's precision. That is far above any rounding, and far below an element in the wrong place. Dtypes that are not
    floating do not count."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return math.sqrt(max(coarsest, _matmul_eps()))


def _matmul_eps() -> float:
    """Precision in which the process lets torch multiply float32 matrices, 0 where they are not rounded."""
    try:
        precision = torch.get_float32_matmul_precision()
        allows_tf32 = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set by torch's older and newer switches, which then disagree
        return _TF32_EPS
    if precision == "medium":
        return torch.finfo(torch.bfloat16).eps
    return _TF32_EPS if precision == "high" or allows_tf32 else 0.0


def exact_limit(plain: Gap, dtype: torch.dtype) -> float:
    """The largest absolute error of an exact answer; ``plain``: the distance of plain attention, computed in ``dtype``
    throughout, from the same right answer."""
    ulps = _ULPS * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    error = plain.error if math.isfinite(plain.error) else 0.0  # float16 that has overflowed
    return _FACTOR * error + ulps * plain.largest


def rows_to_check(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    """Indices of about ``count`` of ``rows`` ``[M, K]``: a quarter of them are those of largest norm, the others are
    drawn. A regular step would be blind for whatever has the same period. torch's random state is left alone.

    Args:
        seed: of the draw; another one for each check of a series.
    """
    total = rows.shape[0]
    if total <= count:
        return torch.arange(total, device=rows.device)
    norms = torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float32)  # NaN counts as the largest
    largest = norms.topk(-(-count // 4)).indices
    drawn = torch.randint(total, (count - len(largest),), generator=torch.Generator().manual_seed(seed))
    return torch.cat([largest, drawn.to(rows.device)]).unique()
