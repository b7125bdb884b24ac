"""Arithmetic of integers, bits and predicates. What no manual says was found by kernels whose results are known."""

from __future__ import annotations

import itertools

import numpy as np

from .code import Instruction, Operand
from .operations import COMPARISONS, JOINS, compared, define, everywhere, joined, operation, put_truths
from .warps import BITS, F64, I8, I32, I64, LOW, U8, U32, U64, Array, Warps, lanes_of

define("MOV MOV32I RRO", "u", lambda x: x, "SINCOS EX2")  # RRO prepares a number for MUFU, as only MUFU reads it
define("SEL", "uup", lambda x, y, first: np.where(first, x, y))
define("IMNMX", "ssp", lambda x, y, least: np.where(least, np.minimum(x, y), np.maximum(x, y)), "U32")
define("VMNMX.UD.U32.U32.MX.MAX", "uuu", lambda x, y, z: np.maximum(np.maximum(x, y), z))
define("IABS", "i", np.abs)
define("I2I.S32.S32", "u", lambda x: x)
define("POPC", "u", lambda x: lanes_of(np.asarray(x)).sum(-1).astype(U32))
define("BREV", "u", lambda x: _reversed(x))


def _predicates(operands: list[Operand]) -> tuple[list[Operand], list[Operand]]:
    """Return the predicates at the front, and the rest."""
    first = list(itertools.takewhile(lambda o: o.kind in ("P", "UP"), operands))
    return first, operands[len(first) :]


def _sum(m: Warps, terms: list[Operand], carry: Array | None) -> Array:
    """The sum has more than 32 bits. With a carry, a minus is an inversion."""
    total: Array = U64(0) if carry is None else np.asarray(carry).astype(U64)
    for o in terms:
        value = m.raw(o)
        if o.negative or o.inverted:
            value = ~value
            total = total + U64(carry is None and o.negative)
        total = total + value.astype(U64)
    return total


@operation("IADD", "IADD32I", options="X")
def _iadd(m: Warps, i: Instruction) -> None:
    d, *terms = i.operands
    if not i.options and not d.parts:
        m.put(d, m.unsigned(terms[0]) + m.unsigned(terms[1]))
        return
    was_zero = m.is_zero[m.rows] | ("X" not in i.options)
    m.put_sum(d, _sum(m, terms, m.carry[m.rows] if "X" in i.options else None))
    if "CC" in d.parts:
        m.is_zero[m.rows] &= was_zero | ~m.active()


@operation("IADD3", options="X")
def _iadd3(m: Warps, i: Instruction) -> None:
    d, *rest = i.operands
    outs, (a, b, c, *ins) = _predicates(rest)
    if not i.options and not outs and not d.parts:
        m.put(d, m.unsigned(a) + m.unsigned(b) + m.unsigned(c))
        return
    given: Array | None = None
    if "X" in i.options:
        given = sum((np.asarray(m.truth(o)).astype(U32) for o in ins), U32(0)) if ins else m.carry[m.rows]
    carry = m.put_sum(d, _sum(m, [a, b, c], given))
    for least, out in enumerate(outs):
        m.put(out, carry > least)


@operation("IADD3.RS")
def _shifted_sum(m: Warps, i: Instruction) -> None:
    """The first sum has 33 bits."""
    d, a, b, c = i.operands
    low = m.unsigned(a).astype(U64) + m.unsigned(b).astype(U64)
    m.put(d, (low >> U64(16)).astype(U32) + m.unsigned(c))


@operation("ISCADD", "ISCADD32I")
def _iscadd(m: Warps, i: Instruction) -> None:
    d, a, b, shift = i.operands
    assert "CC" not in d.parts or not (a.negative or b.negative)
    x = m.raw(a) << U32(shift.number)
    m.put_sum(d, (U32(0) - x if a.negative else x).astype(U64) + m.unsigned(b).astype(U64))


