"""A model, on machine code, of the share of its time in which a compute unit of AMD's multiplies, and of call times.

    python -m tools.models.amd                                 the calls that noflash-attention publishes times of
    python -m tools.models.amd --head-dim 128 --dtype float32
    python -m tools.models.amd --card "RX 6800"                instead of an MI50
    python -m tools.models.amd --card "RX 7900 XTX" --matrix   on its matrix units, beside torch's math attention

The shipped code is executed for a block (``tests/support/amd``, which needs llvm-objdump 16). What each of its waves
issues is played back for as many blocks as a compute unit holds, with waits and barriers where the code has them;
``compute_unit.py`` says what it knows of them, and from where.

A call's launches are those of its plan, as users get them (``plan_call`` with the card's units). Blocks run in rounds,
as many at a time as the card holds; those of the last one are spread over the compute units. A launch begins LAUNCH
after the one before has ended. Where the keys of some rows are computed in ranges, their parts are written to memory
and read from there once, at its published bandwidth. Not modelled: bandwidth of L2 and DRAM otherwise, the instruction
cache, clocks below the boost clock. No card has confirmed it: take its times for lower bounds. clang 16 makes no code
for RX 9000: that of gfx11, which exchanges probabilities between lanes as gfx12 need not, is played at its rates.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from attn_support.amd import machine
from attn_support.amd.code import Instruction, Operand, kernels
from attn_support.amd.wave import Wave

from pascal_attn_core.call import check_call, empty_output
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, plan_call, tensor_plan, variant_of
from tools.amd import facts, waves

from .compute_unit import GCN, RDNA2, RDNA3, RDNA4, REACH, SIMDS, ComputeUnit, Event, Timing


class Card(NamedTuple):
    """A card to model. arch: whose code is executed. units: its compute units, of RDNA its workgroup processors. flops:
    of a SIMD in a cycle, in float32. bandwidth: of its memory in bytes per second, as AMD publishes it."""

    arch: str
    units: int
    hertz: float
    timing: Timing
    flops: int
    bandwidth: float


CARDS = {
    "MI50": Card("gfx906", 60, 1.725e9, GCN, 32, 1024e9),
    "RX 6800": Card("gfx1030", 30, 2.105e9, RDNA2, 64, 512e9),
    "RX 7600": Card("gfx1102", 16, 2.655e9, RDNA3, 128, 288e9),
    "RX 7900 XTX": Card("gfx1100", 48, 2.499e9, RDNA3, 128, 960e9),
    "RX 9060 XT": Card("gfx1102", 16, 3.13e9, RDNA4, 128, 320e9),
}
LAUNCH = 10e-6  # seconds from the end of a launch to the first block of the next one: chosen, not measured
HEADS, TILES = 16, (8, 16)  # of the calls; of keys, for the pace of a block
# noflash-attention 1.0.1, README: milliseconds on an MI50, B1 H16 D64 float16.
PUBLISHED = {4096: 17.93, 8192: 72.75, 16384: 1325.69}
_SLOW = re.compile(r"v_(exp|log|rcp|mul_lo_u32|mul_hi|mad_u64)")
_HALF_RATE = re.compile(r"v_lshlrev_b64")
_PRODUCT = re.compile(r"v_(fma|fmac|mac|dot2|dot2c|fma_mix|wmma)_")
_IN_PLACE = re.compile(r"v_(fmac|mac|dot2c)_")
_TWO_RESULTS = re.compile(r"v_(add|sub|subrev)_co_|v_div_scale|v_mad_u64")
_NO_RESULT = re.compile(r"(global|flat)_store|ds_write|s_cmp|v_cmpx")
_MAIN = 64  # products that a stretch of the code has at least to be a part of the tiles' products


# ---- from machine code to events -------------------------------------------------------------------------------------


class Trace:
    """Events that a wave issues."""

    def __init__(self, timing: Timing) -> None:
        self.events: list[Event] = []
        self._timing = timing
        self._written: dict[tuple[str, int], tuple[int, int]] = {}  # register -> (place of the event, its latency)

    def add(self, wave: Wave, i: Instruction) -> None:
        """The instruction that it is about to execute."""
        e = event(wave, i, self._timing)
        if self._timing.turn == RDNA2.turn:
            e = e._replace(after=self._after(i), stall=_stall(i))
        self.events.append(e)

    def _after(self, i: Instruction) -> tuple[tuple[int, int], ...]:
        """The results that it reads and that may be new; its own is written down."""
        place, found = len(self.events), set()
        for source in (source for part in i.both or (i,) for source in sources(part)):
            for register in registers(source):
                at, latency = self._written.get(register, (-REACH, 0))
                if place - at < latency:
                    found.add((place - at, latency))
        for part in i.both or (i,):
            for destination in part.operands[: _results(part)]:
                for register in registers(destination):
                    self._written[register] = place, _latency(part.name)
        return tuple(found)


def registers(operand: Operand) -> list[tuple[str, int]]:
    """The registers of an operand, by kind and number."""
    return [(operand.kind, operand.number + i) for i in range(operand.count)]


def sources(i: Instruction) -> tuple[Operand, ...]:
    """The operands that it reads."""
    return i.operands if _IN_PLACE.match(i.name) else i.operands[_results(i) :]


def _results(i: Instruction) -> int:
    """How many of its operands it writes; they are the first ones."""
    return 0 if _NO_RESULT.match(i.name) else 2 if _TWO_RESULTS.match(i.name) else 1


def _latency(name: str) -> int:
    """Cycles until another instruction of a wave of RDNA 2 can read a result; 0: it waits for a counter."""
    if name.startswith("v_"):
        if re.match(r"v_(exp|log|rcp)", name):
            return 10
        return 8 if _SLOW.match(name) else 6 if _HALF_RATE.match(name) else 5
    return 2 if name.startswith("s_") and not name.startswith("s_load") else 0


def _stall(i: Instruction) -> int:
    """Cycles more for vector registers that share one of four banks, if none was read before. The compiler takes two
    instructions that are issued at once such that their factors share none ("RDNA3", 7.6)."""
    if not i.name.startswith("v_") or i.both:
        return 0
    banks = Counter(number % 4 for number in {o.number for o in sources(i) if o.kind == "v"})
    return max(banks.values(), default=1) - 1


def event(wave: Wave, i: Instruction, timing: Timing) -> Event:
    """Event of the instruction that a wave is about to execute."""
    if i.name.startswith("v_wmma"):
        return Event("vector", timing.matrix, products=timing.matrix)
    if i.name.startswith("v_"):
        cycles = timing.turn * (4 if _SLOW.match(i.name) else 2 if _HALF_RATE.match(i.name) else 1)
        return Event("vector", cycles, products=sum(bool(_PRODUCT.match(part.name)) for part in i.both or (i,)))
    if i.name.startswith("ds_"):
        return Event("lds", lds_cycles(wave, i), counter="lgkmcnt")
    if i.name.startswith(("global_", "flat_")):
        counter = wave.store_counter if "store" in i.name else "vmcnt"
        return Event("memory", 16 if "x4" in i.name else 8 if "x2" in i.name else 4, counter=counter)
    if i.name in ("s_waitcnt", "s_waitcnt_vscnt"):
        return Event("wait", waits=tuple((counter, int(most)) for counter, most in i.options.items()))
    if i.name == "s_barrier":
        return Event("barrier")
    return Event("scalar load" if i.name.startswith("s_load") else "branch" if "branch" in i.name else "scalar")


def lds_cycles(wave: Wave, i: Instruction) -> int:
    """Cycles of shared memory for an instruction: 32 words in a cycle, lanes in their order, the same word once."""
    if not i.name.startswith(("ds_read", "ds_write")):
        return wave.size // 32  # between lanes
    vector = i.operands[0 if "write" in i.name else 1]
    words = int(i.name.rpartition("_b")[2]) // 32
    unit = 4 * words * (64 if "st64" in i.name else 1)
    offsets = [unit * int(i.options.get(n, "0")) for n in ("offset0", "offset1")] if "2" in i.name[:9] else [i.offset]
    together, cycles = 32 // words, 0
    for offset in offsets:
        first = (wave.unsigned(vector).astype(np.int64) + offset) // 4
        for lane in range(0, wave.size, together):
            lanes = wave.numbers[lane : lane + together]
            lanes = lanes[wave.lanes[lanes]]
            if len(lanes):
                some = np.unique(first[lanes, None] + np.arange(words))
                cycles += int(np.bincount(some % 32).max())
    return cycles


Waves = list[list[Event]]


def forward_variant(head_dim: int, dtype: str, arch: str, *, matrix: bool) -> Variant:
    """Kernel of a call without a mask; ``matrix``: on matrix units."""
    if matrix:
        return Variant("wmma", head_dim, dtype, arch=arch)
    probe = torch.empty(1, 1, 1, head_dim, dtype=getattr(torch, dtype))
    return variant_of(check_call(probe, probe, probe), "forward", arch)


def block(variant: Variant, tiles: int, timing: Timing) -> tuple[Waves, int]:
    """Events of the waves of a block of a shipped kernel without a mask, with this many tiles of keys, and how many
    blocks a compute unit holds."""
    geometry, arch = variant.geometry, variant.arch
    code = prebuilt.find(variant)
    if code is None:
        raise SystemExit(f"{variant.name} does not ship")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, 1, n, variant.head_dim), generator=generator).to(getattr(torch, variant.dtype))
        for n in (geometry.rows, tiles * geometry.cols, tiles * geometry.cols)
    )
    call = check_call(query, key, value)
    launch = forward_launches(call, Plan(variant, int(variant.cuts_keys)), empty_output(call))[0]
    kernel = kernels(code)[launch.function]
    traces = [Trace(timing) for _ in range(launch.threads // kernel.lanes)]
    machine.run(launch, kernel, lambda wave, i: traces[wave.index].add(wave, i))
    found = next(found for found in facts(code) if found.name == launch.function)
    resident = waves(arch, found.vector, found.shared, launch.threads) * SIMDS // len(traces)
    return [trace.events for trace in traces], resident


# ---- what is printed -------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """Pace of the blocks that a compute unit holds: cycles that all of them take for a tile of keys each, and beside
    their tiles. Then the share of that time in which its SIMDs compute, and in which its shared memory works."""

    tile: float
    start: float
    computing: float
    lds: float


class Speed(NamedTuple):
    """Speed of a kernel on a compute unit.

    Attributes:
        paces: with one block, two, ... as many as it holds; products: share of the instructions that multiply, of all
            and of those in the stretches between two branches or barriers that hold the products of a tile.
    """

    paces: list[Pace]
    products: float
    products_of_main: float

    def cycles(self, units: int, blocks: int, tiles: int) -> float:
        """Cycles of so many units for this many blocks with this many tiles of keys each."""
        rounds, rest = divmod(blocks, units * len(self.paces))
        counts = [len(self.paces)] * rounds + [-(-rest // units)] * (rest > 0)
        return sum(self.paces[count - 1].start + tiles * self.paces[count - 1].tile for count in counts)


@functools.cache
def speed(variant: Variant, timing: Timing, *, banks: bool) -> Speed:
    """Speed from the difference of two numbers of TILES of keys. banks: see :class:`ComputeUnit`."""
    (few, resident), (many, _) = (block(variant, n, timing) for n in TILES)
    shares = []
    for chosen in (list, main_blocks):
        counts = [Counter(e.products > 0 for e in chosen(each[0])) for each in (few, many)]
        issued = counts[1] - counts[0]
        shares.append(issued[True] / sum(issued.values()))
    return Speed([pace(few, many, count + 1, timing, banks=banks) for count in range(resident)], *shares)


def main_blocks(events: list[Event]) -> list[Event]:
    """Events of the stretches between two branches or barriers that have many products."""
    found: list[Event] = []
    stretch: list[Event] = []
    for e in [*events, Event("barrier")]:
        stretch.append(e)
        if e.kind in ("branch", "barrier"):
            found += stretch if sum(e.products for e in stretch) >= _MAIN else []
            stretch = []
    return found


def pace(few: Waves, many: Waves, blocks: int, timing: Timing, *, banks: bool) -> Pace:
    """The pace of so many blocks, from their waves with each of TILES."""
    units = [ComputeUnit([waves] * blocks, timing, banks=banks) for waves in (few, many)]
    cycles = [unit.run() for unit in units]
    more = cycles[1] - cycles[0]
    tile = more / (TILES[1] - TILES[0])
    computing = (units[1].vector_cycles - units[0].vector_cycles) / more / SIMDS
    lds = (units[1].lds_cycles - units[0].lds_cycles) / more / timing.pipes
    return Pace(tile, cycles[0] - TILES[0] * tile, computing, lds)


def time_of(tokens: int, variant: Variant, card: Card, *, banks: bool) -> float:
    """Seconds of a call with one batch element, as many keys as queries and no mask, by the launches of its plan."""
    shape = (1, HEADS, tokens, variant.head_dim)
    query, key, value = (torch.empty(shape, dtype=getattr(torch, variant.dtype), device="meta") for _ in range(3))
    call = check_call(query, key, value)
    plan_of = tensor_plan if variant.on_tensor_cores else plan_call
    plan = plan_of(call, card.units, None, arch=variant.arch)
    launches = forward_launches(call, plan, empty_output(call))
    return LAUNCH * (len(launches) - 1) + sum(_seconds(launch, card, banks=banks) for launch in launches)


def _seconds(launch: Launch, card: Card, *, banks: bool) -> float:
    """Seconds of a launch from its first block to its last one."""
    variant, params = launch.variant, launch.params
    assert isinstance(variant, Variant)
    ranges = max(1, params.splits)
    if launch.function != variant.functions[0]:  # joins parts: each was written, and is read
        rows = params.batches * params.heads * params.lq
        of_parts, of_output = 4 * ranges * (params.dim_v + 2), variant.head_dim * 2
        return rows * (2 * of_parts + of_output) / card.bandwidth
    tiles = math.ceil(math.ceil(params.lk / variant.geometry.cols) / ranges)
    return speed(variant, card.timing, banks=banks).cycles(card.units, math.prod(launch.grid), tiles) / card.hertz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="MI50", choices=CARDS)
    parser.add_argument("--matrix", action="store_true", help="on matrix units (RDNA 3 and 4)")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--banks", action="store_true", help="operands in one bank of registers always wait (RDNA)")
    arguments = parser.parse_args()
    card, banks = CARDS[arguments.card], arguments.banks
    variant = forward_variant(arguments.head_dim, arguments.dtype, card.arch, matrix=arguments.matrix)
    found, (rows, cols) = speed(variant, card.timing, banks=banks), (variant.geometry.rows, variant.geometry.cols)
    full = found.paces[-1]
    flops = 4 * rows * cols * arguments.head_dim * len(found.paces) / full.tile * card.units * card.hertz
    most = SIMDS * card.units * card.hertz * _flops(card, arguments.dtype, matrix=arguments.matrix)
    print(
        f"{arguments.card}, {len(found.paces)} blocks of {rows} queries: {full.tile:.0f} cycles for {cols} "
        f"keys, {flops / 1e12:.1f} TFLOP/s, {flops / most:.0%} of its peak; {found.products:.0%} of the instructions "
        f"multiply and add, {found.products_of_main:.0%} of those in the main blocks; SIMDs compute "
        f"{full.computing:.0%} of the time, shared memory works {full.lds:.0%}"
    )
    is_published = (arguments.card, arguments.head_dim, arguments.dtype) == ("MI50", 64, "float16")
    for tokens, published in PUBLISHED.items():
        own = 1e3 * time_of(tokens, variant, card, banks=banks)
        beside = ""
        if is_published:
            beside = f"; noflash-attention publishes {published} ms, {published / own:.1f} times as much"
        elif card.timing.matrix:
            math_ms = 1e3 * _torchs_math(card, tokens, arguments.head_dim, arguments.dtype)
            beside = f"; torch's math attention, at least {math_ms:.2f} ms"
        print(f"{tokens:6d} tokens: {own:.2f} ms{beside}")


def _flops(card: Card, dtype: str, *, matrix: bool) -> int:
    """Return what a SIMD computes in a cycle; ``matrix``: on its matrix units."""
    return 2 * 16**3 // card.timing.matrix if matrix else card.flops * (2 if dtype == "float16" else 1)


def _torchs_math(card: Card, tokens: int, head_dim: int, dtype: str) -> float:
    """Seconds that torch's math attention takes at least: its products at the peak of the matrix units, and the scores
    written and read, and the probabilities."""
    rate = SIMDS * card.units * card.hertz * _flops(card, dtype, matrix=dtype != "float32")
    scores = HEADS * tokens**2
    return 4 * scores * head_dim / rate + 4 * scores * getattr(torch, dtype).itemsize / card.bandwidth


if __name__ == "__main__":
    main()
