"""Rows of a matrix as 8-bit integers with a scale each, after an optional rotation of the channels.

``x ~ scale * codes``, ``scale = max(max|x|, tiny) / 127``, ``codes = round(x / scale)`` to nearest, ties to even: an
element errs by at most ``scale / 2``. One large channel makes the scale of its whole row large. A rotation by a
Hadamard matrix spreads it over a group of channels, and since the matrix is orthogonal, rotating both factors of a
product changes nothing but the rounding: the regular Hadamard matrices of ConvRot (arXiv 2512.03673), of size 4**k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SCALE = 1e-30  # of a row of zeros
# Larger groups spread an outlier further, but fewer widths are a multiple of them.
ROTATIONS = (256, 64, 16)
# Elements that are held in float32: on a CPU what stays in its caches.
_ROWS_AT_ONCE = {"cpu": 1 << 18}
_MOST_ROWS_AT_ONCE = 1 << 22


class Int8Matrix(NamedTuple):
    """A float matrix ``[rows, columns]`` in 8 bits.

    Attributes:
        codes: int8 ``[rows, columns]``.
        scales: float32 ``[rows]``, or ``[1]`` where one holds for all rows.
        rotation: size of the groups of columns that were rotated before rounding; 0 = none.
    """

    codes: Tensor
    scales: Tensor
    rotation: int = 0

    def float(self) -> Tensor:
        """The matrix that this stands for, float32 ``[rows, columns]``."""
        # The rotation is its own inverse.
        return rotate(self.codes.float() * self.scales[:, None], self.rotation)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Int8Matrix:
        """The matrix on a device."""
        codes, scales = (t.to(device, non_blocking=non_blocking) for t in self[:2])
        return Int8Matrix(codes, scales, self.rotation)

    def copy_(self, other: Int8Matrix) -> None:
        """Take the numbers of another one with the same rotation."""
        for mine, its in zip(self[:2], other[:2]):
            mine.copy_(its)


def check_rotation(rotation: int, columns: int) -> None:
    """Raise ValueError unless groups of ``rotation`` columns can be rotated: 0, or a power of 4 that divides them."""
    is_power = rotation >= 4 and rotation & (rotation - 1) == 0 and rotation.bit_length() % 2 == 1
    if rotation and (not is_power or columns % rotation):
        raise ValueError(f"rotation must be 0, or a power of 4 that divides the {columns} columns, got {rotation}")


def rotate(x: Tensor, rotation: int) -> Tensor:
    """Multiply each group of ``rotation`` columns of ``x`` ``[..., columns]`` by the regular Hadamard matrix of that
    size. It is ``H4 x H4 x ...`` with ``H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1)) / 2``,
    symmetric and orthogonal; 0 changes nothing. The digits of a column's number in base 4 are processed one by one, the
    lowest first, as in the GPU kernel.

    Raises:
        ValueError: see :func:`check_rotation`.
    """
    check_rotation(rotation, x.shape[-1])
    step = 1
    while step < rotation:
        a, b, c, d = x.unflatten(-1, (-1, 4, step)).unbind(-2)
        total = (a + b) + (c + d)
        x = torch.stack((total - 2 * d, total - 2 * c, total - 2 * b, total - 2 * a), dim=-2).mul_(0.5).flatten(-3)
        step *= 4
    return x


def quantize_rows(x: Tensor, rotation: int = 0) -> Int8Matrix:
    """``x`` ``[rows, columns]``, float32, float16 or bfloat16, in 8 bits with a scale per row. A row with a NaN or an
    infinity has that as its scale, and codes of zero: products with it are NaN.

    Extra memory: some 64 MiB beside the result, whatever the size; on a CPU 4.

    Raises:
        ValueError: another shape, or see :func:`check_rotation`.
    """
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"x must be [rows, columns] with a column at least, got {list(x.shape)}")
    check_rotation(rotation, x.shape[-1])
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    step = max(1, _ROWS_AT_ONCE.get(x.device.type, _MOST_ROWS_AT_ONCE) // x.shape[1])
    for rows in range(0, x.shape[0], step):
        part = rotate(x[rows : rows + step].float(), rotation)
        scale = part.abs().amax(dim=-1, keepdim=True)
        # On CUDA a division by a Python number is a product with its reciprocal, which is another number.
        scale = scale.div_(scale.new_full((), 127.0)).clamp_(min=LEAST_SCALE)
        codes[rows : rows + step] = (part / scale).round_().nan_to_num_(0.0)
        scales[rows : rows + step] = scale[:, 0]
    return Int8Matrix(codes, scales, rotation)
