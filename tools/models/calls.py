"""Modelled times of whole calls, of the kernels on tensor cores, beside what an H200 measured.

    python -m tools.models.calls                                 the tables of docs/fused-kernel.md
    python -m tools.models.calls --write docs/fused-kernel.md    put them between the marks in the document

A block reads its own rows, one load after the other, the first keys and values, and plays its rounds of the main loop
as :mod:`.tensor` does. In a round in which rows of a warp have a new maximum its sums are scaled: where eight rows
share that work, in random order, with the probability 1 - (1 - 1 / t)^8 in round t. Tiles that the band cuts are looked
at score by score. Blocks take the places of the card in the order of their launch, which takes 5 us beside. Not
modelled: L2, DRAM, that a block alone on a multiprocessor is faster than one of two. On plain cores only ratios count.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pascal_attn_core.call import Arguments, AttentionCall, check_call
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch.plan import Plan, Shape, key_tiles, plan_call, tensor_plan
from tools.fused import compiled
from tools.int8_table import command

from .sass import Instruction
from .tensor import MACHINES, SCHEDULERS, Machine, paths, simulate, tensor_cycles

BEGIN, END = "<!-- times of calls: tools.models.calls -->", "<!-- end of times of calls -->"
TITAN = Machine("TITAN X", {}, 128, 28, 61, clock=1.53e9, memory=480e9)
_LAUNCH = 5e-6
_PLAIN = {"forward": 2 / 0.55, "grad_all": 5 / 0.43}  # products, of the peak
HEAD_DIMS, HEADS = (40, 64, 80, 96, 128), 32


@functools.cache
def _play(path: tuple[Instruction, ...], machine: Machine, warps: int, blocks: int) -> float:
    share = simulate(path, machine, warps, blocks)
    return tensor_cycles(path, machine) * warps * blocks / SCHEDULERS / share


def round_cycles(variant: Variant, machine: Machine, **rare: bool) -> float:
    """Cycles of a round of all blocks of a multiprocessor; ``rare``: of :func:`.sass.usual_path`."""
    own = variant.geometry
    if not variant.on_tensor_cores:
        return own.blocks * own.rows * own.cols * variant.head_dim / 128 * _PLAIN[variant.kind]
    ((_, path),) = paths(compiled(variant, machine.arch).cubin, **rare)
    return _play(tuple(path), machine, variant.threads // 32, own.blocks)


@functools.lru_cache(maxsize=1 << 16)
def _scalings(number: int) -> float:
    """The expected number of rounds, of so many, in which one of eight rows has a new maximum."""
    return sum(1 - (1 - 1 / t) ** 8 for t in range(1, number + 1))


def jobs(call: AttentionCall, plan: Plan, variant: Variant, is_measured: bool = False) -> Iterator[tuple[float, int]]:
    """(rounds, of them cut by the band) of each block of a kernel, in the order of their launch."""
    own, traits, shape, group = variant.geometry, variant.traits, Shape.of(call), 1
    if traits.of_keys:
        shape, group = shape.transposed, shape.groups
    heads, sizes = shape.batch * shape.heads, key_tiles(shape, own)
    edges = 0 if shape.band is None else sum(abs(end) < shape.keys for end in shape.band) * -(-own.rows // own.cols)
    if plan.pieces and not traits.is_gradient:
        whole = (sizes[tile % len(sizes)] for tile in range(plan.pieces.whole))
        yield from ((size, min(edges, size)) for size in whole)
        for piece in plan.pieces.listed:
            is_last = piece.end == sizes[piece.tile % len(sizes)]
            yield piece.cost(own.cols) / own.cols, min(edges, piece.end - piece.first) * is_last
        return
    splits = 1 if traits.is_gradient else max(1, plan.splits)
    for part in _ranges_of(shape, _num_ranges(plan, variant)):
        sizes = key_tiles(part, own)
        tiles = [(group * -(-n // splits), group * min(edges, n) // splits) for n in sizes for _ in range(splits)]
        tiles = sorted(tiles, reverse=True) if shape.band else tiles  # as a causal rule has them launched
        # Those of all heads; what was measured on an H200 had one head's after the other's.
        by_size = variant.kind == "grad_all" or (shape.band and traits.is_gradient and not is_measured)
        yield from (tile for tile in tiles for _ in range(heads)) if by_size else tiles * heads


def _num_ranges(plan: Plan, variant: Variant) -> int:
    return plan.ranges[variant.traits.of_keys] if variant.is_gradient else 1


def _ranges_of(shape: Shape, ranges: int) -> Iterator[Shape]:
    """Yield the sizes of the rows with each range of the columns."""
    length = -(-shape.keys // ranges)
    for first in range(0, shape.keys, length):
        band = shape.band and (shape.band[0] - first, shape.band[1] - first)
        yield shape._replace(keys=min(length, shape.keys - first), band=band)


def kernel_seconds(
    call: AttentionCall, plan: Plan, variant: Variant, machine: Machine, is_measured: bool = False
) -> float:
    """The time of one launch, and that in which the gradients of ranges are written, read and added."""
    own, usual = variant.geometry, round_cycles(variant, machine)
    rising = max(0.0, round_cycles(variant, machine, rises=True) - usual)
    cut = max(0.0, round_cycles(variant, machine, at_edge=True) - usual) if call.has_band else 0.0
    begin = (1 + variant.traits.is_gradient) * own.rows * variant.head_dim // 8 // own.threads + 3
    free = [0.0] * (own.blocks * machine.num_sms)
    for number, edges in jobs(call, plan, variant, is_measured):
        took = begin * machine.load + number * usual + _scalings(int(number)) * rising + edges * cut
        heapq.heapreplace(free, free[0] + took)
    took, ranges = _LAUNCH + max(free) / machine.clock, _num_ranges(plan, variant)
    tensors = (call.key, call.value) if variant.traits.of_keys else (call.query,)
    return took + (ranges > 1) * sum(_LAUNCH + (2 * ranges + 1) * t.nbytes / machine.memory for t in tensors)


class Size(NamedTuple):
    """The size of a call; ``window``: keys that a query sees at most, itself the last of them; 0 = all before it.
    ``keys``: 0 = as many as queries."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    is_causal: bool = False
    window: int = 0
    keys: int = 0

    @property
    def operations(self) -> int:
        """Operations of the two products of the definition, a multiply-add counted as two; gradients have 2.5 times."""
        tokens, most = self.tokens, self.window or self.tokens
        visible = sum(min(row + 1, most) for row in range(tokens)) if self.is_causal else tokens * tokens
        return 4 * self.batch * self.heads * visible * self.head_dim


