"""Which warps go on where: lanes that part stay apart until the code joins them (SSY/SYNC, PBK/BRK, CAL/RET up to
sm_61; BSSY/BSYNC, WARPSYNC from sm_70), and the block's barriers. Which of several places is next is drawn by
chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pascal_attn_core.fused.launch import Launch

from ..fused.memory import Memory
from .code import Instruction, MachineKernel
from .operations import operation, operation_of
from .warps import I32, I64, U32, Array, Cohort, Stack, Warps, bits_of, lanes_of

_SLOTS, _WARPSYNC = 32, 16  # behind those of B0 ... B15
_MOST = 2_000_000  # instructions; the longest launch of a sample call has a tenth of it
Watch = Callable[[Instruction], None]
_ERRORS = (AssertionError, IndexError, KeyError, ValueError, TypeError, StopIteration)


class Flow(Warps):
    """Warps that execute a kernel.

    Args:
        scatters: from the start and from each barrier on some warps of a block run ahead of the others.
        watch: is given each instruction before it is executed.

    Attributes:
        ready: which can go on; parked: which wait at the block's barrier.
        partners, target: of each slot and lane, the lanes that wait there for each other, and where they go on.
        waits, goes_on, stack_of: of lanes that wait, at which slot, and where and with which of ``stacks`` they go on.
        voted, answer: of blocks, what their lanes have said at a barrier, and did at the last one.
        steps: instructions so far, those of all warps at a place as one.
    """

    def __init__(
        self,
        kernel: MachineKernel,
        launch: Launch,
        blocks: list[tuple[int, ...]],
        memory: Memory,
        rng: random.Random,
        scatters: bool,
        watch: Watch | None,
    ):
        super().__init__(kernel, launch, blocks, memory)
        self.rng, self.scatters, self.watch = rng, scatters, watch
        self.operations = [operation_of(i) for i in kernel.instructions]
        self.meetings = set(kernel.labels.values())
        self.partners = np.zeros((_SLOTS, self.count, 32), U32)
        self.target = np.zeros((_SLOTS, self.count, 32), I32)
        self.waits = np.full((self.count, 32), -1, I32)
        self.goes_on, self.stack_of = np.zeros((self.count, 32), I32), np.zeros((self.count, 32), I32)
        self.stacks: list[Stack] = [()]
        self.at_barrier = np.zeros(self.count, U32)
        self.voted, self.answer = np.zeros(len(blocks), bool), np.zeros(len(blocks), bool)
        self.ready: list[Cohort] = []
        self.parked: list[Cohort] = []
        self.steps = 0

    def run(self) -> None:
        self.start(self.cohort, lanes_of(self.live))
        with np.errstate(all="ignore"):
            while self.ready:
                self._advance(self._pick())
        assert not self.live.any(), f"{self.kernel.name}: lanes wait for others that never come"

    def _pick(self) -> Cohort:
        """Mostly the first in the text."""
        if self.scatters or self.rng.random() < 0.125:
            return self.ready.pop(self.rng.randrange(len(self.ready)))
        return self.ready.pop(min(range(len(self.ready)), key=lambda n: self.ready[n].place))

    def _advance(self, cohort: Cohort | None) -> None:
        """Up to where the lanes part, wait or end."""
        is_first = True
        while cohort is not None:
            self.cohort, self.rows = cohort, cohort.rows
            if cohort.place in self.meetings and self.ready and not is_first and not self._runs_ahead():
                self.push(cohort)
                return
            is_first = False
            self.steps += 1
            assert self.steps < _MOST, f"{self.kernel.name}: it does not end"
            if self.watch is not None:
                self.watch(self.kernel.instructions[cohort.place])
            i, (run, _, steers) = self.kernel.instructions[cohort.place], self.operations[cohort.place]
            try:
                is_executed = self._is_executed(i)
                found = run(self, i) if is_executed else None
            except _ERRORS as error:
                raise AssertionError(f"{self.kernel.name}, {i.address:#06x} {i.text}: {error}") from error
            if is_executed and steers:
                cohort = found
            else:
                cohort.place += 1

    def _runs_ahead(self) -> bool:
        """Whether a cohort goes on where it could meet others: not for ever, since it may wait for them."""
        return self.scatters and self.rng.random() < 0.98

    def _is_executed(self, i: Instruction) -> bool:
        """Sets the mask; whether there are any lanes in it."""
        self.mask = None if i.uniform else self.cohort.mask
        if i.guard is not None:
            mask = self.truth(i.guard)
            mask = mask if self.mask is None else mask & self.mask
            self.mask = None if mask.all() else mask
            return bool(mask.any())
        return True

    def push(self, new: Cohort) -> None:
        """Ready to go on, together with others that are there."""
        for n, other in enumerate(self.ready):
            if (other.place, other.stack) == (new.place, new.stack) and not other.members & new.members:
                index = np.concatenate([other.index, new.index])
                order = np.argsort(index)
                is_whole = other.mask is None and new.mask is None
                mask = None if is_whole else np.concatenate([other.lanes(), new.lanes()])[order]
                self.ready[n] = Cohort(new.place, index[order], mask, new.stack)
                return
        self.ready.append(new)

    def send(self, cohort: Cohort, place: int, lanes: Array, stack: Stack | None = None) -> None:
        """These lanes of a cohort go on at a place."""
        for part in part_of(cohort, place, lanes, cohort.stack if stack is None else stack):
            self.push(part)

    def jump(self, targets: Array | int) -> Cohort | None:
        """The active lanes go on at targets, the others at the next instruction."""
        cohort, lanes = self.cohort, self.cohort.lanes()
        places = np.where(self.active(), targets, cohort.place + 1)
        several = np.unique(places[lanes])
        if len(several) == 1:
            cohort.place = int(several[0])
            return cohort
        for place in several:
            self.send(cohort, int(place), lanes & (places == place))
        return None

    def take_part(self, slot: int, target: int) -> None:
        """The active lanes will wait for one another at a slot."""
        lanes = self.active()
        for register, value in ((self.partners, bits_of(lanes)[:, None]), (self.target, I32(target))):
            register[slot][self.rows] = np.where(lanes, value, register[slot][self.rows])

    def arrive(self, slot: int, stack: Stack) -> Cohort | None:
        """The active lanes wait for all that take part; where they are, they go on together at the target."""
        cohort, lanes = self.cohort, self.active()
        rest = cohort.lanes() & ~lanes
        members = self.partners[slot][self.rows] & self.live[self.rows][:, None]
        targets = self.target[slot][self.rows]
        several = np.unique(targets[lanes])
        are_all = ((members == bits_of(lanes)[:, None]) | ~lanes).all()
        if are_all and len(several) == 1 and not rest.any():
            cohort.place, cohort.stack = int(several[0]), stack
            return cohort
        if stack not in self.stacks:
            self.stacks.append(stack)
        self.waits[self.rows] = np.where(lanes, slot, self.waits[self.rows])
        self.goes_on[self.rows] = np.where(lanes, targets, self.goes_on[self.rows])
        self.stack_of[self.rows] = np.where(lanes, self.stacks.index(stack), self.stack_of[self.rows])
        self.send(cohort, cohort.place + 1, rest)
        self.release(cohort.index)
        return None

    def release(self, index: Array) -> None:
        """Let lanes of these warps go on that no longer wait for others."""
        waits = self.waits[index]
        for slot in np.unique(waits[waits >= 0]):
            here = waits == slot
            members = self.partners[slot][index]
            missing = members & (self.live[index] & ~bits_of(here))[:, None]
            free = here & (missing == 0)
            self.waits[index] = np.where(free, -1, self.waits[index])
            where = np.stack([self.goes_on[index], self.stack_of[index], members.view(I32)], -1)
            for group in np.unique(where[free], axis=0):
                some = free & (where == group).all(-1)
                self.send(Cohort(0, index), int(group[0]), some, self.stacks[group[1]])

    def leave(self, slots: Iterable[int]) -> None:
        """The active lanes no longer take part at these slots."""
        left = bits_of(self.active())[:, None]
        for slot in slots:
            self.partners[slot][self.rows] &= ~left

    def start(self, cohort: Cohort, lanes: Array) -> None:
        """These lanes go on where they are, at once or some warps before the others."""
        if not self.scatters:
            self.send(cohort, cohort.place, lanes)
            return
        first = np.array([self.rng.random() < 0.5 for _ in cohort.index])[:, None]
        for some in (first, ~first):  # not joined with any others
            self.ready += part_of(cohort, cohort.place, lanes & some, cohort.stack)

    def meet(self) -> None:
        """The active lanes wait at the block's barrier."""
        cohort, lanes = self.cohort, self.active()
        self.send(cohort, cohort.place + 1, cohort.lanes() & ~lanes)
        self.parked += part_of(cohort, cohort.place + 1, lanes, cohort.stack)
        self.at_barrier[self.rows] |= bits_of(lanes)
        self.open_barriers()

    def open_barriers(self) -> None:
        per_block = self.at_barrier.reshape(-1, self.per_block)
        is_open = (per_block == self.live.reshape(-1, self.per_block)).all(1) & per_block.any(1)
        if not is_open.any():
            return
        self.answer[is_open], self.voted[is_open] = self.voted[is_open], False
        per_block[is_open] = 0
        parked, self.parked = self.parked, []
        for cohort in parked:
            free = is_open[self.block_of[cohort.index]][:, None] & cohort.lanes()
            self.parked += part_of(cohort, cohort.place, cohort.lanes() & ~free, cohort.stack)
            self.start(cohort, free)

    def end(self) -> Cohort | None:
        cohort, lanes = self.cohort, self.active()
        self.live[self.rows] &= ~bits_of(lanes)
        self.send(cohort, cohort.place + 1, cohort.lanes() & ~lanes)
        self.release(cohort.index)
        self.open_barriers()
        return None


