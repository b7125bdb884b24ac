"""A compute unit of gfx9, or a workgroup processor of gfx10, that plays back what the waves of its blocks issue.

- GCN ("Vega" Instruction Set Architecture; AMD, "GCN Architecture" whitepaper): four SIMDs, each issues every fourth
  cycle: at most one instruction of each kind, one of each wave, in order. Vector arithmetic takes 4 cycles, exp, log,
  reciprocals and 32-bit integer products 16, 64-bit shifts 8.
- RDNA 2 and 3 ("RDNA 2" and "RDNA3" Instruction Set Architecture, chapters 2 and 10; AMD, "RDNA Architecture"
  whitepaper): a workgroup processor has four SIMDs of 32 lanes, each issues every cycle, likewise. Vector arithmetic
  takes a cycle, 64-bit shifts 2, exp, log, reciprocals and 32-bit integer products 4, as if no other wave could compute
  beside them. Another instruction of the wave can read a result after 5, 6, 8 or 10 cycles (LLVM 16,
  ``SISchedule.td``, GFX10SpeedModel). Shared memory is two halves of 32 banks, each block lies in one of them.
- On both, shared memory gives 32 words a cycle, with the conflicts that the addresses have. Its answer comes 64 cycles
  later, that of global memory 450, of scalar loads 120: chosen, not measured. A branch takes 16 cycles, on RDNA 32.

Vector registers of RDNA lie in four banks; operands that share one are read one after the other unless they could be
gathered before (LLVM 12, ``GCNRegBankReassign.cpp``). How often that fails is not published: ``banks`` is whether it
always does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple


class Timing(NamedTuple):
    """Cycles of an architecture.

    Attributes:
        turn: from one instruction of a SIMD, or of a wave, to the next; that vector arithmetic takes at its full rate.
        pipes: of shared memory, and of global memory.
        branch: until the next instruction.
        matrix: of a product of matrices, 16 x 16 x 16: AMD's operations of a compute unit in a cycle, 512 on RDNA 3 and
            1,024 on RDNA 4 ("RDNA3" and "RDNA4").
        most: transfers to and from shared memory that a wave counts.
    """

    turn: int
    pipes: int
    branch: int
    most: int
    matrix: int = 0


GCN = Timing(turn=4, pipes=1, branch=16, most=15)
RDNA2 = Timing(turn=1, pipes=2, branch=32, most=63)
RDNA3, RDNA4 = RDNA2._replace(matrix=32), RDNA2._replace(matrix=16)
SIMDS = 4
_APART = 700  # cycles
_LDS, _MEMORY, _SCALAR, _BARRIER = 64, 450, 120, 8  # cycles until the answer, until the next instruction
_MOST_OF_MEMORY = 63  # transfers to and from global memory that a wave counts
_QUEUE = 64  # cycles of work that the pipes of shared and of global memory accept beyond what they are doing
REACH = 10  # a result is there after so many cycles at most


class Event(NamedTuple):
    """One instruction of a wave.

    Attributes:
        kind: "vector", "lds", "memory", "scalar load", "scalar", "branch", "wait" or "barrier".
        cycles: that it occupies its unit; waits: of a wait, how many transfers may stay under way.
        products: how many times it multiplies and adds floats: 2 for two instructions that RDNA 3 issues at once.
        counter: that a transfer is counted in.
        after: (how many instructions before, cycles): of those whose results it reads, while they may be new.
        stall: cycles more, if operands of the same bank are not gathered before.
    """

    kind: str
    cycles: int = 4
    waits: tuple[tuple[str, int], ...] = ()
    products: int = 0
    counter: str = "vmcnt"
    after: tuple[tuple[int, int], ...] = ()
    stall: int = 0


@dataclass(eq=False)
class _Wave:
    events: Sequence[Event]
    block: int
    at: int = 0
    ready: int = 0
    is_blocked: bool = False
    counters: dict[str, deque[int]] = field(
        default_factory=lambda: {"lgkmcnt": deque(), "vmcnt": deque(), "vscnt": deque()}
    )
    issued: deque[int] = field(default_factory=lambda: deque(maxlen=REACH))

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.events)


class ComputeUnit:
    """Four SIMDs, and what they share.

    Attributes:
        vector_cycles: that SIMDs computed, all together; lds_cycles: that shared memory worked.
    """

    def __init__(self, blocks: Sequence[Sequence[Sequence[Event]]], timing: Timing, *, banks: bool):
        """``blocks``: the events of each one's waves; they begin _APART cycles after one another. banks: whether
        operands in the same bank of registers are never gathered before."""
        self._timing, self._banks = timing, banks
        self.simds: list[list[_Wave]] = [[] for _ in range(SIMDS)]
        self._blocks = [[_Wave(events, i, ready=i * _APART) for events in waves] for i, waves in enumerate(blocks)]
        for wave in chain.from_iterable(self._blocks):
            min(self.simds, key=len).append(wave)
        self.vector_cycles = self.lds_cycles = 0
        self._free = {kind: [0] * timing.pipes for kind in ("lds", "memory")}
        self._limits = {"lds": (timing.most, _LDS), "memory": (_MOST_OF_MEMORY, _MEMORY)}
        self._vector_free = [0] * SIMDS

    def run(self) -> int:
        """Cycles until all waves are done."""
        turn, cycle = self._timing.turn, 0
        left = [(simd, [wave for wave in waves if not wave.is_done]) for simd, waves in enumerate(self.simds)]
        while any(waves for _, waves in left):
            for simd, waves in left:
                if turn > 1 and cycle % turn != simd:
                    continue
                taken: set[str] = set()
                ended = False
                for wave in waves:
                    if wave.ready <= cycle and not wave.is_blocked:
                        self._issue(wave, wave.events[wave.at], simd, cycle, taken)
                        ended = ended or wave.is_done
                if ended:
                    waves[:] = [wave for wave in waves if not wave.is_done]
            cycle += 1
        return cycle

    def _issue(self, wave: _Wave, e: Event, simd: int, cycle: int, taken: set[str]) -> None:
        """Issue an instruction if what it needs is free; long because each kind of instruction needs something else."""
        for queue in wave.counters.values():
            while queue and queue[0] <= cycle:
                queue.popleft()
        for back, latency in e.after:
            if wave.issued[-back] + latency > cycle:
                wave.ready = wave.issued[-back] + latency
                return
        if e.kind == "wait":
            late = [wave.counters[c][-most - 1] for c, most in e.waits if len(wave.counters.get(c, ())) > most]
            if late:
                wave.ready = max(late)
                return
        elif e.kind in taken and e.kind != "barrier":
            return
        elif e.kind == "vector":
            if self._vector_free[simd] > cycle:
                return
            cycles = e.cycles + (e.stall if self._banks else 0)
            self._vector_free[simd] = cycle + cycles
            self.vector_cycles += cycles
        elif e.kind in self._free:
            pipe = (wave.block if e.kind == "lds" else simd // 2) % self._timing.pipes
            queue, free, (most, latency) = wave.counters[e.counter], self._free[e.kind], self._limits[e.kind]
            if len(queue) >= most or free[pipe] > cycle + _QUEUE:
                return
            free[pipe] = max(cycle, free[pipe]) + e.cycles
            self.lds_cycles += e.cycles if e.kind == "lds" else 0
            queue.append(max(free[pipe] + latency, queue[-1] if queue else 0))
        elif e.kind == "scalar load":
            queue = wave.counters["lgkmcnt"]
            queue.append(max(cycle + _SCALAR, queue[-1] if queue else 0))
        taken.add(e.kind)
        wave.at += 1
        wave.issued.append(cycle)
        wave.ready = cycle + (self._timing.branch if e.kind == "branch" else self._timing.turn)
        if e.kind == "barrier":
            self._meet(wave, cycle)

    def _meet(self, wave: _Wave, cycle: int) -> None:
        wave.is_blocked = True
        members = self._blocks[wave.block]
        if all(other.is_blocked or other.is_done for other in members):
            for other in members:
                other.is_blocked = False
                other.ready = max(other.ready, cycle + _BARRIER)