@operation("LEA", options="HI X SX32")
def _lea(m: Warps, i: Instruction) -> None:
    """A sum with a shifted number, or with the upper half of one of 64 bits: of a third operand and the first, or with
    SX32 of the first and its sign."""
    d, *rest = i.operands
    if d.kind in ("P", "UP"):  # LEA.HI.X P, R, ... of sm_61: whether the address is one
        d, *rest = rest
    outs, rest = _predicates(rest)
    ins = [o for o in rest if o.kind in ("P", "UP")]
    a, b, *others = (o for o in rest if o.kind not in ("P", "UP"))
    shift = U64(others[-1].number if others and others[-1].kind == "i" else 0)
    carry: Array = U32(0)
    if "HI" in i.options:
        if "SX32" in i.options:
            both = np.asarray(m.raw(a)).view(I32).astype(I64).view(U64)
        else:
            both = m.raw(a).astype(U64) | m.raw(others[0]).astype(U64) << U64(32)
        x = ((both << shift) >> U64(32)).astype(U32)
        if "X" in i.options:
            carry = np.asarray(m.truth(ins[0])).astype(U32) if ins else m.carry[m.rows]
    else:
        x = m.raw(a) << U32(shift)
        x = U32(0) - x if a.negative else x
    more = m.put_sum(d, x.astype(U64) + m.unsigned(b).astype(U64) + carry)
    for out in outs:
        m.put(out, more != 0)


@operation("XMAD", options="PSL CBCC CLO CHI CSFU MRG S16 U16")
def _xmad(m: Warps, i: Instruction) -> None:
    """A product of halves and a sum."""
    d, a, b, _ = i.operands
    signs = [option == "S16" for option in i.options if option in ("S16", "U16")] or [False, False]
    x, y = (_half(m, o, is_signed) for o, is_signed in zip((a, b), signs))
    product, whole = x * y, m.raw(b)
    found = (product << U32(16) if "PSL" in i.options else product) + _summand(m, i, x, y)
    m.put(d, found & U32(0xFFFF) | whole << U32(16) if "MRG" in i.options else found)


def _half(m: Warps, o: Operand, is_signed: bool) -> Array:
    value = m.part(o, "H0")
    return np.where(value & U32(0x8000), value | U32(0xFFFF0000), value) if is_signed else value


def _summand(m: Warps, i: Instruction, x: Array, y: Array) -> Array:
    """That of XMAD, as its options say."""
    _, a, b, c = i.operands
    z, whole = m.raw(c), m.raw(b)
    if "CLO" in i.options:
        return z & U32(0xFFFF)
    if "CHI" in i.options:
        return z >> U32(16)
    if "CBCC" in i.options:
        return z + (whole << U32(16))
    if "CSFU" in i.options:  # of upper halves: IADD3.RS adds the products with the lower ones as if without sign
        assert a.parts == b.parts == ("H1",)
        for signed, other in ((x, whole), (y, m.raw(a))):
            z = z - np.where((signed >> U32(31) != 0) & (other & U32(0xFFFF) != 0), U32(0x10000), U32(0))
    return z


@operation("IMAD", options="MOV U32 SHL IADD X")
def _imad(m: Warps, i: Instruction) -> None:
    d, a, b, c, *ins = i.operands
    found = m.unsigned(c) if a.is_zero and b.is_zero else m.unsigned(a) * m.unsigned(b) + m.unsigned(c)
    m.put(d, found + np.asarray(m.truth(ins[0])).astype(U32) if "X" in i.options else found)


@operation("IMAD.WIDE", "IMAD.WIDE.U32", "IMAD.HI", "IMAD.HI.U32")
def _wide_product(m: Warps, i: Instruction) -> None:
    """The summand has 64 bits in all of them."""
    d, *rest = i.operands
    outs, (a, b, c) = _predicates(rest)
    assert not any(o.negative for o in (a, b, c))
    if "U32" in i.options:
        product = m.raw(a).astype(U64) * m.raw(b).astype(U64)
    else:
        product = (np.asarray(m.signed(a)).astype(I64) * np.asarray(m.signed(b)).astype(I64)).view(U64)
    total = product + m.wide(c)
    for out in outs:
        m.put(out, total < product)
    if "HI" in i.options:
        m.put(d, (total >> U64(32)).astype(U32))
    else:
        m.put_wide(d, total)


