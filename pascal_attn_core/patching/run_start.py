"""Where a run of a diffusers pipeline begins: its scheduler is given the number of steps (``set_timesteps``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHOD = "set_timesteps"


class _SetTimesteps:
    """Stands in a scheduler in place of its method, and tells that a run begins."""

    __slots__ = ("begins", "scheduler")

    def __init__(self, scheduler: Any):
        self.scheduler, self.begins = scheduler, list[Callable[[], None]]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for begin in self.begins:
            begin()
        return getattr(type(self.scheduler), _METHOD)(self.scheduler, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Copied or pickled, it is the scheduler's own method: a file must not depend on this package."""
        return getattr, (self.scheduler, _METHOD)


def at_run_start(target: Any, begin: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` where a run of a pipeline begins; for anything else, nothing is done. Returns what ends that."""
    changed = []
    for scheduler in (getattr(target, "components", None) or {}).values():
        if not hasattr(type(scheduler), _METHOD):
            continue
        method = vars(scheduler).setdefault(_METHOD, _SetTimesteps(scheduler))
        if isinstance(method, _SetTimesteps):  # else someone else's, which is left alone
            method.begins.append(begin)
            changed.append(method)

    def forget() -> None:
        for method in changed:
            method.begins.remove(begin)
            if not method.begins and vars(method.scheduler).get(_METHOD) is method:
                del vars(method.scheduler)[_METHOD]

    return forget