def planned(size: Size, machine: Machine) -> tuple[AttentionCall, Plan]:
    """A call in float16, on plain cores in float32, with gradients, and its plan."""
    dtype = torch.float16 if machine.product else torch.float32
    query, key = (
        torch.empty(size.batch, heads, tokens, size.head_dim, dtype=dtype, device="meta")
        for heads, tokens in ((size.heads, size.tokens), (size.kv_heads, size.keys or size.tokens))
    )
    window = (size.window - 1, 0) if size.window else None
    call = check_call(Arguments(query, key, key, is_causal=size.is_causal, window=window, enable_gqa=True))
    plan_of = tensor_plan if machine.product else plan_call
    return call, plan_of(call, machine.num_sms, divmod(machine.arch, 10), for_grad=True)


@functools.cache
def seconds(size: Size, machine: Machine, is_measured: bool = False) -> tuple[float, float]:
    """The time of the kernels of such a call: forward, and gradients."""
    call, plan = planned(size, machine)
    forward, *gradients = (kernel_seconds(call, plan, variant, machine, is_measured) for variant in plan.variants)
    return forward, sum(gradients)


def ratio(size: Size, machine: Machine) -> tuple[float, float]:
    """The rate of a call in units of that of the same without a band, forward and gradients."""
    whole = size._replace(is_causal=False, window=0)
    needed, before, after = size.operations / whole.operations, seconds(whole, machine), seconds(size, machine)
    return needed * before[0] / after[0], needed * before[1] / after[1]


# What an H200 measured: TFLOP/s forward, the least and the most of three runs; and forward and backward, None = not
# known. And milliseconds that the host takes before the card begins, and before it begins with the gradients: in the
# first run two numbers for all calls, fitted; in the second what was measured for a small call on an idle host. Since
# then the fifth call has got another kernel and another order of blocks.
_FIRST, _SECOND = (0.45, 1.55), (0.235, 1.36)
MEASURED: dict[Size, tuple[float, float, float | None, tuple[float, float]]] = {
    Size(2, 8, 8, 4096, 40): (56.8, 56.8, 63, _FIRST),
    Size(2, 10, 10, 4096, 64): (81, 116, 96, _FIRST),
    Size(1, 24, 24, 4608, 128): (143, 143, 129, _FIRST),
    Size(1, 12, 12, 8192, 128): (157, 157, None, _FIRST),
    Size(4, 16, 16, 2048, 64, True): (41, 50, 45, _FIRST),
    Size(4, 32, 32, 4096, 128): (184, 184, 162, _SECOND),
    Size(1, 32, 8, 2048, 128, True): (91, 91, None, _SECOND),
}