@operation("IMUL", "IMUL32I", "IMUL.U32.U32", "IMUL.U32.U32.HI", "IMUL.HI.U32.U32")
def _imul(m: Warps, i: Instruction) -> None:
    d, a, b = i.operands
    product = m.unsigned(a).astype(U64) * m.unsigned(b).astype(U64)
    m.put(d, (product >> U64(32) if "HI" in i.options else product & LOW).astype(U32))


@operation("IDP.4A.S8.S8", "IDP.4A.U8.S8", "IDP.4A.U8.U8")
def _idp(m: Warps, i: Instruction) -> None:
    """Four products of bytes."""
    d, a, b, c = i.operands
    bytes_of = []
    for o, kind in zip((a, b), i.options[1:]):
        words = np.ascontiguousarray(np.broadcast_to(m.raw(o), m.shape))
        bytes_of.append(words.view(I8 if kind == "S8" else U8).reshape(*m.shape, 4).astype(I32))
    m.put(d, (bytes_of[0] * bytes_of[1]).sum(-1, dtype=I32).view(U32) + m.unsigned(c))


def _pair(m: Warps, i: Instruction, *operands: Operand) -> tuple[Array, Array]:
    x, y = (np.asarray(m.unsigned(o)) for o in operands)
    return (x, y) if "U32" in i.options else (x.view(I32), y.view(I32))


@operation("ISETP", options=f"{COMPARISONS} {JOINS} U32 X EX")
def _isetp(m: Warps, i: Instruction) -> None:
    """With X or EX of the upper halves of 64 bits: those below are in the flags, or compared before."""
    x, y = _pair(m, i, *i.operands[2:4])
    if "EX" in i.options:
        found = _with_low(x, y, i.options[0], m.truth(i.operands[5]))
    elif "X" in i.options:
        carry, is_zero = m.carry[m.rows] != 0, m.is_zero[m.rows]
        of_low = {"EQ": is_zero, "NE": ~is_zero, "GE": carry, "LT": ~carry}
        found = _with_low(x, y, i.options[0], of_low[i.options[0]])
    else:
        found = compared(i, x, y)
    put_truths(m, i, found)


def _with_low(x: Array, y: Array, how: str, of_low: Array) -> Array:
    if how == "NE":
        return (x != y) | of_low
    strict = {"GE": np.greater, "GT": np.greater, "LE": np.less, "LT": np.less}.get(how)
    found = (x == y) & of_low
    return found if strict is None else found | strict(x, y)


@operation("ISET", options=f"{COMPARISONS} AND U32")
def _iset(m: Warps, i: Instruction) -> None:
    d, a, b, given = i.operands
    m.put(d, everywhere(compared(i, *_pair(m, i, a, b)) & m.truth(given)))


@operation("ICMP", options=f"{COMPARISONS} U32")
def _icmp(m: Warps, i: Instruction) -> None:
    d, a, b, c = i.operands
    z, _ = _pair(m, i, c, c)
    m.put(d, np.where(compared(i, z, z.dtype.type(0)), m.unsigned(a), m.unsigned(b)))


@operation("PSETP", options=JOINS)
def _psetp(m: Warps, i: Instruction) -> None:
    d, other, a, b, c = i.operands
    found, given = joined(i.options[0], m.truth(a), m.truth(b)), m.truth(c)
    m.put(d, joined(i.options[1], found, given))
    m.put(other, joined(i.options[1], ~found, given))


@operation("PSET", options=f"{JOINS} BF")
def _pset(m: Warps, i: Instruction) -> None:
    assert "BF" not in i.options
    d, a, b, c = i.operands
    m.put(d, everywhere(joined(i.options[1], joined(i.options[0], m.truth(a), m.truth(b)), m.truth(c))))


def _shifted(value: Array, by: Array, way: str, width: int = 32) -> Array:
    """A shift in which a number of bits beyond the width leaves nothing, or the sign."""
    by = np.asarray(np.minimum(by, U32(width))).astype(value.dtype)
    return np.left_shift(value, by) if way == "L" else np.right_shift(value, by)


define("SHL", "uu", lambda x, by: _shifted(x, by, "L"))
define("SHR", "su", lambda x, by: _shifted(x, by, "R"), "U32")


