"""What share of its time a compute unit of gfx9 multiplies, and how long a call takes: a model on machine code.

    python tools/amd_model.py                                 the calls that noflash-attention publishes times of
    python tools/amd_model.py --head-dim 128 --dtype float32

The shipped gfx906 code is executed for a block (``tests/support/amd``, which needs llvm-objdump 16), and what each of
its waves issues is played back for as many blocks as a compute unit holds ("Vega" Instruction Set Architecture; AMD,
"GCN Architecture" whitepaper):

- each of four SIMDs issues every fourth cycle: at most one instruction of each kind, one of each wave, in order;
- vector arithmetic takes 4 cycles, exp, log, reciprocals and 32-bit integer products 16, 64-bit shifts 8;
- shared memory gives 32 banks of 4 bytes a cycle, with the conflicts that the addresses have; its answer comes 64
  cycles later, that of global memory 450, of scalar loads 120: chosen, not measured;
- waits and barriers stand where the code has them; a branch takes 16 cycles.

Blocks run in rounds, as many at a time as the card holds; those of the last one are spread over the compute units.
Not modelled: bandwidth of L2 and DRAM, the instruction cache, clocks below the boost clock. No card has confirmed it:
take its times for lower bounds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import amd  # noqa: E402
from support.amd import machine  # noqa: E402
from support.amd.code import Instruction, kernels  # noqa: E402
from support.amd.wave import LANES, Wave  # noqa: E402

from pascal_attn_core.call import check_call, empty_output  # noqa: E402
from pascal_attn_core.fused import prebuilt  # noqa: E402
from pascal_attn_core.fused.launches import forward_launches  # noqa: E402
from pascal_attn_core.fused.plan import Plan, variants_of  # noqa: E402

ARCH = "gfx906"
COMPUTE_UNITS, HERTZ = 60, 1.725e9  # of an MI50
# noflash-attention 1.0.1, README: milliseconds on an MI50, B1 H16 D64 float16.
PUBLISHED = {4096: 17.93, 8192: 72.75, 16384: 1325.69}
_SLOW = re.compile(r"v_(exp|log|rcp|mul_lo_u32|mul_hi|mad_u64)")
_HALF_RATE = re.compile(r"v_lshlrev_b64")
_PRODUCT = re.compile(r"v_(fma|fmac|mac|dot2|fma_mix)_")
_LDS_LATENCY, _MEMORY_LATENCY, _SCALAR_LATENCY, _BRANCH, _BARRIER = 64, 450, 120, 16, 8
_QUEUE = 64  # cycles of work that the pipes of shared and of global memory accept beyond what they are doing
_AT_MOST = {"lgkmcnt": 15, "vmcnt": 63}  # transfers that a wave counts


class Event(NamedTuple):
    """One instruction of a wave.

    Attributes:
        kind: "vector", "lds", "memory", "scalar load", "scalar", "branch", "wait" or "barrier".
        cycles: that it occupies its unit; waits: of a wait, how many transfers may stay under way.
        is_product: multiplies and adds floats.
    """

    kind: str
    cycles: int = 4
    waits: tuple[tuple[str, int], ...] = ()
    is_product: bool = False


# ---- from machine code to events -------------------------------------------------------------------------------------


def event(wave: Wave, i: Instruction) -> Event:
    """Of the instruction that a wave is about to execute."""
    if i.name.startswith("v_"):
        cycles = 16 if _SLOW.match(i.name) else 8 if _HALF_RATE.match(i.name) else 4
        return Event("vector", cycles, is_product=bool(_PRODUCT.match(i.name)))
    if i.name.startswith("ds_"):
        return Event("lds", lds_cycles(wave, i))
    if i.name.startswith(("global_", "flat_")):
        return Event("memory", 16 if "x4" in i.name else 8 if "x2" in i.name else 4)
    if i.name == "s_waitcnt":
        return Event("wait", waits=tuple((counter, int(most)) for counter, most in i.options.items()))
    if i.name == "s_barrier":
        return Event("barrier")
    return Event("scalar load" if i.name.startswith("s_load") else "branch" if "branch" in i.name else "scalar")


def lds_cycles(wave: Wave, i: Instruction) -> int:
    """Of shared memory: 32 words in a cycle, lanes in their order, the same word once."""
    if not i.name.startswith(("ds_read", "ds_write")):
        return 2  # between lanes
    vector = i.operands[0 if "write" in i.name else 1]
    words = int(i.name.rpartition("_b")[2]) // 32
    unit = 4 * words * (64 if "st64" in i.name else 1)
    offsets = [unit * int(i.options.get(n, "0")) for n in ("offset0", "offset1")] if "2" in i.name[:9] else [i.offset]
    together, cycles = 32 // words, 0
    for offset in offsets:
        first = (wave.unsigned(vector).astype(np.int64) + offset) // 4
        for lane in range(0, 64, together):
            lanes = LANES[lane : lane + together]
            lanes = lanes[wave.lanes[lanes]]
            if len(lanes):
                some = np.unique(first[lanes, None] + np.arange(words))
                cycles += int(np.bincount(some % 32).max())
    return cycles


class Block(NamedTuple):
    """What the waves of one block issue, and how many of it a compute unit holds. rows: queries of a block."""

    waves: list[list[Event]]
    resident: int
    rows: int
    cols: int


def block(head_dim: int, dtype: torch.dtype, tiles: int) -> Block:
    """Of the shipped kernel without a mask, with so many tiles of keys."""
    probe = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    variant = variants_of(check_call(probe, probe, probe), ARCH).forward
    geometry = variant.geometry
    code = prebuilt.find(variant, ARCH)
    if code is None:
        raise SystemExit(f"{variant.name} does not ship")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, 1, n, head_dim), generator=generator).to(dtype)
        for n in (geometry.rows, tiles * geometry.cols, tiles * geometry.cols)
    )
    call = check_call(query, key, value)
    (launch,) = forward_launches(call, Plan(variant), empty_output(call))
    waves: list[list[Event]] = [[] for _ in range(launch.threads // 64)]
    machine.run(launch, kernels(code)[launch.function], lambda wave, i: waves[wave.index].append(event(wave, i)))
    (facts,) = amd.facts(code)
    resident = amd.waves(ARCH, facts.vector, facts.shared, launch.threads) * 4 // len(waves)
    return Block(waves, resident, geometry.rows, geometry.cols)


# ---- a compute unit --------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """The waves of a block, for their barriers."""

    waves: list[_Wave] = field(default_factory=list)


@dataclass(eq=False)
class _Wave:
    events: Sequence[Event]
    group: _Group
    at: int = 0
    ready: int = 0
    is_blocked: bool = False
    counters: dict[str, deque[int]] = field(default_factory=lambda: {"lgkmcnt": deque(), "vmcnt": deque()})

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.events)


class ComputeUnit:
    """Four SIMDs, and what they share.

    Attributes:
        vector_cycles: that SIMDs computed, all together; lds_cycles: that shared memory worked.
    """

    def __init__(self, blocks: Sequence[Sequence[Sequence[Event]]], apart: int = 700):
        """``blocks``: the events of each one's waves; they begin ``apart`` cycles after one another."""
        self.simds: list[list[_Wave]] = [[], [], [], []]
        for number, waves in enumerate(blocks):
            group = _Group()
            for events in waves:
                wave = _Wave(events, group, ready=number * apart)
                group.waves.append(wave)
                min(self.simds, key=len).append(wave)
        self.vector_cycles = self.lds_cycles = 0
        self._free = {"lds": 0, "memory": 0}
        self._vector_free = [0, 0, 0, 0]

    def run(self) -> int:
        """Cycles until all waves are done."""
        cycle = 0
        while any(not wave.is_done for waves in self.simds for wave in waves):
            simd = cycle & 3
            taken: set[str] = set()
            for wave in self.simds[simd]:
                if not wave.is_done and not wave.is_blocked and wave.ready <= cycle:
                    self._issue(wave, wave.events[wave.at], simd, cycle, taken)
            cycle += 1
        return cycle

    def _issue(self, wave: _Wave, e: Event, simd: int, cycle: int, taken: set[str]) -> None:
        for queue in wave.counters.values():
            while queue and queue[0] <= cycle:
                queue.popleft()
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
            self._vector_free[simd] = cycle + e.cycles
            self.vector_cycles += e.cycles
        elif e.kind in self._free:
            counter, latency = ("lgkmcnt", _LDS_LATENCY) if e.kind == "lds" else ("vmcnt", _MEMORY_LATENCY)
            queue = wave.counters[counter]
            if len(queue) >= _AT_MOST[counter] or self._free[e.kind] > cycle + _QUEUE:
                return
            self._free[e.kind] = max(cycle, self._free[e.kind]) + e.cycles
            self.lds_cycles += e.cycles if e.kind == "lds" else 0
            queue.append(max(self._free[e.kind] + latency, queue[-1] if queue else 0))
        elif e.kind == "scalar load":
            queue = wave.counters["lgkmcnt"]
            queue.append(max(cycle + _SCALAR_LATENCY, queue[-1] if queue else 0))
        taken.add(e.kind)
        wave.at += 1
        wave.ready = cycle + (_BRANCH if e.kind == "branch" else 4)
        if e.kind == "barrier":
            self._meet(wave, cycle)

    def _meet(self, wave: _Wave, cycle: int) -> None:
        wave.is_blocked = True
        members = wave.group.waves
        if all(other.is_blocked or other.is_done for other in members):
            for other in members:
                other.is_blocked = False
                other.ready = max(other.ready, cycle + _BARRIER)