def part_of(cohort: Cohort, place: int, lanes: Array, stack: Stack) -> list[Cohort]:
    """These lanes of a cohort at a place, if there are any."""
    has_any = lanes.any(1)
    if not has_any.any():
        return []
    lanes = lanes[has_any]
    return [Cohort(place, cohort.index[has_any], None if lanes.all() else lanes, stack)]


@operation("NOP", "DEPBAR", "ERRBAR", "CCTL", "YIELD", options="LE SC CTA GPU SYS ALL IVALL E D1 D0")
@operation("MEMBAR", options="SC CTA GL GPU SYS ALL IVALL IVALLD")
def _nothing(m: Flow, i: Instruction) -> None:
    pass


@operation("BMOV", options="32 CLEAR")
def _bmov(m: Flow, i: Instruction) -> None:
    assert i.operands[0].is_zero, "a barrier register is read"


def _target(m: Flow, i: Instruction) -> int:
    return m.kernel.labels[next(o.name for o in i.operands if o.kind == "l")]


@operation("BRA", options="U", steers=True)
def _bra(m: Flow, i: Instruction) -> Cohort | None:
    lanes = m.active()
    for o in i.operands:
        if o.kind in ("P", "UP"):
            lanes = lanes & m.truth(o)
        elif o.name.startswith("CC."):
            lanes = lanes & {"CC.EQ": m.is_zero[m.rows], "CC.NEU": ~m.is_zero[m.rows]}[o.name]
    m.mask = lanes
    return m.jump(_target(m, i))


