"""The share of needed multiplications in all instructions that a kernel issues, from its machine code for sm_61.

**Attention** (:func:`share`), for one tile. Needed are the multiplications of the tile products (FFMA; the first one of
each score is an FMUL): two in the forward, three for dQ, four for dK and dV, five where one kernel computes all three.
Counted is a tile in the middle of a long call: the body of the loop over tiles, its inner loops as often as the
geometry says. The move of float32 sums to the output runs once every PA_FLUSH tiles and counts as much.

Left out is what stands before and behind that loop (in dK and dV also what each head begins with), pa_delta, and what
only few tiles run: code that is jumped over and touches no memory, or loads rows one by one as they exist (the last
tile), such as the band's comparisons and the rescaling to a larger maximum. Other choices count both ways, such as
that between dense and packed sequences: apart from the rescaling, shares are lower bounds.

**A linear layer in 8 bits** (:func:`linear_share`), for a whole call: needed are its dp4a. What a call decides for the
whole kernel (no activation, a float32 bias, whole words) is put into the text as constants and compiled, so that each
instruction that is left is executed: those in loops as often as the sizes say, the others once. The rounding of x
counts as well, per element of x.

**A linear layer with GGUF weights** (:func:`gguf_share`), of many rows, its main loop: needed are its dp4a.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pascal_attn_core.fused.code.kinds import CHUNK_WORDS, INT8_LINEAR, QUANTIZE, TILES
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.gpu.nvrtc import Nvrtc

from .sass import Instruction, Loop, loops, maxwell, sections, within

# What the definition of the backward has: S = QK^T, dO V^T, dV, dQ, dK. Both gradient kernels make the first two.
BACKWARD_PRODUCTS = 5
_MEMORY = ("LDG", "STG", "LDS", "STS", "RED", "BAR")


@dataclass(frozen=True)
class Kernel:
    """Products in the body of a kernel's loop over tiles: product_rows, then product_cols of ``product.cuh``, then
    product_queries of ``query_sums.cuh``.

    around: loops that the loop over tiles lies in.
    multiply: the instruction that multiplies: FFMA one pair of numbers, IDP (dp4a) four.
    """

    function: str
    row_products: int
    column_products: int
    around: int = 0
    query_products: int = 0
    multiply: str = "FFMA"

    @property
    def products(self) -> int:
        return self.row_products + self.column_products + self.query_products


KERNELS = {
    "forward": Kernel("pa_forward", 1, 1),
    "grad_query": Kernel("pa_grad_query", 2, 1),
    "grad_key_value": Kernel("pa_grad_key_value", 2, 2, around=1),
    "grad_all": Kernel("pa_grad_all", 2, 2, around=1, query_products=1),
    "int8": Kernel("pa_int8_attention", 1, 1, multiply="IDP"),
}


@dataclass(frozen=True)
class Share:
    """needed: multiplications of the products; issued: all instructions, per thread and tile; counts: by kind; scores:
    of a thread and tile."""

    needed: int
    issued: float
    counts: dict[str, float]
    scores: int

    @property
    def value(self) -> float:
        return self.needed / self.issued

    @property
    def per_score(self) -> float:
        """Instructions."""
        return self.issued / self.scores


def share(variant: Variant, cubin: bytes) -> Share:
    """The share for one variant of a kind in KERNELS.

    Raises:
        ValueError: the loops found are not those that the source has.
    """
    kernel, geometry = KERNELS[variant.kind], variant.geometry
    instructions = maxwell(sections(cubin)[kernel.function])
    tile_loop, products = _loops(instructions, kernel)
    weights = dict.fromkeys((i.address for i in within(instructions, tile_loop)), 1.0)
    _leave_out_edges(instructions, tile_loop, weights, variant.flush_tiles)
    for loop, trips in zip(products, _trips(variant, kernel, len(products))):
        for i in within(instructions, loop):
            weights[i.address] *= trips
    counts: Counter[str] = Counter()
    for i in instructions:
        counts[i.kind] += weights.get(i.address, 0.0)
    scores = geometry.rows * geometry.cols // geometry.threads
    is_int8 = kernel.multiply == "IDP"
    needed = kernel.products * scores * variant.head_dim // (4 if is_int8 else 1)
    fewest = needed - (0 if is_int8 else kernel.row_products * scores)
    if counts[kernel.multiply] < fewest:
        found = f"{counts[kernel.multiply]} {kernel.multiply}"
        raise ValueError(f"{variant.name}: found {found}, the products alone have {fewest}")
    return Share(needed, sum(counts.values()), dict(counts), scores)


def packing(variant: Variant, cubin: bytes) -> float:
    """Instructions of all lanes, at most, to pack a token of query, key and value of one head for 8-bit attention: both
    sides of each branch, and a warp's share of what its loops begin with. The means are torch's and not counted."""
    rows, issued = variant.geometry.cols, 0
    for name in ("queries", "keys", "values"):
        code = _reached(maxwell(sections(cubin)[f"pa_pack_{name}"]))
        found = sorted(loops(code), key=lambda loop: loop[0] - loop[1])  # of V one in the other, which has four trips
        trips = {"values": (rows // 16, 4)}.get(name, (rows // 4,))
        if len(found) != len(trips):
            raise ValueError(f"pa_pack_{name}: found {len(found)} loops, want {len(trips)}")
        issued += sum(
            math.prod(n for (first, last), n in zip(found, trips) if first <= i.address <= last) for i in code
        )
    return 32 * issued / rows


def backward_share(query: float, key_value: float) -> float:
    """Share of the two gradient kernels together, from the share of each: needed are BACKWARD_PRODUCTS of their seven.

    Scores and dO V^T are made in both, so that each gradient is summed by one block in a fixed order, without atomics.
    """
    shares = {"grad_query": query, "grad_key_value": key_value}
    return BACKWARD_PRODUCTS / sum(KERNELS[kind].products / value for kind, value in shares.items())


def _loops(instructions: list[Instruction], kernel: Kernel) -> tuple[Loop, list[Loop]]:
    """The loop over tiles, the longest that lies in ``around`` longer ones, and those of the products in it."""
    inner = sorted(loops(instructions))
    for level in range(kernel.around + 1):
        if not inner:
            raise ValueError(f"found {level} nested loops, want at least {kernel.around + 1}")
        outer = max(inner, key=lambda loop: loop[1] - loop[0])
        inner = [loop for loop in inner if loop != outer and outer[0] <= loop[0] and loop[1] <= outer[1]]
    kinds = {loop: [i.kind for i in within(instructions, loop)] for loop in inner}
    return outer, [loop for loop in inner if kinds[loop].count(kernel.multiply) >= 64]


def _trips(variant: Variant, kernel: Kernel, found: int) -> list[int]:
    """How often the loop over chunks of each row product runs, and that of each part of the other products (unless it
    was unrolled)."""
    geometry = variant.geometry
    staged = geometry.cols // geometry.parts // geometry.staged
    chunks = variant.head_dim // geometry.depth - 1  # the first one stands before the loop
    if kernel.multiply == "IDP":  # sizes in words of four, in both products
        chunks, staged = variant.head_dim // 4 // geometry.depth - 1, geometry.cols // 4 // geometry.staged - 1
    rows = [chunks] * (chunks > 1)
    columns = [staged] * (geometry.parts if staged > 1 else 0)
    keys = geometry.rows // geometry.parts // geometry.staged
    queries = [keys] * (geometry.parts if keys > 1 else 0)
    expected = rows * kernel.row_products + columns * kernel.column_products + queries * kernel.query_products
    if found != len(expected):
        raise ValueError(f"{variant.name}: found {found} loops of products, want {len(expected)}")
    return expected


def _leave_out_edges(code: list[Instruction], tile_loop: Loop, weights: dict[int, float], flush_tiles: int) -> None:
    for branch in within(code, tile_loop):
        if branch.target is None or not branch.guarded or not branch.address < branch.target <= tile_loop[1]:
            continue
        skipped = [i for i in code if branch.address < i.address < branch.target]
        kinds = {i.kind for i in skipped if not (i.kind == "LDG" and i.guarded)}
        has_mean = "MUFU" in kinds and kinds & {*_MEMORY} == {"LDG"}  # of int8_attention.cu: few tiles have a sink
        if has_mean or not kinds & {*_MEMORY, "FFMA"}:
            weight = 0.0
        elif "STG" in kinds and "BAR" not in kinds:
            weight = 1 / flush_tiles
        else:
            continue
        for i in skipped:
            weights[i.address] = min(weights[i.address], weight)


# ---- linear layers in 8 bits -----------------------------------------------------------------------------------------

_DECIDED = {"p.activation": "0", "p.is_gated": "0", "p.bias_kind": "1", "p.in_fours": "3", "p.rotation": "0"}
_ROWS_OF_THREAD, _HALVES = 8, 2
_FFMA_SHARE = 0.85  # of a float32 product
_ELEMENTS_OF_THREAD = 32  # that pa_linear_quantize keeps: KEPT pieces of 8


def linear_share(library: Nvrtc, columns: int, rows_of_weight: int, dtype: int = 1) -> tuple[float, float]:
    """Share of dp4a in a layer with whole tiles: of the kernel that multiplies, and of that with the rounding of x.

    Args:
        columns: K; rows_of_weight: N; dtype: PA_DTYPE.
    Raises:
        ValueError: the loops found are not those that the source has.
    """
    tile, text = TILES["pa_linear"], source(INT8_LINEAR)
    for what, value in _DECIDED.items():
        text = text.replace(what, value)
    code = sections(library.compile(text, 61, {"PA_DTYPE": dtype}).cubin)
    issued = _product(maxwell(code["pa_linear"]), columns // (4 * CHUNK_WORDS))
    outputs = tile.rows * tile.cols // tile.threads
    needed = outputs * columns // 4
    # Of a thread's share of the rounding: what its outputs cost, were each element of x rounded for N outputs.
    rounded = len(_reached(maxwell(code[QUANTIZE]))) / _ELEMENTS_OF_THREAD
    return needed / issued, needed / (issued + rounded * columns * outputs / rows_of_weight)


def _product(instructions: list[Instruction], chunks: int) -> int:
    """Instructions that a thread issues."""
    reached = _reached(instructions)
    kinds = {loop: [i.kind for i in within(instructions, loop)] for loop in loops(reached)}
    main = [loop for loop in kinds if "IDP" in kinds[loop]]
    others = [loop for loop in kinds if loop not in main]
    if len(main) != 1 or len(others) != 2:
        raise ValueError(f"found {len(main)} loops with dp4a and {len(others)} others, want 1 and 2")
    rows, halves = sorted(others, key=lambda loop: loop[0] - loop[1])
    trips = {main[0]: chunks, rows: _ROWS_OF_THREAD, halves: _HALVES}
    issued = 0
    for i in reached:
        count = 1
        for (first, last), times in trips.items():
            count *= times if first <= i.address <= last else 1
        issued += count
    return issued


def gguf_share(cubin: bytes) -> tuple[float, float]:
    """Return the share of dp4a in the main loop of the product with GGUF weights of many rows, and instructions of a
    float32 product with 85 % FFMA for one there. The loop runs once for each 32 columns; what is jumped over and does
    not multiply loads or stores a chunk of 64 columns, every other time.

    Raises:
        ValueError: there is not one loop with dp4a.
    """
    reached = _reached(maxwell(sections(cubin)["pa_gguf_linear"]))
    main = [loop for loop in loops(reached) if any(i.kind == "IDP" for i in within(reached, loop))]
    if len(main) != 1:
        raise ValueError(f"found {len(main)} loops with dp4a, want 1")
    body = within(reached, main[0])
    halved = {i.address for i in body if i.kind == "BAR"}
    for branch in body:
        skipped = [i for i in body if branch.guarded and branch.address < i.address < (branch.target or 0)]
        if not any(i.kind == "IDP" for i in skipped):
            halved |= {i.address for i in skipped}
    issued, products = len(body) - len(halved) / 2, sum(i.kind == "IDP" for i in body)
    return products / issued, 4 * products / _FFMA_SHARE / issued


def _reached(instructions: list[Instruction]) -> list[Instruction]:
    """Instructions up to the last EXIT: behind it lie divisions of numbers that are not normal, and padding."""
    last = max(i.address for i in instructions if i.kind == "EXIT")
    return [i for i in instructions if i.address <= last]
