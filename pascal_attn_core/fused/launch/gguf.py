"""The launches that expand blocks of a GGUF file, and that multiply them by rows of x in 8 bits. Nothing is launched or
compiled here."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.gguf_blocks import FORMATS
from ..code.compilation import DtypeVariant, GgufLinearVariant
from ..code.kinds import FEW, GGUF_EXPAND, GGUF_LINEAR, KERNELS, THREADS, WEIGHTS_OF_THREAD, LinearTile
from ..code.params import GgufExpand, GgufLinear, GgufRound
from . import Launch

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = tuple(KINDS)
_SLICE_BYTES = 64 << 20  # of x in 8 bits
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
# Multiples of bytes that blocks must begin at: what the kernel reads at once.
_ALIGNMENTS = {"Q4_1": 4, "Q5_1": 4, "IQ4_XS": 4, "Q4_K": 16, "Q5_K": 16}


class ExpandCall(NamedTuple):
    """``out = expand(blocks, format, arithmetic, table=table)`` of :mod:`...reference.gguf_blocks`, rounded to the
    dtype of out, one of DTYPES as that of the arithmetic.

    Attributes:
        blocks: uint8 ``[n, bytes]``, contiguous.
        table: int8 or float32.
        out: ``[n, weights]``, contiguous, beginning at a multiple of 16 bytes; written.
    """

    blocks: Tensor
    format: str
    arithmetic: torch.dtype
    table: torch.dtype
    out: Tensor


@functools.lru_cache(maxsize=8)
def variant_of(arithmetic: torch.dtype) -> DtypeVariant:
    """The compilation for a dtype of the arithmetic."""
    return DtypeVariant(GGUF_EXPAND, str(arithmetic).removeprefix("torch."))


def expand_launches(call: ExpandCall) -> list[Launch]:
    """The launch that writes ``call.out``."""
    count = call.out.numel()
    if not count:
        return []
    grid = -(-count // (THREADS * WEIGHTS_OF_THREAD)), 1, 1
    how = variant_of(call.arithmetic), KERNELS[call.format], grid, THREADS, GgufExpand
    numbers = {"count": count, "out_kind": KINDS[call.out.dtype], "wide_table": int(call.table == torch.float32)}
    return [Launch.over(*how, {"blocks": call.blocks, "out": call.out}, numbers)]


# ---- products --------------------------------------------------------------------------------------------------------


class GgufLinearCall(NamedTuple):
    """``out = x W^T + bias``, x in 8 bits. Tensors on one device.

    Attributes:
        x: ``[M, K]``, float32, float16 or bfloat16, last stride 1, any row stride.
        blocks: uint8 of any shape, contiguous: N rows of whole blocks.
        format: one of :data:`..code.kinds.PRODUCT_FORMATS`.
        bias: float32 ``[N]``, contiguous; or None.
        out: ``[M, N]``, of x's dtype, contiguous; it is written.
    """

    x: Tensor
    blocks: Tensor
    format: str
    bias: Tensor | None
    out: Tensor


def variants_of(name: str, rows: int, arch: str = "") -> list[GgufLinearVariant]:
    """The compilations for a format and rows of a thread: that with the rounding of x and few rows of x first."""
    return [GgufLinearVariant(GGUF_LINEAR, name, each, arch=arch) for each in dict.fromkeys((8, rows))]


def gguf_linear_launches(call: GgufLinearCall, rows: int = 8, function: str = "", arch: str = "") -> list[Launch]:
    """The launches that write ``call.out``. Extra memory: x in 8 bits and four or eight bytes for each 32 of them, at
    most 72 MiB: more rows go through in slices. Blocks that do not begin where the kernel can read them are copied.

    Args:
        rows: of a thread's outputs, 8 or 4.
        function: that multiplies; "" = by the number of rows of x.
    """
    count, columns = call.x.shape
    if not call.out.numel():
        return []
    function = function or next((name for name, tile in FEW.items() if count <= tile.rows), "pa_gguf_linear")
    if call.blocks.data_ptr() % _ALIGNMENTS.get(call.format, 2):
        call = call._replace(blocks=call.blocks.clone())
    variants = variants_of(call.format, rows, arch)
    tile = FEW.get(function, LinearTile(128, 64, variants[-1].threads))
    chunks = -(-columns // 64)
    most = tile.rows if function in FEW else max(1, _SLICE_BYTES // (64 * chunks * tile.rows)) * tile.rows
    launches = []
    for first in range(0, count, most):
        part = call._replace(x=call.x[first : first + most], out=call.out[first : first + most])
        launches += _slice_launches(part, function, tile, variants, chunks)
    return launches


def _slice_launches(
    call: GgufLinearCall, function: str, tile: LinearTile, variants: list[GgufLinearVariant], chunks: int
) -> list[Launch]:
    (count, columns), cols = call.x.shape, call.out.shape[1]
    row_tiles, col_tiles = -(-count // tile.rows), -(-cols // tile.cols)
    lines = count if function in FEW else row_tiles * tile.rows
    words = call.x.new_empty((lines, 16 * chunks), dtype=torch.int32)
    sums = 2 if call.format in _WITH_MINIMUM else 1
    scales = call.x.new_empty((sums, lines, 2 * chunks), dtype=torch.float32)
    has_few_rows = function in FEW
    strides = {"row_stride": call.x.stride(0) if count > 1 else 0, "rows": count, "columns": columns, "chunks": chunks}
    rounding = Launch.over(
        variants[0],
        "pa_gguf_round_few" if has_few_rows else "pa_gguf_round",
        (-(-chunks // 16), count, 1) if has_few_rows else (2 * chunks, row_tiles, 1),
        256,
        GgufRound,
        {"x": call.x, "words": words, "scales": scales},
        {**strides, "x_kind": KINDS[call.x.dtype]},
    )
    weights, size, _ = FORMATS[call.format]
    numbers = {
        "row_bytes": columns // weights * size, "rows": count, "cols": cols, "blocks": columns // 32, "chunks": chunks,
        "out_kind": KINDS[call.out.dtype], "row_tiles": row_tiles, "col_tiles": col_tiles,
    }  # fmt: skip
    tensors = {"x": words, "x_scales": scales, "weight": call.blocks, "bias": call.bias, "out": call.out}
    grid = (col_tiles * (1 if has_few_rows else row_tiles), 1, 1)
    how = variants[0 if has_few_rows else -1], function, grid, tile.threads, GgufLinear
    return [rounding, Launch.over(*how, tensors, numbers, count * cols * columns)]
