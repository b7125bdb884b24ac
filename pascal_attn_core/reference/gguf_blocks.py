"""The block formats of GGUF files: how many bytes hold how many weights, and which numbers they stand for.

The definition is ``dequantize`` of the package ``gguf``, which computes in float32. Hosts use the same formulas in
float16 or in another dtype, so the dtype of the arithmetic is an argument here, and every step is rounded to it. Bits
stay in bytes: nothing is widened to 32 bits but the indices of the two formats with a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Parts(NamedTuple):
    """The weights in blocks as ``scale * code + minimum``.

    Attributes:
        scales: float ``[n, groups]``, of as many neighbouring weights each.
        codes: ``[n, weights]``, int8 or uint8; of a float table floats.
        minima: float ``[n, groups]``; None = zero.
    """

    scales: Tensor
    codes: Tensor
    minima: Tensor | None = None


Unpack = Callable[[Tensor, torch.dtype, torch.dtype], Parts]


class Format(NamedTuple):
    """One format.

    Attributes:
        weights: number of weights in a block.
        bytes: size of a block.
        unpack: gives the parts of blocks uint8 ``[n, bytes]``; the other arguments are those of :func:`expand`.
    """

    weights: int
    bytes: int
    unpack: Unpack


def expand(blocks: Tensor, name: str, dtype: torch.dtype = torch.float32, *, table: torch.dtype = torch.int8) -> Tensor:
    """The weights in blocks of a format: uint8 ``[n, bytes]`` -> float ``[n, weights]``.

    Args:
        name: a key of FORMATS.
        dtype: of the arithmetic and of the result. float32 gives what ``gguf.quants.dequantize`` gives. BF16 holds the
            numbers themselves: its result is bfloat16 in any case.
        table: of the numbers in the table of IQ4_NL and IQ4_XS. A float dtype takes part in the arithmetic: float16
            scales times a float32 table give float32.
    """
    scales, codes, minima = FORMATS[name].unpack(blocks, dtype, table)
    weights = scales[..., None] * codes.unflatten(1, (scales.shape[1], -1))
    return (weights if minima is None else weights + minima[..., None]).flatten(1)


def _half(blocks: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """The float16 at a byte of each block, ``[n, 1]``."""
    return blocks[:, at : at + 2].view(torch.float16).to(dtype)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """The fields of so many bits in each byte, lowest first: ``[..., w]`` -> ``[..., 8 / bits, w]``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed[..., None, :] >> shifts[:, None] & ((1 << bits) - 1)


def _fields_in_order(packed: Tensor, bits: int) -> Tensor:
    """The fields of the first byte, then those of the second: ``[n, w]`` -> ``[n, 8 w / bits]``."""
    return _fields(packed[..., None], bits).flatten(1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """``codes - zero`` as int8."""
    return (codes - zero).view(torch.int8)  # bytes wrap around


# ---- blocks of 32 ----------------------------------------------------------------------------------------------------


def _q8_0(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    return Parts(_half(blocks, 0, dtype), blocks[:, 2:].view(torch.int8))


def _of_32(zero: int = 0, *, has_minimum: bool = False, has_high_bits: bool = False) -> Unpack:
    """The formats Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum, high bits, nibbles."""

    def unpack(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
        codes = _fields(blocks[:, -16:], 4).flatten(1)
        if has_high_bits:
            codes = codes | _fields_in_order(blocks[:, -20:-16], 1) << 4
        minima = _half(blocks, 2, dtype) if has_minimum else None
        return Parts(_half(blocks, 0, dtype), _signed(codes, zero) if zero else codes, minima)

    return unpack


def _iq4_nl(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    return Parts(_half(blocks, 0, dtype), _looked_up(blocks[:, 2:], table).flatten(1))


def _looked_up(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in the table that nibbles stand for, ``[..., w]`` -> ``[..., 2, w]``."""
    codes = _fields(packed, 4)
    table = torch.tensor(_TABLE, dtype=dtype, device=packed.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


# ---- blocks of 256 ---------------------------------------------------------------------------------------------------


def _q2_k(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    scales = _half(blocks, 80, dtype) * (blocks[:, :16] & 15)
    minima = _half(blocks, 82, dtype) * (blocks[:, :16] >> 4)
    return Parts(scales, _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2).flatten(1), -minima)


def _q3_k(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    low, high = _fields(blocks[:, 96:104], 4).flatten(1), _fields(blocks[:, 104:108], 2).flatten(1)
    codes = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2).flatten(1)
    codes = codes | _fields(blocks[:, :32], 1).flatten(1) << 2
    return Parts(_half(blocks, 108, dtype) * _signed(low | high << 4, 32), _signed(codes, 4))


def _scales_and_minima(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, ``[n, 8]`` each: six bits, those of the last four in two pieces."""
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, low & 15 | first >> 2 & 48], dim=1)
    minima = torch.cat([second & 63, low >> 4 | second >> 2 & 48], dim=1)
    return _half(blocks, 0, dtype) * scales, -(_half(blocks, 2, dtype) * minima)


def _q4_k(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    scales, minima = _scales_and_minima(blocks, dtype)
    return Parts(scales, _fields(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1), minima)


def _q5_k(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    scales, minima = _scales_and_minima(blocks, dtype)
    codes = _fields(blocks[:, 48:].unflatten(1, (4, 32)), 4).flatten(1) | _fields(blocks[:, 16:48], 1).flatten(1) << 4
    return Parts(scales, codes, minima)


def _q6_k(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    codes = _fields(low, 4).flatten(1) | _fields(high, 2).flatten(1) << 4
    return Parts(_half(blocks, 208, dtype) * blocks[:, 192:208].view(torch.int8), _signed(codes, 32))


def _iq4_xs(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    scales = _fields_in_order(blocks[:, 4:8], 4) | _fields_in_order(blocks[:, 2:4], 2) << 4
    codes = _looked_up(blocks[:, 8:].unflatten(1, (8, 16)), table).flatten(1)
    return Parts(_half(blocks, 0, dtype) * _signed(scales, 32), codes)


def _bf16(blocks: Tensor, dtype: torch.dtype, table: torch.dtype) -> Parts:
    return Parts(blocks.new_ones((1, 1), dtype=torch.bfloat16), blocks.view(torch.bfloat16))


FORMATS = {
    "Q4_0": Format(32, 18, _of_32(zero=8)),
    "Q4_1": Format(32, 20, _of_32(has_minimum=True)),
    "Q5_0": Format(32, 22, _of_32(zero=16, has_high_bits=True)),
    "Q5_1": Format(32, 24, _of_32(has_minimum=True, has_high_bits=True)),
    "Q8_0": Format(32, 34, _q8_0),
    "Q2_K": Format(256, 84, _q2_k),
    "Q3_K": Format(256, 110, _q3_k),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
    "IQ4_NL": Format(32, 18, _iq4_nl),
    "IQ4_XS": Format(256, 136, _iq4_xs),
    "BF16": Format(1, 2, _bf16),
}
