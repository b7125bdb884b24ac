"""Where NaN enters and leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .meter import is_finite
from .runs import stale


def not_finite(values: Iterable[Any]) -> bool:
    """Whether a floating-point tensor among ``values`` holds NaN or infinity; no others are looked at."""
    tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return any(not stale(tensor.device) and tensor.numel() > 0 and not is_finite(tensor) for tensor in tensors)
