"""What the functions return, and what is counted on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class AttentionOutput(NamedTuple):
    """out ``[*batch, Hq, L, Dv]``; lse ``[*batch, Hq, L]``, natural logarithm, -inf for a row without keys."""

    out: Tensor
    lse: Tensor


@dataclass
class TiledStats:
    """Query blocks worked on, how many of them were bounded, and how often the device ran out of memory on the way."""

    blocks: int = 0
    bounded_blocks: int = 0
    budget_halvings: int = 0


class TiledOutput(NamedTuple):
    """What a forward pass returns.

    out: ``[*batch, Hq, L, Dv]`` in the dtype of the query.
    lse: ``[*batch, Hq, L]`` in the dtype of the sums, or None.
    log_sum: lse - row_max, kept apart for gradients under a float mask: a bias of -finfo.max would swallow it in lse.
    """

    out: Tensor
    lse: Tensor | None
    log_sum: Tensor | None
