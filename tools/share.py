"""The share of needed FFMA in all instructions that a forward kernel issues for one tile, from sm_61 machine code.

Counted is a tile in the middle of a long call: the body of the loop over tiles, its inner loops as often as the
geometry says. Left out is what only few tiles run: code that is jumped over and touches no memory, or loads rows one by
one as they exist (the last tile), such as the band's comparisons and the rescaling to a larger maximum. The move of
float32 sums to the output runs once every PA_FLUSH tiles and counts as much.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from maxwell import Instruction

from pascal_attn_core.fused._source import Variant

_MEMORY = ("LDG", "STG", "LDS", "STS", "BAR")


@dataclass(frozen=True)
class Share:
    """needed: FFMA of the two products; issued: all instructions, per thread and tile; counts: by kind."""

    needed: int
    issued: float
    counts: dict[str, float]

    @property
    def value(self) -> float:
        return self.needed / self.issued


def share(variant: Variant, instructions: list[Instruction]) -> Share:
    """The share for one variant of kind "forward".

    Raises:
        ValueError: the loops found are not those that the source has.
    """
    loops = sorted((i.target, i.address) for i in instructions if i.target is not None and i.target < i.address)
    tile_loop = max(loops, key=lambda loop: loop[1] - loop[0])
    weights = dict.fromkeys((i.address for i in _within(instructions, tile_loop)), 1.0)
    _leave_out_edges(instructions, tile_loop, weights, variant.flush_tiles)
    products = [loop for loop in loops if loop != tile_loop and _is_product(instructions, loop, tile_loop)]
    for loop, trips in zip(products, _trips(variant, len(products))):
        for i in _within(instructions, loop):
            weights[i.address] *= trips
    counts: Counter[str] = Counter()
    for i in instructions:
        counts[i.kind] += weights.get(i.address, 0.0)
    geometry = variant.geometry
    needed = 2 * geometry.rows * geometry.cols * variant.head_dim // geometry.threads
    issued = sum(counts.values())
    if counts["FFMA"] < needed:
        raise ValueError(f"{variant.name}: found {counts['FFMA']} FFMA, the products alone have {needed}")
    return Share(needed, issued, dict(counts))


def _within(instructions: list[Instruction], span: tuple[int, int]) -> list[Instruction]:
    return [i for i in instructions if span[0] <= i.address <= span[1]]


def _is_product(instructions: list[Instruction], loop: tuple[int, int], tile_loop: tuple[int, int]) -> bool:
    inside = tile_loop[0] <= loop[0] and loop[1] <= tile_loop[1]
    return inside and sum(i.kind == "FFMA" for i in _within(instructions, loop)) >= 64


def _trips(variant: Variant, found: int) -> list[int]:
    """How often the loop over chunks of Q K^T runs, and that of each part of P V (unless it was unrolled)."""
    geometry = variant.geometry
    staged = geometry.cols // geometry.parts // geometry.staged
    chunks = variant.head_dim // geometry.depth - 1  # the first one stands before the loop
    expected = [*[chunks] * (chunks > 1), *[staged] * (geometry.parts if staged > 1 else 0)]
    if found != len(expected):
        raise ValueError(f"{variant.name}: found {found} loops of products, want {len(expected)}")
    return expected


def _leave_out_edges(
    instructions: list[Instruction], tile_loop: tuple[int, int], weights: dict[int, float], flush_tiles: int
) -> None:
    for branch in _within(instructions, tile_loop):
        if branch.target is None or not branch.guarded or not branch.address < branch.target <= tile_loop[1]:
            continue
        skipped = [i for i in instructions if branch.address < i.address < branch.target]
        kinds = {i.kind for i in skipped if not (i.kind == "LDG" and i.guarded)}
        if not kinds & {*_MEMORY, "FFMA"}:
            weight = 0.0
        elif "STG" in kinds and "BAR" not in kinds:
            weight = 1 / flush_tiles
        else:
            continue
        for i in skipped:
            weights[i.address] = min(weights[i.address], weight)
