"""What the name of a kernel kind says, as in ``"volta_grad_query_capped_packed"``."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Traits(NamedTuple):
    """What a kind is for.

    Attributes:
        generation: of matrix units, ``"volta"``, ``"tensor"`` or ``"wmma"``; "" = plain cores.
        is_gradient: it computes gradients; of_keys: those of key and value.
        is_capped: of calls with a softcap, on plain cores with sinks too.
        is_packed: of sequences of different lengths.
        is_small: for few query rows: its tiles hold those of a group of heads, the keys may be cut.
        is_even: the blocks of a launch are listed in its parameters.
    """

    generation: str
    is_gradient: bool
    of_keys: bool
    is_capped: bool
    is_packed: bool
    is_small: bool
    is_even: bool


@functools.cache
def traits_of(kind: str) -> Traits:
    words = kind.split("_")
    generation = words[0] if words[0] in ("volta", "tensor", "wmma") else ""
    is_small = words[-1] in ("split", "small")
    named = (word in words for word in ("grad", "key", "capped", "packed"))
    return Traits(generation, *named, is_small, "even" in words)
