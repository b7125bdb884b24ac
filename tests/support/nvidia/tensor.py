"""Products on tensor cores, summed in float32, and the loads of their fragments. The layouts: PTX ISA, "Matrix
fragments" of mma.m16n8k8 and m8n8k4, and ldmatrix. A step n of HMMA.884 computes the pair c[2 n], c[2 n + 1] of PTX."""

from __future__ import annotations

import numpy as np

from .code import Instruction, Operand
from .operations import operation
from .transfers import read_shared, shared_places
from .warps import F16, F32, LANES, U16, U32, Array, Warps


def _add_product(m: Warps, i: Instruction, products: Array) -> None:
    """``[registers, warps, 32]`` and the summands, into the first operand's registers."""
    d, _, _, c = i.operands
    summands = [m.raw(c.after(n)).view(F32) for n in range(len(products))]
    for n, (product, summand) in enumerate(zip(products, summands)):
        m.put(d.after(n), product + summand)


@operation("HMMA.1688.F32")
def _of_turing(m: Warps, i: Instruction) -> None:
    """16 x 8 by 8 x 8."""
    assert m.mask is None, "not all lanes"
    _, a, b, _ = i.operands
    rows = np.concatenate([_fragment(m, a), _fragment(m, a.after())], 1)
    product = rows @ _fragment(m, b).transpose(0, 2, 1)
    _add_product(m, i, product.reshape(-1, 2, 32, 2).transpose(1, 3, 0, 2).reshape(4, -1, 32))


def _fragment(m: Warps, o: Operand) -> Array:
    """8 x 8 halves of a register: lane 4 r + q holds row r, columns 2 q and 2 q + 1."""
    return np.ascontiguousarray(m.raw(o)).view(F16).astype(F32).reshape(-1, 8, 8)


_ROW = (LANES & U32(1)) + U32(4) * (LANES >> U32(4))
_GROUP = LANES >> U32(2) & U32(3)


@operation("HMMA", options="884 F32 STEP0 STEP1 STEP2 STEP3")
def _of_volta(m: Warps, i: Instruction) -> None:
    """Four products of 8 x 4 by 4 x 8: the two numbers of each lane that a step computes."""
    assert m.mask is None, "not all lanes"
    _, a, b, _ = i.operands
    assert i.options[:3] == ("884", "F32", "F32")
    assert "ROW" in a.parts
    rows = _quads(m, a).transpose(0, 2, 1, 3, 4).reshape(-1, 4, 8, 4)  # [warps, group, row, k]
    order = (0, 2, 4, 1, 3) if "COL" in b.parts else (0, 2, 3, 1, 4)
    product = rows @ _quads(m, b).transpose(order).reshape(-1, 4, 4, 8)  # by [warps, group, k, column]
    step = int(i.options[3].removeprefix("STEP"))
    row, column = _ROW + U32(2 * (step & 1)), (LANES & U32(2)) + U32(4 * (step >> 1))
    _add_product(m, i, np.stack([product[:, _GROUP, row, column + U32(n)] for n in range(2)]))


def _quads(m: Warps, o: Operand) -> Array:
    """``[warps, lane / 16, group, lane % 4, 4]`` halves of two registers."""
    words = np.stack([m.raw(o), m.raw(o.after())], -1)
    return words.view(F16).astype(F32).reshape(-1, 2, 4, 4, 4)


@operation("LDSM", options="16 M88 MT88 2 4")
def _ldsm(m: Warps, i: Instruction) -> None:
    """Matrices of 8 x 8 halves, whose rows the lanes name, eight for each."""
    assert m.mask is None, "not all lanes"
    d, source = i.operands
    rows = shared_places(m, source, 16)
    count = next((int(option) for option in i.options if option in ("2", "4")), 1)
    found = [read_shared(m, rows[:, 8 * n : 8 * n + 8], 4).view(U16) for n in range(count)]
    for n, halves in enumerate(found):  # [warps, 8, 8]
        halves = halves.transpose(0, 2, 1) if "MT88" in i.options else halves
        m.put(d.after(n), np.ascontiguousarray(halves).reshape(len(rows), -1).view(U32))
