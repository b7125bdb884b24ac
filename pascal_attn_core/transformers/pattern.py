"""Takes Transformers' mask functions apart: a band of keys around the query, and the rest as a function.

Transformers builds a mask from closures: ``and_masks(sliding_window_overlay(n), causal_mask_function)``. They are
recognised by the name of the function that made them; what is not recognised is called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[..., Tensor]
_HOST = "transformers.masking_utils"


class Pattern(NamedTuple):
    """A mask function taken apart: keys from q - left to q + right (None = no bound) that all of ``rest`` allow too."""

    left: int | None = None
    right: int | None = None
    rest: tuple[MaskFunction, ...] = ()

    def __and__(self, other: Pattern) -> Pattern:
        return Pattern(_least(self.left, other.left), _least(self.right, other.right), self.rest + other.rest)


def _least(one: int | None, other: int | None) -> int | None:
    return min((side for side in (one, other) if side is not None), default=None)


def read_pattern(function: MaskFunction) -> Pattern:
    """The parts of a mask function that Transformers built; what is not recognised is kept unchanged."""
    name = made_by(function)
    if name == "causal_mask_function":
        return Pattern(right=0)
    if name == "bidirectional_mask_function":
        return Pattern()
    cells = _cells(function) if name else {}
    if name == "and_masks":
        return _read_all(cells.get("mask_functions", ()))
    size = cells.get("sliding_window", cells.get("chunk_size"))
    if isinstance(size, int) and size > 0:
        if name == "sliding_window_overlay" and _is_band(function, size - 1, None):
            return Pattern(left=size - 1)
        if name == "sliding_window_bidirectional_overlay" and _is_band(function, size, size):
            return Pattern(left=size, right=size)
        if name == "chunked_overlay":  # two tokens of a chunk are less than a chunk apart
            return Pattern(size - 1, size - 1, (function,))
    return Pattern(rest=(function,))


def _read_all(functions: tuple[MaskFunction, ...]) -> Pattern:
    """The parts of a conjunction. Packed sequences come as "same sequence" and a rule on positions inside a sequence;
    positions increase by one, so within a sequence such a rule means the same for positions and indices."""
    is_packed = any(made_by(function) == "packed_sequence_mask_function" for function in functions)
    pattern = Pattern()
    for function in functions:
        inner = _cells(function).get("mask_function")
        if is_packed and inner is not None and made_by(function) == "remap_positions_for_packed_sequence":
            part = read_pattern(inner)
            pattern &= part if not part.rest else Pattern(rest=(function,))
        else:
            pattern &= read_pattern(function)
    return pattern


def made_by(function: MaskFunction) -> str:
    """The name of the function of Transformers that this is or that made it; "" for others."""
    if getattr(function, "__module__", "") != _HOST:
        return ""
    return getattr(function, "__qualname__", "").partition(".")[0]


def _cells(function: MaskFunction) -> dict[str, Any]:
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    return {name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or ())}


_verified: dict[Any, bool] = {}


def _is_band(function: MaskFunction, left: int, right: int | None) -> bool:
    """Whether a sliding window means in this version of Transformers what we assume: checked once, at the edges of a
    window."""
    code = function.__code__
    if code not in _verified:
        query = 2 * left + 5
        edges = [query - left - 1, query - left, query, query + (right or 0), query + (right or 0) + 1]
        wanted = [False, *(right is None or k <= query + right for k in edges[1:])]
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        found = function(zero, zero, zero + query, torch.tensor(edges).view(1, 1, 1, -1))
        _verified[code] = found.flatten().tolist() == wanted
    return _verified[code]
