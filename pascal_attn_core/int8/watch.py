"""ErrorWatch: in which calls a result in 8 bits is compared with the exact one, and which errors were found.

What rounding costs depends on the inputs, so it is measured again and again, but in few calls. The calls of a run are
counted from 1. The first three are checked; then the gap between two checks is 5 three times, 11 three times, and 17
from then on: calls 1, 2, 3, 8, 13, 18, 29, 40, 51, 68, 85, 102, 119 ... The largest gap is for hosts that do not say
where a run begins: an image of 20 steps or more has a check even there. Other hosts end a run before it matters.
A weight that changes is not found by these checks, but in the next call.

A sampler may call a model two or three times in each step, once for each branch of its guidance, and only one branch
may have the outliers. Checks at even counts alone never see one of two branches. Here each gap is one less than a
multiple of 6, so two checks in a row see both of two branches, and three see each of three. After the third check, and
with more branches, it takes a few checks more, but none is left out.

Outliers may also come in late steps only. The gap after the third check is one shorter in each run, and 5 again after
1, so that five runs check every one of the first 18 calls: of runs of 20 steps all but the last two.

Inputs of a new kind (number of rows and of keys, dtype, device) begin with the first gap again. Numbers count as equal
up to the next power of two, so a text that grows word by word is not measured in each call. Another operation, such as
that of another weight, begins so too, without errors.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..contest.timing_table import power_of_two
from .measure import Errors

_MOST_GAP = 17


class ErrorWatch:
    """The checks of one operation in one run.

    Attributes:
        calls: number of calls in this run.
        latest: errors found last in this run; None = nothing was measured.
        largest: of this run; before its first check, of the run before it.
    """

    def __init__(self) -> None:
        self._runs = -1
        self.largest: Errors | None = None
        self.restart()

    def restart(self) -> None:
        """A new run begins: nothing is known of its inputs."""
        self.calls, self._next, self._checks = 0, 1, 0
        self._kinds: set[Hashable] = set()
        self.latest: Errors | None = None
        self._runs += 1

    def forget(self) -> None:
        """The operation is another one from now on: nothing is known of its errors."""
        self._kinds = set()
        self.latest = self.largest = None

    def check_now(self, x: Tensor, keys: int = 0) -> bool:
        """Count a call with input ``x`` ``[..., K]``, of attention with this number of keys. True = its error is to be
        measured."""
        self.calls += 1
        kind = power_of_two(x.shape[:-1].numel()), keys and power_of_two(keys), x.dtype, x.device
        if kind in self._kinds and self.calls < self._next:
            return False
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._checks = 0
        self._checks += 1
        earlier = self._runs % 5 if self._checks == 3 else 0
        self._next = self.calls + max(1, min(6 * (self._checks // 3) - 1, _MOST_GAP) - earlier)
        return True

    def saw(self, found: Errors) -> None:
        """Errors were measured."""
        self.largest = found if self.latest is None else found.or_larger(self.largest)
        self.latest = found
