"""The product of rows of x in 8 bits with the weights of a GGUF file, by its definition, in PyTorch.

    x[m, k] ~ a[m, k / 32] code[m, k]      a = max(max|x| / 127, 1e-30) of 32 columns, code = round(x / a)
    W[n, k] = d[n, k / 32] q[n, k] + e[n, k / 32]                  as the file has it
    y = fma(float(sum of code q) d, a, y), then y = fma(e, a sum of codes, y)       for each 32 columns, in their order

The sums are whole numbers. Where a scale holds for 16 columns, both products of 32 are added as the kernel does it:
``v = fma(t0, d0, -M (d0 + d1))`` and ``v = fma(t1, d1, v)`` with ``M = 1.5 2^23`` and t = M + sum. The error is at most
0.75 d1 / UNITS[format]. In Q6_K blocks 1 and 2 of four are exchanged, since the same bytes hold both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.gguf_blocks import Parts
from ...reference.int8_rows import quantize_rows

MAGIC = 12582912.0
WIDTH = 32  # columns with one scale of x
UNITS = {"Q6_K": 4.0, "Q3_K": 32.0}  # the kernel's codes are q times this


class RoundedRows(NamedTuple):
    """Rows of x in 8 bits: codes int8 ``[K / 32, M, 32]``, scales float32 ``[K / 32, M, 1]``."""

    codes: Tensor
    scales: Tensor


def round_rows(x: Tensor) -> RoundedRows:
    """Rows ``[M, K]`` of any float dtype in 8 bits. 32 columns with a NaN or an infinity have that as their scale, and
    codes of zero: products with them are NaN."""
    blocks = x.unflatten(1, (-1, WIDTH)).transpose(0, 1)
    codes, scales, _ = quantize_rows(blocks.reshape(-1, WIDTH))
    return RoundedRows(codes.view(blocks.shape), scales.view(*blocks.shape[:2], 1))


def product(x: RoundedRows, weight: Parts, name: str, lanes: int = 1) -> Tensor:
    """The product float32 ``[M, N]`` with a weight of the format ``name``; each step is rounded once.

    Args:
        weight: parts in float32 of N rows: scales ``[N, K / 32]`` or ``[N, K / 16]``, codes ``[N, K]``.
        lanes: a power of two, among which pairs of blocks are dealt out, and whose sums are added two by two.
    """
    count, rows, _ = x.codes.shape
    codes = weight.codes.view(torch.int8).unflatten(1, (count, -1, WIDTH * count // weight.scales.shape[1]))
    scales = weight.scales.unflatten(1, (count, -1)) / UNITS.get(name, 1.0)
    ys = [weight.scales.new_zeros(rows, weight.codes.shape[0]) for _ in range(lanes)]
    for place, block in enumerate(sorted(range(count), key=lambda block: _place(block, name))):
        y = ys[place // 2 % lanes]
        halves = x.codes[block].unflatten(1, codes.shape[2:]).unbind(1)
        pairs = zip(halves, codes[:, block].unbind(1))
        sums = [torch._int_mm(mine.contiguous(), its.t()).float() * UNITS.get(name, 1.0) for mine, its in pairs]
        value, a = _scaled(sums, scales[:, block].unbind(1)), x.scales[block]
        y = fma(value, a, y)
        if weight.minima is not None:
            total = x.codes[block].sum(dim=1, keepdim=True).float()
            y = fma(weight.minima[:, block], a * total, y)
        ys[place // 2 % lanes] = y
    while len(ys) > 1:
        ys = [one + other for one, other in zip(ys, ys[len(ys) // 2 :])]
    return ys[0]


def _scaled(sums: list[Tensor], scales: tuple[Tensor, ...]) -> Tensor:
    if len(sums) == 1:
        return sums[0] * scales[0]
    first = fma(sums[0] + MAGIC, scales[0], (scales[0] + scales[1]) * -MAGIC)
    return fma(sums[1] + MAGIC, scales[1], first)


def _place(block: int, name: str) -> int:
    """When a block's turn is."""
    return block & ~3 | (block & 1) << 1 | block >> 1 & 1 if name == "Q6_K" else block


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """``a b + c`` in float32, rounded once: the product of two float32 is exact in float64."""
    return (a.double() * b + c).float()
