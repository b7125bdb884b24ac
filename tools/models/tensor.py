"""A model of one multiprocessor: the share of its tensor cores that a kernel can keep busy, by its machine code.

    python -m tools.models.tensor FILE.cubin --warps 8 --blocks 1 --machine V100 --function pa_volta
    python -m tools.models.tensor_table            of ours: the table of docs/fused-kernel.md
    python -m tools.models.calls                   time of whole calls

Four schedulers issue one instruction a cycle each, in order for each warp, as the stall counts and scoreboards say that
the compiler wrote beside the instructions. They issue the real loop over tiles, round after round, until its speed is
steady. What an instruction occupies:

- a product the tensor cores of its scheduler. On a T4 8 cycles for HMMA.1688 with float32 sums: 65 TFLOP/s at 40
  multiprocessors and 1.59 GHz are 128 multiplications a cycle and scheduler, and the compiler leaves 8 cycles between
  two of a warp. On GeForce cards, whose float32 sums have half the rate, 16. On a V100 (125 TFLOP/s, 80
  multiprocessors, 1.53 GHz) 2 for each of the four steps of HMMA.884. On an H200 8, fitted (``.calls``);
- shared memory, global loads and shuffles one pipe of the multiprocessor: 64 bytes a cycle on Turing, 128 on Volta
  (NVIDIA, "GA102 GPU Architecture": "128 bytes/clock per SM in GA102 versus 64 bytes/clock in Turing"). Without bank
  conflicts: the emulation counts those;
- exp2 and conversions a unit of 16 lanes for each multiprocessor, other arithmetic half a scheduler's cycles (CUDA C++
  programming guide, throughput of native arithmetic instructions);
- a barrier, or a counter in shared memory, the warps that wait there.

How much work waits before shared memory is documented nowhere. It is fitted to what flash-attention-turing's README
measures on a T4 for its own kernels of head_dim 128, compiled by CUDA 13.0. With 192 cycles (six LDSM.x4 of each
scheduler) forward has 62 % (measured 63 %), dK and dV 47 %, dQ 44 % (measured together 45 to 49 %). With
``--queue 48`` these come to 57, 43 and 42 %. ``tools.models.tensor_table`` has ours both ways.

Not modelled: bandwidth of L2 and DRAM (a global load takes 400 cycles, on an H200 600), instruction caches, clocks. On
Volta a load of 16 bytes a lane is taken to move all of its 512 bytes, also where lanes read the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .sass import Instruction, arch, product_loops, sections, usual_path, volta

SCHEDULERS = 4
_LANES = 32
_CONVERSIONS = ("MUFU", "RCP", "F2F", "F2I", "I2F", "FRND", "POPC")
_SHARED = ("LDSM", "LDS", "STS", "LDG", "STG", "LDL", "STL", "LD", "ST", "SHFL", "RED")
_FLOAT = ("FFMA", "FMUL", "FADD", "IMAD")
_HALF = ("HADD2", "HFMA2", "HMUL2")
_CONTROL = ("BAR", "BRA", "BSYNC", "BSSY", "BREAK", "NOP", "EXIT", "WARPSYNC", "DEPBAR", "BMOV", "YIELD", "ULDC",
            "MEMBAR", "CALL", "RET")  # fmt: skip
_BARRIER_LATENCY = 15


@dataclass(frozen=True, eq=False)
class Machine:
    """A multiprocessor.

    Attributes:
        product: cycles of its scheduler's tensor cores for an instruction, by kind.
        shared_bytes: a cycle; conversion: cycles of a scheduler's share of the unit for exp2 and conversions.
        num_sms: of the card; arch: 75 is sm_75.
        queue: cycles of work that the pipe of shared memory accepts beyond what it is doing, see above.
        plain: cycles of a scheduler for float32; load: until a global load is there. clock: cycles a second.
        memory: bytes a second.
    """

    name: str
    product: dict[str, int]
    shared_bytes: int
    num_sms: int
    arch: int
    conversion: int = 8
    queue: int = 192
    plain: int = 2
    load: int = 400
    clock: float = 1.59e9
    memory: float = 320e9

    @property
    def peak(self) -> float:
        """Operations a second of the tensor cores, a multiply-add counted as two."""
        kind, cycles = next(iter(self.product.items()))
        return 2 * (1024 if kind == "HMMA.1688" else 256) / cycles * SCHEDULERS * self.num_sms * self.clock


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("T4", {"HMMA.1688": 8}, 64, 40, 75),
        Machine("RTX 2080 Ti", {"HMMA.1688": 16}, 64, 68, 75),
        Machine("V100", {"HMMA.884": 2}, 128, 80, 70, clock=1.53e9, memory=900e9),
        Machine("H200", {"HMMA.1688": 8}, 128, 132, 90, plain=1, load=600, clock=1.98e9, memory=4.8e12),
    )
}


def tensor_cycles(path: Sequence[Instruction], machine: Machine) -> int:
    """Cycles that a warp's round takes of the tensor cores of its scheduler."""
    return sum(machine.product.get(x.kind, 0) for x in path)


