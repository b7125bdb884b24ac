"""Arithmetic of floats. A product and its sum are computed in float64 and rounded again, so that one in 2^29 may differ
from one rounding; MUFU's functions are rounded to float32, where the hardware's are some bits less exact."""

from __future__ import annotations

import numpy as np

from . import operations
from .code import Instruction
from .operations import COMPARISONS, JOINS, compared, define, flushed, joined, operation, put, put_truths, single
from .warps import F16, F32, F64, I8, I32, I64, U8, U16, U32, U64, Array, Warps

_UNORDERED = " ".join(f"{how}U" for how in COMPARISONS.split()) + " NAN NUM"
_OF_FLOATS = f"{COMPARISONS} {_UNORDERED} FTZ"

define("FADD FADD32I", "ff", lambda x, y: x + y, "FTZ SAT")
define("FMUL FMUL32I", "ff", lambda x, y: x * y, "FTZ SAT")
define("FSEL", "ffp", lambda x, y, first: np.where(first, x, y), "FTZ")
define("FMNMX", "ffp", lambda x, y, least: np.where(least, np.fmin(x, y), np.fmax(x, y)), "FTZ")


@operation("FFMA", "FFMA32I", options="FTZ SAT RM RP RZ")
def _ffma(m: Warps, i: Instruction) -> None:
    x, y, z = (single(m, i, o) for o in i.operands[1:])
    product = np.multiply(x, y, dtype=F64)
    total = product + z
    way = _way(i)
    if way == "RN":
        put(m, i, total.astype(F32))
        return
    part = total - product
    lost = (product - (total - part)) + (z - part)
    put(m, i, rounded(total, lost, way))


def _way(i: Instruction) -> str:
    """The rounding of an instruction: to nearest, or in a direction."""
    return next((option for option in i.options if option in ("RM", "RP", "RZ")), "RN")


def rounded(total: Array, lost: Array, way: str) -> Array:
    """float32 of float64 and what it lacks."""
    found = np.asarray(total).astype(F32)
    if way == "RN":
        return found
    is_above = (found > total) | ((found == total) & (lost < 0))
    is_below = (found < total) | ((found == total) & (lost > 0))
    down = np.where(is_above, np.nextafter(found, F32(-np.inf)), found)
    up = np.where(is_below, np.nextafter(found, F32(np.inf)), found)
    return {"RM": down, "RP": up, "RZ": np.where(total > 0, down, up)}[way]


@operation("FSETP", options=f"{_OF_FLOATS} {JOINS}")
def _fsetp(m: Warps, i: Instruction) -> None:
    put_truths(m, i, compared(i, *(single(m, i, o) for o in i.operands[2:4])))


@operation("FSET", options=f"{_OF_FLOATS} {JOINS}")
def _fset(m: Warps, i: Instruction) -> None:
    d, a, b, given = i.operands
    how = next(option for option in i.options if option in JOINS.split())
    m.put(d, operations.everywhere(joined(how, compared(i, single(m, i, a), single(m, i, b)), m.truth(given))))


@operation("FCMP", options=_OF_FLOATS)
def _fcmp(m: Warps, i: Instruction) -> None:
    d, a, b, c = i.operands
    m.put(d, np.where(compared(i, single(m, i, c), F32(0)), m.single(a), m.single(b)))


_FUNCTIONS = {
    "EX2": np.exp2, "LG2": np.log2, "RCP": lambda x: F32(1) / x, "RSQ": lambda x: F32(1) / np.sqrt(x),
    "SQRT": np.sqrt, "SIN": np.sin, "COS": np.cos,
}  # fmt: skip


@operation("MUFU", options=" ".join(_FUNCTIONS))
def _mufu(m: Warps, i: Instruction) -> None:
    (function,) = i.options
    m.put(i.operands[0], flushed(_FUNCTIONS[function](flushed(m.single(i.operands[1])))).astype(F32))


@operation("FCHK.DIVIDE", "FCHK")
def _fchk(m: Warps, i: Instruction) -> None:
    """Whether a / b needs more than a reciprocal and Newton's method: exponents at their ends."""
    d, *both = i.operands
    of_x, of_y = ((m.raw(o) >> U32(23) & U32(0xFF)).astype(I32) for o in both)
    gap = of_x - of_y
    m.put(d, (of_x < 30) | (of_x > 250) | (of_y < 5) | (of_y > 250) | (gap > 120) | (gap < -120))


def of_half(bits: Array) -> Array:
    return np.asarray(bits & U32(0xFFFF)).astype(U16).view(F16).astype(F32)


@operation("F2F.F16.F32")
def _to_half(m: Warps, i: Instruction) -> None:
    m.put(i.operands[0], np.asarray(m.single(i.operands[1])).astype(F16).view(U16).astype(U32))


@operation("F2F.F32.F16", "F2F.F32.F16.RZ")
def _from_half(m: Warps, i: Instruction) -> None:
    m.put(i.operands[0], of_half(m.unsigned(i.operands[1])))


@operation("HADD2.F32")
def _hadd2(m: Warps, i: Instruction) -> None:
    d, *both = i.operands
    x, y = (-of_half(m.part(o)) if o.negative else of_half(m.part(o)) for o in both)
    m.put(d, x + y)


@operation("I2F", options="F32 S8 U8 S32 U32 U64 RM RP RZ")
def _i2f(m: Warps, i: Instruction) -> None:
    d, a = i.operands
    kinds = set(i.options)
    if "U64" in kinds:
        exact = m.wide(a).astype(np.longdouble)
    elif kinds & {"S8", "U8"}:
        exact = np.asarray(m.part(a, "B0")).astype(U8).view(I8 if "S8" in kinds else U8).astype(F64)
    else:
        exact = np.asarray(m.unsigned(a)).view(U32 if "U32" in kinds else I32).astype(F64)
    m.put(d, rounded(exact, F64(0), _way(i)))


@operation("F2I", options="FTZ NTZ F32 TRUNC S32 U32 U64")
def _f2i(m: Warps, i: Instruction) -> None:
    d, a = i.operands
    whole = (np.trunc if "TRUNC" in i.options else np.rint)(np.asarray(m.single(a)).astype(F64))
    whole = np.where(np.isnan(whole), 0.0, whole)
    if "U64" in i.options:
        m.put_wide(d, np.clip(whole, 0.0, 2.0**64 - 2048).astype(U64))
    elif "U32" in i.options:
        m.put(d, np.clip(whole, 0.0, 2.0**32 - 1).astype(U32))
    else:
        m.put(d, np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(I64).astype(I32))