@operation("SHF", options="L R W HI U32 S32 U64 S64")
def _shf(m: Warps, i: Instruction) -> None:
    """One half of 64 bits c:a that are shifted."""
    d, a, by, c = i.operands
    count, is_signed = m.unsigned(by), bool({"S32", "S64"} & set(i.options))
    if "W" in i.options:
        count = count & U32(63 if {"U64", "S64"} & set(i.options) else 31)
    high = np.asarray(m.unsigned(c))
    if "R" in i.options and "HI" in i.options:
        m.put(d, _shifted(high.view(I32) if is_signed else high, count, "R"))
        return
    both = np.asarray(m.unsigned(a).astype(U64) | high.astype(U64) << U64(32))
    both = np.asarray(_shifted(both.view(I64) if is_signed else both, count, i.options[0], 64)).view(U64)
    is_high = "L" in i.options and ("HI" in i.options or m.kernel.arch < 70)
    m.put(d, (both >> U64(32) if is_high else both & LOW).astype(U32))


@operation("LOP", "LOP32I", options=f"{JOINS} PASS_B NZ")
def _lop(m: Warps, i: Instruction) -> None:
    *outs, a, b = i.operands
    x, y = m.unsigned(a), m.unsigned(b)
    found = y if "PASS_B" in i.options else joined(i.options[0], x, y)
    m.put(outs[-1], found)
    if "NZ" in i.options:
        m.put(outs[0], found != 0)


def _by_table(table: int, a: Array, b: Array, c: Array) -> Array:
    """Each bit of the result is bit 4 a + 2 b + c of the table."""
    inverts = table.bit_count() > 4
    chosen = table ^ 0xFF if inverts else table
    found: Array = np.asarray(a).dtype.type(0)
    for n in range(8):
        if chosen >> n & 1:
            found = found | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return ~found if inverts else found


@operation("LOP3", options="LUT NZ")
def _lop3(m: Warps, i: Instruction) -> None:
    outs, (d, a, b, c, table, *given) = _predicates(list(i.operands))
    found = _by_table(table.number, m.unsigned(a), m.unsigned(b), m.unsigned(c))
    m.put(d, found)
    for out in outs:
        m.put(out, (found != 0) | (m.truth(given[0]) if given else False))


@operation("PLOP3", options="LUT")
def _plop3(m: Warps, i: Instruction) -> None:
    d, other, *sources = i.operands
    given = [m.truth(o) for o in sources[:3]]
    for out, table in zip((d, other), sources[3:]):
        m.put(out, _by_table(table.number, *given))


def _reversed(value: Array) -> Array:
    return (lanes_of(np.asarray(value)) * BITS[::-1]).sum(-1).astype(U32)


@operation("BFE", options="U32 BREV")
def _bfe(m: Warps, i: Instruction) -> None:
    """Some bits of a number, with the sign that the last of them is where there is no U32."""
    d, a, which = i.operands
    at, width = which.number & 0xFF, which.number >> 8 & 0xFF
    assert 0 < width <= 32 - at
    value = (_reversed(m.unsigned(a)) if "BREV" in i.options else m.unsigned(a)) << U32(32 - at - width)
    m.put(d, _shifted(value if "U32" in i.options else value.view(I32), U32(32 - width), "R"))


@operation("BFI")
def _bfi(m: Warps, i: Instruction) -> None:
    d, a, which, c = i.operands
    at, width = which.number & 0xFF, which.number >> 8 & 0xFF
    chosen = U32((1 << width) - 1 << at & 0xFFFFFFFF)
    m.put(d, m.unsigned(a) << U32(at) & chosen | m.unsigned(c) & ~chosen)


@operation("FLO", options="U32 SH")
def _flo(m: Warps, i: Instruction) -> None:
    """The highest bit that is set; all bits of 0."""
    d, a = i.operands
    first = np.frexp(np.asarray(m.unsigned(a)).astype(F64))[1].astype(I32) - 1
    m.put(d, np.where(first < 0, -1, 31 - first if "SH" in i.options else first).astype(I32))