def _pipe(x: Instruction) -> str:
    if x.is_product:
        return "tensor"
    if x.kind in _CONVERSIONS:
        return "conversion"
    if x.kind in _SHARED:
        return "shared"
    if x.kind in _FLOAT:
        return "float"
    if x.kind in _HALF:
        return "half"
    return "control" if x.kind in _CONTROL else "integer"


def _memory_latency(x: Instruction, machine: Machine) -> int:
    if x.kind in ("LDG", "LD"):
        return machine.load
    return 24 if x.kind == "LDSM" else 22


@dataclass
class _Warp:
    block: int
    scheduler: int
    number: int
    ready: int = 0
    at: int = 0
    rounds: int = 0
    waits: bool = False
    boards: list[int] = field(default_factory=lambda: [0] * 6)


class _Counters:
    """Counters in shared memory, which a warp raises once a round and others wait for.

    A wait reads them in a loop of its own until all are high enough; a raise is a store of four bytes under a condition
    (one lane writes). The n-th wait of a round is for the n-th raise of the round before.
    """

    def __init__(self, path: Sequence[Instruction], warps: int):
        index = {x.address: i for i, x in enumerate(path)}
        polls = [(index[x.target], i) for i, x in enumerate(path) if x.target in index and index[x.target] < i]
        polls = [(a, b) for a, b in polls if not any(x.is_product for x in path[a:b])]
        reads = (next((j for j in range(a, b) if path[j].kind == "LDS"), None) for a, b in polls)
        self.waits = [i for i in reads if i is not None]
        raises = [i for i, x in enumerate(path) if x.kind == "STS" and x.lane_bytes == 4 and x.guarded]
        self.raises = raises if len(raises) == len(self.waits) else []
        if not self.raises:
            self.waits = []
        self.raised = [[0] * warps for _ in self.raises]

    def hold(self, warp: _Warp, group: range) -> bool:
        """Whether a warp has to go on waiting."""
        if warp.at not in self.waits:
            return False
        of = self.raised[self.waits.index(warp.at)]
        return min(of[group.start : group.stop]) < warp.rounds

    def issue(self, warp: _Warp) -> None:
        if warp.at in self.raises:
            self.raised[self.raises.index(warp.at)][warp.number] += 1


def simulate(path: Sequence[Instruction], machine: Machine, warps: int, blocks: int, rounds: int = 12) -> float:
    """The share of the tensor cores' cycles in which they multiply.

    Args:
        path: one round of the loop.
        warps: of a block; blocks: on a multiprocessor at once.
        rounds: of each warp, of which the first three do not count.
    """
    return _Simulation(path, machine, warps, blocks).run(rounds)