# ---- what is printed -------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """Of the blocks that a compute unit holds: cycles that all of them take for a tile of keys each, and beside their
    tiles; the share of that time in which its SIMDs compute, and in which its shared memory works."""

    tile: float
    start: float
    computing: float
    lds: float


class Speed(NamedTuple):
    """Of a kernel on a compute unit.

    Attributes:
        paces: with one block, two, ... as many as it holds; products: share of the instructions that multiply.
        rows, cols: queries and keys of a tile.
    """

    paces: list[Pace]
    products: float
    rows: int
    cols: int

    def cycles(self, blocks: int, tokens: int) -> float:
        """Of an MI50, for so many blocks."""
        rounds, rest = divmod(blocks, COMPUTE_UNITS * len(self.paces))
        tiles = -(-tokens // self.cols)
        counts = [len(self.paces)] * rounds + [-(-rest // COMPUTE_UNITS)] * (rest > 0)
        return sum(self.paces[count - 1].start + tiles * self.paces[count - 1].tile for count in counts)


def speed(head_dim: int, dtype: torch.dtype, tiles: tuple[int, int] = (8, 16)) -> Speed:
    """From the difference of two numbers of tiles of keys."""
    few, many = (block(head_dim, dtype, n) for n in tiles)
    counts = [Counter(e.is_product for e in b.waves[0]) for b in (few, many)]
    issued = counts[1] - counts[0]
    paces = [pace(few.waves, many.waves, count + 1, tiles) for count in range(few.resident)]
    return Speed(paces, issued[True] / sum(issued.values()), few.rows, few.cols)


def pace(few: list[list[Event]], many: list[list[Event]], blocks: int, tiles: tuple[int, int]) -> Pace:
    units = [ComputeUnit([waves] * blocks) for waves in (few, many)]
    cycles = [unit.run() for unit in units]
    more = cycles[1] - cycles[0]
    tile = more / (tiles[1] - tiles[0])
    computing = (units[1].vector_cycles - units[0].vector_cycles) / more / len(units[0].simds)
    lds = (units[1].lds_cycles - units[0].lds_cycles) / more
    return Pace(tile, cycles[0] - tiles[0] * tile, computing, lds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float16", choices=["float16", "float32"])
    parser.add_argument("--heads", type=int, default=16)
    arguments = parser.parse_args()
    found = speed(arguments.head_dim, getattr(torch, arguments.dtype))
    full = found.paces[-1]
    flops = 4 * found.rows * found.cols * arguments.head_dim * len(found.paces) / full.tile * COMPUTE_UNITS * HERTZ
    print(
        f"{len(found.paces)} blocks of {found.rows} queries: {full.tile:.0f} cycles for {found.cols} keys, "
        f"{flops / 1e12:.1f} TFLOP/s; {found.products:.0%} of the instructions multiply and add, "
        f"SIMDs compute {full.computing:.0%} of the time, shared memory works {full.lds:.0%}"
    )
    is_published = (arguments.head_dim, arguments.dtype, arguments.heads) == (64, "float16", 16)
    for tokens, published in PUBLISHED.items():
        own = 1e3 * found.cycles(arguments.heads * -(-tokens // found.rows), tokens) / HERTZ
        beside = f"; noflash-attention publishes {published} ms, {published / own:.1f} times as much"
        print(f"{tokens:6d} tokens: {own:.1f} ms{beside if is_published else ''}")


if __name__ == "__main__":
    main()
