"""The traits that the name of a kernel kind spells, as in ``"volta_grad_query_capped_packed"``."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Traits(NamedTuple):
    """The traits of a kind.

    Attributes:
        generation: of matrix units, ``"volta"``, ``"tensor"`` or ``"wmma"``; "" = plain cores.
        is_gradient: it computes gradients; of_keys: those of key and value.
        is_capped: it takes calls with a softcap, on plain cores with sinks too.
        is_packed: it takes sequences of different lengths in one launch.
        is_small: it is for few query rows. Its tiles hold those of a group of heads, and the keys may be cut.
        is_even: its parameters list the blocks of a launch.
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
    """The only place that reads the name of a kind."""
    words = kind.split("_")
    return Traits(
        generation=words[0] if words[0] in ("volta", "tensor", "wmma") else "",
        is_gradient="grad" in words,
        of_keys="key" in words,
        is_capped="capped" in words,
        is_packed="packed" in words,
        is_small=words[-1] in ("split", "small"),
        is_even="even" in words,
    )
