"""Lanes that write down what is put into them and when it would run, while everything is computed at once on a CPU: a
stand-in for CUDA's streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pascal_attn_core.several.lanes import AT_HOME, Lane, Lanes, Place


@dataclass(eq=False)
class Step:
    """One thing in a lane.

    Attributes:
        name: ``"copy"`` or ``"run"``.
        lanes: that it occupies.
        begins, ends: milliseconds on the modelled clock.
        before: steps that are over when it begins, those that they follow left out.
        reads, writes: addresses of the storages.
    """

    name: str
    lanes: tuple[Lane, ...]
    begins: float
    ends: float
    before: set[Step]
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def overlaps(self, other: Step) -> bool:
        return self.begins < other.ends and other.begins < self.ends


@dataclass(eq=False)
class ModelMark:
    reached: float
    after: set[Step]


class ModelLanes(Lanes):
    """
    Args:
        copy_ms: of a copy of so many bytes in a lane; run_ms: of the next thing computed there.
        fail: called with the name and the number of each thing before it is done; may raise.
    """

    def __init__(
        self,
        *,
        is_direct: bool = False,
        copy_ms: Callable[[Lane, int], float] = lambda lane, num_bytes: 1.0,
        run_ms: Callable[[], float] = lambda: 1.0,
        fail: Callable[[str, int], None] = lambda name, number: None,
        device: str = "cpu",
    ):
        self.home = self.away = torch.device(device)
        self.is_direct, self.copy_ms, self.run_ms, self.fail = is_direct, copy_ms, run_ms, fail
        self.steps: list[Step] = []
        self.allocated: dict[Place, int] = dict.fromkeys(Place, 0)
        self.alive: list[tuple[Place, int, Tensor]] = []
        self.count = 0
        self.drained = 0
        self._free = dict.fromkeys(Lane, 0.0)  # when a lane is done with what it has
        self._known: dict[Lane, set[Step]] = {lane: set() for lane in Lane}  # steps over before its next one
        self._host_time = 0.0
        self._host: set[Step] = set()  # steps that the host knows to be over

    def _number(self, name: str) -> None:
        self.count += 1
        self.fail(name, self.count)

    @contextmanager
    def open(self) -> Iterator[None]:
        yield

    def follow_caller(self) -> None:
        pass

    def settle(self) -> None:
        pass

    @contextmanager
    def on(self, *lanes: Lane) -> Iterator[None]:
        if lanes == (Lane.RUN,):
            self._number("run")
        yield
        if lanes == (Lane.RUN,):
            self._put("run", lanes, self.run_ms(), set(), set())

    def mark(self, lane: Lane) -> ModelMark:
        return ModelMark(self._free[lane], set(self._known[lane]))

    def after(self, lane: Lane, mark: ModelMark) -> None:
        self._free[lane] = max(self._free[lane], mark.reached)
        self._known[lane] |= mark.after

    def wait(self, mark: ModelMark) -> None:
        self._number("wait")
        self._host_time = max(self._host_time, mark.reached)
        self._host |= mark.after

    def empty_like(self, tensor: Tensor, place: Place, lane: Lane) -> Tensor:
        self._number(f"allocate {place.value}")
        assert place != Place.HOME or lane in AT_HOME
        made = torch.empty_like(tensor)
        self.allocated[place] += made.numel() * made.element_size()
        return made

    def copy(self, target: Tensor, source: Tensor, *lanes: Lane) -> None:
        self._number("copy")
        target.copy_(source)
        num_bytes = target.numel() * target.element_size()
        spent = max(self.copy_ms(lane, num_bytes) for lane in lanes)
        self._put("copy", lanes, spent, {_place(source)}, {_place(target)})

    def drain(self) -> None:
        self.drained += 1
        self._host |= set().union(*self._known.values())

    def spent(self) -> tuple[float, float]:
        copies = sum(s.ends - s.begins for s in self.steps if s.name == "copy" and not set(s.lanes) <= set(AT_HOME))
        return copies, sum(s.ends - s.begins for s in self.steps if s.name == "run")

    def _put(self, name: str, lanes: tuple[Lane, ...], spent: float, reads: set[int], writes: set[int]) -> None:
        before = set(self._host).union(*(self._known[lane] for lane in lanes))
        begins = max([self._host_time, *(self._free[lane] for lane in lanes)])
        step = Step(name, lanes, begins, begins + spent, before, reads, writes)
        self.steps.append(step)
        for lane in lanes:
            self._free[lane] = step.ends
            self._known[lane] = before | {step}

    def of(self, *lanes: Lane) -> list[Step]:
        return [step for step in self.steps if set(step.lanes) & set(lanes)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_meta else id(tensor.untyped_storage()._cdata)
