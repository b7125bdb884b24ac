"""The share of dp4a in all instructions that a linear layer in 8 bits issues, from sm_61 machine code.

What a call decides for the whole kernel (no activation, a float32 bias, whole words) is put into the text as constants
and compiled, so that each instruction that is left is executed: those in loops as often as the sizes say, the others
once. The rounding of x counts as well, per element of x.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from maxwell import Instruction, decode, sections

from pascal_attn_core.fused.code.linear_source import CHUNK_WORDS, KIND, QUANTIZE, TILES
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.gpu.nvrtc import Nvrtc

_DECIDED = {"p.activation": "0", "p.is_gated": "0", "p.bias_kind": "1", "p.in_fours": "3"}
_ROWS_OF_THREAD, _HALVES = 8, 2
_ELEMENTS_OF_THREAD = 32  # that pa_linear_quantize keeps: KEPT pieces of 8


class LinearShare(NamedTuple):
    """
    Attributes:
        product: of the kernel that multiplies; main_loop: of its loop alone.
        whole: with the rounding of x; rotated: with the rotation of x in groups of 256 as well.
    """

    product: float
    main_loop: float
    whole: float
    rotated: float


def linear_share(
    library: Nvrtc, columns: int, rows_of_weight: int, dtype: int = 1, chunk_words: int = CHUNK_WORDS
) -> LinearShare:
    """Of a layer with whole tiles.

    Args:
        columns: K; rows_of_weight: N.
        dtype: PA_DTYPE; chunk_words: CHUNK of the text.
    Raises:
        ValueError: the loops found are not those that the source has.
    """
    tile = TILES["pa_linear"]
    plain, turned = (_compiled(library, dtype, rotation) for rotation in (0, 256))
    chunks = columns // (4 * chunk_words)
    issued, loop = _product(decode(plain["pa_linear"]), chunks)
    per_chunk = tile.rows * tile.cols // tile.threads * chunk_words
    if loop.count("IDP") != per_chunk:
        raise ValueError(f"found {loop.count('IDP')} dp4a in the loop, want {per_chunk}")
    needed = per_chunk * chunks
    outputs = tile.rows * tile.cols // tile.threads
    # Of a thread's share of the rounding: what its outputs cost, were each element of x rounded for N outputs.
    rounded = [_straight(decode(code[QUANTIZE])) / _ELEMENTS_OF_THREAD for code in (plain, turned)]
    whole, rotated = (needed / (issued + each * columns * outputs / rows_of_weight) for each in rounded)
    return LinearShare(needed / issued, per_chunk / len(loop), whole, rotated)


@cache
def _compiled(library: Nvrtc, dtype: int, rotation: int) -> dict[str, bytes]:
    text = source(KIND)
    for what, value in {**_DECIDED, "p.rotation": str(rotation)}.items():
        text = text.replace(what, value)
    return sections(library.compile(text, 61, {"PA_DTYPE": dtype}).cubin)


def _product(instructions: list[Instruction], chunks: int) -> tuple[int, list[str]]:
    """Instructions that a thread issues, and the kinds of those in the loop over chunks."""
    loops = sorted(
        (i.target, i.address) for i in _reached(instructions) if i.target is not None and i.target < i.address
    )
    main = [loop for loop in loops if "IDP" in _kinds(instructions, loop)]
    others = [loop for loop in loops if loop not in main]
    if len(main) != 1 or len(others) != 2:
        raise ValueError(f"found {len(main)} loops with dp4a and {len(others)} others, want 1 and 2")
    rows, halves = sorted(others, key=lambda loop: loop[0] - loop[1])
    trips = {main[0]: chunks, rows: _ROWS_OF_THREAD, halves: _HALVES}
    issued = 0
    for i in _reached(instructions):
        count = 1
        for (first, last), times in trips.items():
            count *= times if first <= i.address <= last else 1
        issued += count
    return issued, _kinds(instructions, main[0])


def _straight(instructions: list[Instruction]) -> int:
    return len(_reached(instructions))


def _reached(instructions: list[Instruction]) -> list[Instruction]:
    """Those up to the last EXIT: behind it lie divisions of numbers that are not normal, and padding."""
    last = max(i.address for i in instructions if i.kind == "EXIT")
    return [i for i in instructions if i.address <= last]


def _kinds(instructions: list[Instruction], loop: tuple[int, int]) -> list[str]:
    return [i.kind for i in instructions if loop[0] <= i.address <= loop[1]]
