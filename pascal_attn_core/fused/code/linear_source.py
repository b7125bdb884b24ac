"""The text of the linear layer in 8-bit integers, ``cuda/int8_linear.cu``: its files, and the sizes of its tiles."""

from __future__ import annotations

from typing import NamedTuple

KIND = "int8_linear"
FILES = ("base.cuh", "elements.cuh", "codes.cuh", "int8_linear.cu")
LEAST_CAPABILITY = (6, 1)  # dp4a
CHUNK_WORDS = 8  # CHUNK of the text: rows of x in 8 bits are padded to a multiple of it
QUANTIZE = "pa_linear_quantize"
ROTATIONS = (0, 4, 16, 64, 256)
MOST_COLUMNS = 1 << 17  # 2**17 products of two codes, each at most 128 * 127, fit 32 bits


class LinearTile(NamedTuple):
    """The part of one of the products that a block computes.

    Attributes:
        rows: of x; cols: rows of the weight.
        threads: of a block.
        has_few_rows: a block reads whole rows of the weight; else it is one of a grid of tiles.
    """

    rows: int
    cols: int
    threads: int
    has_few_rows: bool = False


TILES = {
    "pa_linear": LinearTile(128, 128, 256),
    "pa_linear_small": LinearTile(64, 64, 64),
    "pa_linear_few": LinearTile(4, 32, 256, True),
    "pa_linear_some": LinearTile(16, 16, 256, True),
}
FUNCTIONS = (*TILES, QUANTIZE)
