"""The share of needed multiplications in all instructions that a kernel issues for one tile, from sm_61 machine code.

Needed are those of the tile products (FFMA; the first one of each score is an FMUL): two in the forward, three for dQ,
four for dK and dV, five where one kernel computes all three. Counted is a tile in the middle of a long call: the body
of the loop over tiles, its inner loops as often as the geometry says. The move of float32 sums to the output runs once
every PA_FLUSH tiles and counts as much.

Left out is what stands before and behind that loop (in dK and dV also what each head begins with), pa_delta, and what
only few tiles run: code that is jumped over and touches no memory, or loads rows one by one as they exist (the last
tile), such as the band's comparisons and the rescaling to a larger maximum. Other choices count both ways, such as
that between dense and packed sequences: apart from the rescaling, shares are lower bounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from maxwell import Instruction, decode, sections

from pascal_attn_core.fused.code.source import Variant

# What the definition of the backward has: S = QK^T, dO V^T, dV, dQ, dK. Both gradient kernels make the first two.
BACKWARD_PRODUCTS = 5
_MEMORY = ("LDG", "STG", "LDS", "STS", "RED", "BAR")


@dataclass(frozen=True)
class Kernel:
    """What the body of a kernel's loop over tiles multiplies: product_rows, then product_cols of ``product.cuh``, then
    product_queries of ``query_sums.cuh``.

    around: loops that the loop over tiles lies in.
    """

    function: str
    row_products: int
    column_products: int
    around: int = 0
    query_products: int = 0

    @property
    def products(self) -> int:
        return self.row_products + self.column_products + self.query_products


KERNELS = {
    "forward": Kernel("pa_forward", 1, 1),
    "grad_query": Kernel("pa_grad_query", 2, 1),
    "grad_key_value": Kernel("pa_grad_key_value", 2, 2, around=1),
    "grad_all": Kernel("pa_grad_all", 2, 2, around=1, query_products=1),
}
Loop = tuple[int, int]  # addresses of its first instruction and of the branch back


@dataclass(frozen=True)
class Share:
    """needed: multiplications of the products; issued: all instructions, per thread and tile; counts: by kind."""

    needed: int
    issued: float
    counts: dict[str, float]

    @property
    def value(self) -> float:
        return self.needed / self.issued


def share(variant: Variant, cubin: bytes) -> Share:
    """The share for one variant of a kind in KERNELS.

    Raises:
        ValueError: the loops found are not those that the source has.
    """
    kernel, geometry = KERNELS[variant.kind], variant.geometry
    instructions = decode(sections(cubin)[kernel.function])
    tile_loop, products = _loops(instructions, kernel.around)
    weights = dict.fromkeys((i.address for i in _within(instructions, tile_loop)), 1.0)
    _leave_out_edges(instructions, tile_loop, weights, variant.flush_tiles)
    for loop, trips in zip(products, _trips(variant, kernel, len(products))):
        for i in _within(instructions, loop):
            weights[i.address] *= trips
    counts: Counter[str] = Counter()
    for i in instructions:
        counts[i.kind] += weights.get(i.address, 0.0)
    scores = geometry.rows * geometry.cols // geometry.threads
    needed = kernel.products * scores * variant.head_dim
    fewest = needed - kernel.row_products * scores
    if counts["FFMA"] < fewest:
        raise ValueError(f"{variant.name}: found {counts['FFMA']} FFMA, the products alone have {fewest}")
    return Share(needed, sum(counts.values()), dict(counts))


def backward_share(query: float, key_value: float) -> float:
    """What the two gradient kernels come to, from the share of each: needed are BACKWARD_PRODUCTS of their seven.

    Scores and dO V^T are made in both, so that each gradient is summed by one block in a fixed order, without atomics.
    """
    shares = {"grad_query": query, "grad_key_value": key_value}
    return BACKWARD_PRODUCTS / sum(KERNELS[kind].products / value for kind, value in shares.items())


def _loops(instructions: list[Instruction], around: int) -> tuple[Loop, list[Loop]]:
    """The loop over tiles, the longest that lies in ``around`` longer ones, and those of the products in it."""
    loops = sorted((i.target, i.address) for i in instructions if i.target is not None and i.target < i.address)
    for level in range(around + 1):
        if not loops:
            raise ValueError(f"found {level} nested loops, want at least {around + 1}")
        outer = max(loops, key=lambda loop: loop[1] - loop[0])
        loops = [loop for loop in loops if loop != outer and outer[0] <= loop[0] and loop[1] <= outer[1]]
    return outer, [loop for loop in loops if _is_product(instructions, loop)]


def _within(instructions: list[Instruction], span: Loop) -> list[Instruction]:
    return [i for i in instructions if span[0] <= i.address <= span[1]]


def _is_product(instructions: list[Instruction], loop: Loop) -> bool:
    return sum(i.kind == "FFMA" for i in _within(instructions, loop)) >= 64


def _trips(variant: Variant, kernel: Kernel, found: int) -> list[int]:
    """How often the loop over chunks of each row product runs, and that of each part of the other products (unless it
    was unrolled)."""
    geometry = variant.geometry
    staged = geometry.cols // geometry.parts // geometry.staged
    chunks = variant.head_dim // geometry.depth - 1  # the first one stands before the loop
    rows = [chunks] * (chunks > 1)
    columns = [staged] * (geometry.parts if staged > 1 else 0)
    keys = geometry.rows // geometry.parts // geometry.staged
    queries = [keys] * (geometry.parts if keys > 1 else 0)
    expected = rows * kernel.row_products + columns * kernel.column_products + queries * kernel.query_products
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