class _Simulation:
    def __init__(self, path: Sequence[Instruction], machine: Machine, warps: int, blocks: int):
        self.machine = machine
        self.body = [(_pipe(x), x) for x in path]
        self.per_block = warps
        self.warps = [
            _Warp(b, w % SCHEDULERS, b * warps + w, ready=b * 977) for b in range(blocks) for w in range(warps)
        ]
        self.counters = _Counters(path, len(self.warps))
        self.of_scheduler = [[w for w in self.warps if w.scheduler == i] for i in range(SCHEDULERS)]
        pipes = ("tensor", "conversion", "float", "half", "integer", "control")
        self.free = [dict.fromkeys(pipes, 0) for _ in range(SCHEDULERS)]
        self.shared_free = 0.0
        self.last: list[_Warp | None] = [None] * SCHEDULERS
        self.arrived: dict[int, list[_Warp]] = {b: [] for b in range(blocks)}
        self.now = 0
        self.rounds = 0

    def run(self, rounds: int) -> float:
        first, goal = 3 * len(self.warps), rounds * len(self.warps)
        begin = end = 0
        while self.rounds < goal:
            issued, nearest = False, None
            for n in range(SCHEDULERS):  # the shared pipe serves them in turn
                at = self._step((self.now + n) % SCHEDULERS)
                if at is None:
                    issued = True
                elif at and (nearest is None or at < nearest):
                    nearest = at
                begin = begin or (self.now if self.rounds >= first else 0)
            if not issued and nearest is None:
                raise ValueError("the warps of this loop wait for each other for ever")
            end, self.now = self.now, self.now + 1 if issued or nearest is None else max(self.now + 1, nearest)
        return tensor_cycles([x for _, x in self.body], self.machine) * (goal - first) / SCHEDULERS / (end - begin)

    def _step(self, scheduler: int) -> int | None:
        """Issues one instruction: None. Or says when one may be issued at the earliest, 0 if that is not known."""
        nearest = 0
        last = self.last[scheduler]
        for warp in sorted(self.of_scheduler[scheduler], key=lambda w: (w is not last, -w.number)):
            first = warp.block * self.per_block
            if warp.waits or self.counters.hold(warp, range(first, first + self.per_block)):
                continue
            when = self._earliest(warp)
            if when <= self.now:
                self._issue(warp)
                self.last[scheduler] = warp
                return None
            nearest = min(nearest, when) if nearest else when
        return nearest

    def _earliest(self, warp: _Warp) -> int:
        pipe, x = self.body[warp.at]
        when = warp.ready
        if x.waits:
            when = max(when, *(clear for i, clear in enumerate(warp.boards) if x.waits >> i & 1))
        if pipe == "shared":
            return max(when, int(self.shared_free) - self.machine.queue)
        return max(when, self.free[warp.scheduler][pipe])

    def _issue(self, warp: _Warp) -> None:
        pipe, x = self.body[warp.at]
        latency = self._occupy(warp, pipe, x)
        if x.writes < 6:
            warp.boards[x.writes] = max(warp.boards[x.writes], self.now + latency)
        if x.reads < 6:
            read = max(6, latency // 3) if pipe == "shared" else 6
            warp.boards[x.reads] = max(warp.boards[x.reads], self.now + read)
        self.counters.issue(warp)
        warp.ready = self.now + max(1, x.stall)
        warp.at += 1
        if warp.at == len(self.body):
            warp.at = 0
            warp.rounds += 1
            self.rounds += 1
        if x.kind == "BAR":
            self._arrive(warp)

    def _occupy(self, warp: _Warp, pipe: str, x: Instruction) -> int:
        """Takes the units that an instruction needs; returns the latency of its result."""
        if pipe == "shared":
            self.shared_free = max(self.shared_free, self.now) + x.lane_bytes * _LANES / self.machine.shared_bytes
            return int(self.shared_free - self.now) + _memory_latency(x, self.machine)
        cycles = {
            "tensor": self.machine.product.get(x.kind, 0),
            "conversion": self.machine.conversion,
            "control": 1,
            "float": self.machine.plain,
        }.get(pipe, 2)
        self.free[warp.scheduler][pipe] = self.now + cycles
        return {"tensor": 20, "conversion": 20 + cycles, "control": 0}.get(pipe, 12)

    def _arrive(self, warp: _Warp) -> None:
        group = self.arrived[warp.block]
        group.append(warp)
        warp.waits = True
        if len(group) == self.per_block:
            for other in group:
                other.waits = False
                other.ready = max(other.ready, self.now + _BARRIER_LATENCY)
            group.clear()


def paths(cubin: bytes, **rare: bool) -> Iterable[tuple[str, list[Instruction]]]:
    """(function, one round) of each loop with products in a cubin; ``rare``: of :func:`.sass.usual_path`.

    Raises:
        ValueError: the cubin is for a card whose instructions are others.
    """
    if not 70 <= arch(cubin) <= 90:
        raise ValueError(f"a cubin must be for sm_70 to sm_90, got sm_{arch(cubin)}")
    for function, code in sections(cubin).items():
        for loop in product_loops(volta(code, arch(cubin))):
            yield function, usual_path(loop, **rare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", type=Path)
    parser.add_argument("--function", default="", help="part of the names of those to look at")
    parser.add_argument("--warps", type=int, default=8, help="of a block")
    parser.add_argument("--blocks", type=int, default=1, help="on a multiprocessor at once")
    parser.add_argument("--machine", choices=MACHINES, default="T4")
    parser.add_argument("--queue", type=int, default=192, help="cycles of work that wait before shared memory")
    arguments = parser.parse_args()
    machine = replace(MACHINES[arguments.machine], queue=arguments.queue)
    for function, path in paths(arguments.cubin.read_bytes()):
        if arguments.function in function:
            share = simulate(path, machine, arguments.warps, arguments.blocks)
            products = sum(x.is_product for x in path)
            print(f"{function}: {len(path)} instructions, {products} products, {share:.0%} of the tensor cores' peak")


if __name__ == "__main__":
    main()
