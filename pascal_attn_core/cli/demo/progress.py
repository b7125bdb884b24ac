"""The demo's progress: a bar on a terminal, one line per run in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Shows which run is under way. ``begin(title)``, ``step()`` per denoising step, ``end(result)``.

    Args:
        runs: how many runs there will be.
        steps: denoising steps of each.
    """

    def __init__(self, runs: int, steps: int):
        self._total, self._steps = runs * steps, steps
        self._finished, self._title = 0, ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                SpinnerColumn(),
                BarColumn(30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, title: str) -> None:
        """A run starts."""
        self._title = title
        if self._bar is not None:
            self._bar.update(self._task, description=title)

    def step(self) -> None:
        """One denoising step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def end(self, result: str) -> None:
        """The run is over, whether all its steps took place or not."""
        self._finished += self._steps
        line = f"{self._title}: {result}"
        if self._bar is None:
            print(line, flush=True)
            return
        self._bar.update(self._task, completed=self._finished)
        self._bar.console.print(line, highlight=False, markup=False)
