"""From time to time a few tokens of a sliced call are run by themselves and compared with the result.

What a module's code refers to by name is compared in every call (:mod:`.state`); this check finds, within some calls,
changes of what no name leads to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..machine.own_thread import made_up_inputs
from ..reference.checks import gap
from .plan import Slicing
from .run import Inputs, slice_of
from .trial import uncompiled

MOST_TOKENS = 64
_MOST_CALLS = 16  # between two checks
_SPREAD = 0.6180339887498949  # the fractional parts of its multiples are spread evenly over 0 .. 1


class Recheck:
    """When to check again: in the 3rd call after a trial, the 4th, 6th, 9th ... and every 16th from then on."""

    def __init__(self) -> None:
        self.calls, self._next, self._done = 0, 3, 0

    def is_due(self) -> bool:
        """Count one call."""
        self.calls += 1
        if self.calls < self._next:
            return False
        self._next = self.calls + min(max(1, self.calls // 2), _MOST_CALLS)
        self._done += 1
        return True

    def passes(self, fn: Callable[..., Any], module: nn.Module, inputs: Inputs, plan: Slicing, out: Tensor) -> bool:
        """Whether some tokens out of one of the slices, run by themselves, give the same results as in ``out``
        ``[..., T, D]``."""
        sizes = plan.sizes
        which = int(len(sizes) * (self._done * _SPREAD % 1))
        count = min(MOST_TOKENS, sizes[which] // 2)
        start = sum(sizes[:which]) + int((sizes[which] - count + 1) * (self._done * _SPREAD**2 % 1))
        with torch.no_grad(), uncompiled(module), made_up_inputs():
            tokens = [slice_of(tensor.detach(), start, count).clone() for tensor in inputs.tokens.values()]
            again = inputs.call(fn, tokens)
        within = out.detach().narrow(-2, start, count)
        return isinstance(again, Tensor) and gap(again, within).relative <= (plan.relative or 0.0)
