"""ErrorWatch: in which calls a result in 8 bits is compared with the exact one, and which errors were found.

What rounding costs depends on the inputs, so it is measured again and again, but in few calls. The calls of a run are
counted from 1. The first three are checked; then the gap between two checks is 7 three times, 13 three times, 19 three
times, and so on up to 61: calls 1, 2, 3, 10, 17, 24, 37, 50, 63, 82, 101, 120, 145 ...

A sampler may call a model two or three times in each step, once for each branch of its guidance, and only one branch
may have the outliers. Checks at even counts alone never see one of two branches. Here each gap is one more than a
multiple of 6, so any two checks in a row see both of two branches, and any three see each of three. With more branches
it takes a few checks more, but none is left out.

Inputs of a new size begin with the first gap again. Sizes count as equal up to the next power of two, so a text that
grows word by word is not measured in each call.
"""

from __future__ import annotations

from ..routes.timing_table import power_of_two

_MOST_GAP = 61


class ErrorWatch:
    """The checks of one operation in one run.

    Attributes:
        calls: number of calls in this run.
        latest, largest: relative errors found in this run; None = nothing was measured.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new run begins: nothing is known of its inputs."""
        self.calls, self._next, self._checks = 0, 1, 0
        self._sizes: set[int] = set()
        self.latest: float | None = None
        self.largest: float | None = None

    def check_now(self, rows: int) -> bool:
        """Count a call with this number of rows. True = its error is to be measured."""
        self.calls += 1
        size = power_of_two(rows)
        if size in self._sizes and self.calls < self._next:
            return False
        if size not in self._sizes:
            self._sizes.add(size)
            self._checks = 0
        self._checks += 1
        self._next = self.calls + min(6 * (self._checks // 3) + 1, _MOST_GAP)
        return True

    def saw(self, error: float) -> None:
        """An error was measured."""
        self.latest = error
        self.largest = error if self.largest is None else max(error, self.largest)