# Calls that have fewer blocks of gradients than a card has multiprocessors.
RANGES = {
    Size(1, 10, 10, 4096, 64, keys=77): "4,096 queries and 77 keys, 10 heads, head_dim 64",
    Size(1, 8, 8, 1024, 64): "1,024 tokens, 8 heads, head_dim 64",
    Size(1, 8, 8, 2048, 64, True): "2,048 tokens, causal, 8 heads, head_dim 64",
}


def modelled_ms(size: Size) -> tuple[float, float]:
    """Milliseconds of a measured call: forward, and forward and backward, whose second kernels begin when the host has
    launched them and the first have ended."""
    (forward, gradients), (host, both) = seconds(size, MACHINES["H200"], True), MEASURED[size][-1]
    return host + 1e3 * forward, max(both, host + 1e3 * forward) + 1e3 * gradients


def measured_ms(size: Size) -> tuple[float, float, float]:
    """The least and the most forward; forward and backward, NaN = not known."""
    least, most, both, _ = MEASURED[size]
    return tuple(size.operations / rate / 1e9 for rate in (most, least, (both or math.nan) / 3.5))


def table() -> str:
    """The tables."""
    lines = ["| H200, ms | forward | modelled | kernel | with backward | modelled | kernels |", "|---" * 7 + "|"]
    for size in MEASURED:
        (least, most, both), (forward, backward) = measured_ms(size), modelled_ms(size)
        name = f"{size.batch}x{size.heads}x{size.tokens}x{size.head_dim}" + ", causal" * size.is_causal
        alone = [1e3 * took for took in seconds(size, MACHINES["H200"], True)]
        cells = [name, f"{least:.2f}" + f"-{most:.2f}" * (least < most), f"{forward:.2f}", f"{alone[0]:.2f}"]
        cells += ["-"] * 3 if math.isnan(both) else [f"{ms:.2f}" for ms in (both, backward, sum(alone))]
        lines.append("| " + " | ".join(cells) + " |")
    cards = [MACHINES["T4"], MACHINES["V100"], TITAN]
    heads = [f"{card.name}, {what}" for card in cards for what in ("forward", "gradients")]
    lines += ["", "| head_dim | " + " | ".join(heads) + " |", "|---" * 7 + "|"]
    for head_dim in HEAD_DIMS:
        lines.append(f"| {head_dim} | " + " | ".join(text for card in cards for text in _cells(head_dim, card)) + " |")
    lines += ["", "| gradients, ms (in one range) | T4 | V100 |", "|---" * 3 + "|"]
    for size, name in RANGES.items():
        lines.append(f"| {name} | " + " | ".join(_in_ranges(size, card) for card in cards[:2]) + " |")
    return "\n".join(lines)


def _in_ranges(size: Size, card: Machine) -> str:
    call, plan = planned(size, card)
    found, one_range = (
        sum(1e3 * kernel_seconds(call, how, variant, card) for variant in plan.gradients)
        for how in (plan, plan._replace(ranges=(1, 1)))
    )
    return f"{found:.2f} ({one_range:.2f})" if plan.ranges != (1, 1) else f"{found:.2f}"


def _cells(head_dim: int, card: Machine) -> Iterator[str]:
    """The cells of one card, forward and gradients: the share of the peak, then rates of calls with a band."""
    whole = Size(1, HEADS, HEADS, 4096, head_dim)
    bands = [whole._replace(tokens=n, is_causal=True, window=w) for n, w in ((4096, 0), (2048, 0), (4096, 1024))]
    for i, products in enumerate((1.0, 3.5)):  # seven products of gradients, of which five are needed
        share = products * whole.operations / seconds(whole, card)[i] / card.peak if card.product else 0.0
        rates = "/".join(f"{ratio(size, card)[i]:.2f}" for size in bands)
        yield f"{share:.0%}; {rates}" if share else rates


if __name__ == "__main__":
    command(__doc__, (BEGIN, END), table)