@operation("BRA.DIV", "BRA.CONV", steers=True)
def _bra_if_apart(m: Flow, i: Instruction) -> Cohort | None:
    """Where not all lanes of a warp are here, or where all are."""
    is_whole = bits_of(m.cohort.lanes()) == m.live[m.rows]
    m.mask = m.active() & (is_whole == (i.options[0] == "CONV"))[:, None]
    return m.jump(_target(m, i))


@operation("BRX", steers=True)
def _brx(m: Flow, i: Instruction) -> Cohort | None:
    a, offset = i.operands
    following = i.address + (8 if m.kernel.arch < 70 else 16)
    return _jump_to(m, np.asarray(m.signed(a)).astype(I64) + int(U32(offset.number).view(I32)) + following)


def _jump_to(m: Flow, addresses: Array) -> Cohort | None:
    lanes, addresses = m.active(), np.broadcast_to(addresses, m.shape)
    targets = np.zeros(m.shape, I64)
    for each in np.unique(addresses[lanes]):
        targets[addresses == each] = m.kernel.place(int(each))
    return m.jump(targets)


@operation("CALL.REL.NOINC", steers=True)
def _call(m: Flow, i: Instruction) -> Cohort | None:
    return m.jump(_target(m, i))


@operation("RET", steers=True)
def _ret(m: Flow, i: Instruction) -> Cohort | None:
    """Up to sm_61: back to where CAL was, together."""
    assert m.cohort.stack[-1][0] == "CAL", m.cohort.stack
    return m.arrive(len(m.cohort.stack) - 1, m.cohort.stack[:-1])


