"""From a linear layer in 8-bit integers to kernel launches: which kernel, which grid, which parameters. Nothing is
launched or compiled here."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.int8_rows import Int8Matrix
from ..code.compilation import DtypeVariant
from ..code.kinds import CHUNK_WORDS, INT8_LINEAR, QUANTIZE, TILES
from ..code.params import Linear, QuantizeRows
from . import Launch

# What a call may be -> (number in the kernel, whether the weight has gates).
ACTIVATIONS = {
    "none": (0, False),
    "gelu": (1, False),
    "gelu_tanh": (2, False),
    "silu": (3, False),
    "geglu": (1, True),
    "geglu_tanh": (2, True),
    "swiglu": (3, True),
}
_BIASES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_SLICE_BYTES = 64 << 20  # of x in 8 bits
_MOST_WARPS, _PIECE, _KEPT = 8, 256, 4  # MOST_WARPS, PIECE and KEPT of the text
_MANY_ROWS = 512  # that fill a device with one warp for several pieces of each
# Rows of x up to which the kernels for few of them take a call: beyond, the weight is read too often.
_FEW, _SOME = 4, 32
# Of a small tile in units of a large one's: it reads the factors twice as often.
_SMALL_SPEED = 0.8


class LinearCall(NamedTuple):
    """``out = activation(x W^T + bias)``, x and W in 8 bits. Tensors on one device.

    Attributes:
        x: ``[M, K]``, float32, float16 or bfloat16, last stride 1, any row stride.
        weight: ``[N, K]``, contiguous; for gated activations ``[2 N, K]``, values first, then gates.
        bias: ``[N]`` or ``[2 N]``, float32, float16 or bfloat16, contiguous; or None.
        activation: a key of ACTIVATIONS.
        out: ``[M, N]``, float32, float16 or bfloat16, contiguous; it is written.
    """

    x: Tensor
    weight: Int8Matrix
    bias: Tensor | None
    activation: str
    out: Tensor


@functools.lru_cache(maxsize=64)
def variants_of(x: torch.dtype, out: torch.dtype) -> tuple[DtypeVariant, DtypeVariant]:
    """The compilations that round rows of x, and that multiply."""
    of_x, of_out = (DtypeVariant(INT8_LINEAR, str(dtype).removeprefix("torch.")) for dtype in (x, out))
    return of_x, of_out


def product_of(rows: int, cols: int, num_sms: int) -> str:
    """The function that multiplies ``rows`` of x by a weight of ``cols`` rows."""
    if rows <= _SOME:
        return "pa_linear_few" if rows <= _FEW else "pa_linear_some"

    def time(name: str) -> int:
        tile = TILES[name]
        return -(-(-(-rows // tile.rows) * -(-cols // tile.cols)) // num_sms) * tile.rows * tile.cols

    return "pa_linear" if time("pa_linear") * _SMALL_SPEED < time("pa_linear_small") else "pa_linear_small"


def linear_launches(call: LinearCall, num_sms: int, product: str | None = None) -> list[Launch]:
    """The launches that write ``call.out``. Extra memory: x in 8 bits and a scale for each of its rows, at most 64 MiB:
    more rows go through in slices. A weight that begins at no multiple of four bytes is copied. ``product`` multiplies;
    None = the function of :func:`product_of`."""
    rows, columns = call.x.shape
    if not call.out.numel():
        return []
    words = -(-columns // (4 * CHUNK_WORDS)) * CHUNK_WORDS
    tile_rows = TILES["pa_linear"].rows
    most = max(1, _SLICE_BYTES // (4 * words + 4) // tile_rows) * tile_rows
    codes = call.x.new_empty((min(rows, most), words), dtype=torch.int32)
    scales = call.x.new_empty(codes.shape[0], dtype=torch.float32)
    product = product or product_of(min(rows, most), call.weight.codes.shape[0], num_sms)
    launches = []
    for first in range(0, rows, most):
        part = call._replace(x=call.x[first : first + most], out=call.out[first : first + most])
        launches += [_quantize(part, codes, scales), _multiply(part, codes, scales, product)]
    return launches


def _quantize(call: LinearCall, codes: Tensor, scales: Tensor) -> Launch:
    """The launch that rounds ``call.x`` to codes ``[rows, row_words]``, as words, and scales ``[rows]``."""
    x, (variant, _) = call.x, variants_of(call.x.dtype, call.out.dtype)
    rows, columns = x.shape
    row_stride = x.stride(0) if rows > 1 else 0
    pieces = _KEPT if rows >= _MANY_ROWS else 1  # of a warp
    warps = max(1, min(_MOST_WARPS, -(-columns // (pieces * _PIECE))))
    numbers = {
        "row_stride": row_stride, "columns": columns, "row_words": codes.shape[1], "rotation": call.weight.rotation,
        "warps": warps, "in_fours": int(_aligned(x, 4 * x.element_size()) and row_stride % 4 == 0),
    }  # fmt: skip
    tensors = {"x": x, "words": codes, "scales": scales}
    return Launch.over(variant, QUANTIZE, (rows, 1, 1), 32 * warps, QuantizeRows, tensors, numbers)


def _multiply(call: LinearCall, codes: Tensor, scales: Tensor, product: str) -> Launch:
    _, variant = variants_of(call.x.dtype, call.out.dtype)
    tile, weight, (rows, cols) = TILES[product], call.weight, call.out.shape
    weight_codes = weight.codes if _aligned(weight.codes, 4) else weight.codes.clone()
    activation, is_gated = ACTIVATIONS[call.activation]
    columns = weight_codes.shape[1]
    row_tiles = -(-rows // tile.rows)
    col_tiles = -(-cols // (tile.cols // 2 if is_gated else tile.cols))
    wide_weight = columns % 16 == 0 and _aligned(weight_codes, 16)
    wide_out = cols % 4 == 0 and _aligned(call.out, 4 * call.out.element_size())
    tensors = {
        "x": codes, "x_scales": scales, "weight": weight_codes, "scales": weight.scales, "bias": call.bias,
        "out": call.out,
    }  # fmt: skip
    numbers = {
        "rows": rows, "cols": cols, "words": columns // 4, "x_words": codes.shape[1],
        "scale_step": int(weight.scales.numel() > 1),
        "bias_kind": 0 if call.bias is None else _BIASES[call.bias.dtype],
        "activation": activation, "is_gated": int(is_gated), "in_fours": int(wide_weight) | int(wide_out) << 1,
        "row_tiles": row_tiles, "col_tiles": col_tiles,
    }  # fmt: skip
    grid = (col_tiles, row_tiles, 1) if tile.has_few_rows else (row_tiles * col_tiles, 1, 1)
    how = variant, product, grid, tile.threads, Linear
    return Launch.over(*how, tensors, numbers, rows * weight_codes.numel())


def _aligned(tensor: Tensor, count: int) -> bool:
    """Whether a tensor begins at a multiple of this many bytes."""
    return tensor.data_ptr() % count == 0