@operation("RET.REL.NODEC", steers=True)
def _ret_to(m: Flow, i: Instruction) -> Cohort | None:
    at, function = i.operands
    first = m.kernel.instructions[m.kernel.labels[function.name]].address
    return _jump_to(m, np.asarray(m.raw(at)).astype(I64) + first)


@operation("SSY", "PBK", "CAL", steers=True)
def _enter(m: Flow, i: Instruction) -> Cohort | None:
    cohort, target = m.cohort, _target(m, i)
    assert i.guard is None or m.mask is None, "a guard"
    is_call = i.name == "CAL"
    m.take_part(len(cohort.stack), cohort.place + 1 if is_call else target)
    cohort.stack = (*cohort.stack, (i.name, target))
    cohort.place = target if is_call else cohort.place + 1
    return cohort


@operation("SYNC", steers=True)
def _sync(m: Flow, i: Instruction) -> Cohort | None:
    stack = m.cohort.stack
    assert stack[-1][0] == "SSY", stack
    return m.arrive(len(stack) - 1, stack[:-1])


@operation("BRK", steers=True)
def _brk(m: Flow, i: Instruction) -> Cohort | None:
    stack = m.cohort.stack
    slot = max(n for n, (kind, _) in enumerate(stack) if kind == "PBK")
    m.leave(range(slot + 1, len(stack)))
    return m.arrive(slot, stack[:slot])


@operation("BSSY")
def _bssy(m: Flow, i: Instruction) -> None:
    m.take_part(i.operands[0].number, _target(m, i))


@operation("BSYNC", steers=True)
def _bsync(m: Flow, i: Instruction) -> Cohort | None:
    return m.arrive(i.operands[0].number, ())


@operation("BREAK")
def _break(m: Flow, i: Instruction) -> None:
    m.leave([i.operands[0].number])
    m.release(m.cohort.index)


@operation("WARPSYNC", steers=True)
def _warpsync(m: Flow, i: Instruction) -> Cohort | None:
    lanes, members = m.active(), np.broadcast_to(m.unsigned(i.operands[0]), m.shape)
    for register, value in ((m.partners, members), (m.target, I32(m.cohort.place + 1))):
        register[_WARPSYNC][m.rows] = np.where(lanes, value, register[_WARPSYNC][m.rows])
    return m.arrive(_WARPSYNC, ())


@operation("BAR.SYNC", "BAR.RED.OR", steers=True)
def _bar(m: Flow, i: Instruction) -> Any:
    assert i.operands[0].number == 0
    if i.options[0] == "RED":
        given = (m.active() & m.truth(i.operands[1])).any(1)
        np.logical_or.at(m.voted, m.block_of[m.rows], given)
    m.meet()


@operation("EXIT", steers=True)
def _exit(m: Flow, i: Instruction) -> Cohort | None:
    return m.end()
