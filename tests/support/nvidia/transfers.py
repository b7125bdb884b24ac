"""Transfers between registers and memory, or between lanes, and what is read of other places."""

from __future__ import annotations

import numpy as np

from .code import Instruction, Operand
from .operations import define, operation
from .warps import BITS, F32, I32, I64, LANES, POISON, U32, U64, Array, Warps, bits_of

_SIZES = {"U8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}
_HINTS = "CG E U LU SYS GPU STRONG CONSTANT CI CV WT"  # which memory, and which caches
_OPTIONS = f"{' '.join(_SIZES)} {_HINTS}"


def _size(i: Instruction) -> int:
    return next((_SIZES[option] for option in i.options if option in _SIZES), 4)


def _put_words(m: Warps, d: Operand, words: Array) -> None:
    """``[warps, 32, words]`` into as many registers."""
    assert d.is_zero or d.number % words.shape[-1] == 0
    for n in range(words.shape[-1]):
        m.put(d.after(n), words[..., n])


def _words_of(m: Warps, o: Operand, size: int) -> Array:
    """``[lanes, words]`` of as many registers, in the active lanes."""
    words = [np.broadcast_to(m.raw(o.after(n)), m.shape) for n in range(max(1, size // 4))]
    return np.stack(words, -1)[m.active()]


def _addresses(m: Warps, o: Operand, size: int) -> Array:
    """The addresses of the active lanes, uint64."""
    at: Array = U64(o.offset & (1 << 64) - 1)
    if o.base is not None:
        is_short = "U32" in o.base.parts
        at = at + (m.raw(o.base).astype(U64) if is_short else m.wide(o.base))
    if o.uniform is not None:
        at = at + m.wide(o.uniform)
    found = np.broadcast_to(at, m.shape)[m.active()]
    assert not np.bitwise_or.reduce(found) & U64(size - 1), f"{size} bytes, not aligned"
    return found


@operation("LDG", "LD", options=_OPTIONS)
def _load(m: Warps, i: Instruction) -> None:
    d, source, *_ = i.operands
    size = _size(i)
    found = np.zeros((*m.shape, max(1, size // 4)), U32)
    found[m.active()] = m.memory.read(_addresses(m, source, size), size)
    _put_words(m, d, found)


@operation("STG", "ST", options=_OPTIONS)
def _store(m: Warps, i: Instruction) -> None:
    target, source, *_ = i.operands
    size = _size(i)
    m.memory.write(_addresses(m, target, size), _words_of(m, source, size), size)


@operation("ATOMG", "ATOM", "RED", options="E STRONG GPU SYS ADD F32 FTZ RN")
def _atom(m: Warps, i: Instruction) -> None:
    """A sum in memory, of one lane after the other."""
    assert "ADD" in i.options
    *outs, target, value = i.operands
    lanes, dtype = m.active(), F32 if "F32" in i.options else U32
    old = np.zeros(m.shape, U32)
    before = []
    for at, number in zip(_addresses(m, target, 4), np.broadcast_to(m.unsigned(value), m.shape)[lanes]):
        known = m.memory.read(np.array([at]), 4)
        m.memory.write(np.array([at]), (known.view(dtype) + number.view(dtype)).view(U32), 4)
        before.append(known[0, 0])
    old[lanes] = before
    for out in outs:
        if out.kind == "R":
            m.put(out, old)


def shared_places(m: Warps, o: Operand, size: int) -> Array:
    """Which pieces of so many bytes the lanes mean; those that are not active the block's first."""
    at: Array = U32(o.offset & 0xFFFFFFFF)
    if o.base is not None:
        at = at + m.raw(o.base) * U32(o.scale)
    if o.uniform is not None:
        at = at + m.raw(o.uniform)
    at = np.where(m.active(), at, U32(0))
    assert not int(np.bitwise_or.reduce(at, axis=None)) & size - 1, f"{size} bytes, not aligned"
    most = int(at.max())
    assert most + size <= m.shared_bytes, f"{most} + {size} bytes of {m.shared_bytes} of shared memory"
    return (at + m.shared_base[m.rows]) // size


def read_shared(m: Warps, places: Array, words: int) -> Array:
    """``[warps, lanes, words]``. Of several words one must have been written: ptxas reads 16 bytes and uses four."""
    was_written = m.written.reshape(-1, words)[places].any(-1)
    assert (was_written | (m.mask is not None and ~m.mask)).all(), "shared memory that nothing wrote"
    return m.shared.reshape(-1, words)[places]


@operation("LDS", options="U 32 64 128")
def _lds(m: Warps, i: Instruction) -> None:
    d, source = i.operands
    size = _size(i)
    _put_words(m, d, read_shared(m, shared_places(m, source, size), size // 4))


@operation("STS", options="U 64 128")
def _sts(m: Warps, i: Instruction) -> None:
    target, source = i.operands
    size = _size(i)
    places = shared_places(m, target, size)[m.active()]
    m.shared.reshape(-1, size // 4)[places] = _words_of(m, source, size)
    m.written.reshape(-1, size // 4)[places] = True


def _local_places(m: Warps, o: Operand, size: int) -> tuple[Array, Array, Array]:
    """Warps, lanes and words of the active lanes."""
    at = np.broadcast_to((U32(0) if o.base is None else m.raw(o.base)) + U32(o.offset & 0xFFFFFFFF), m.shape)
    at = at[m.active()]
    assert not (at & U32(size - 1)).any(), f"{size} bytes, not aligned"
    warps, lanes = np.nonzero(m.active())
    return m.cohort.index[warps][:, None], lanes[:, None], (at >> U32(2))[:, None].astype(I64) + np.arange(size // 4)


@operation("LDL", options="64 128 LU")
def _ldl(m: Warps, i: Instruction) -> None:
    d, source = i.operands
    size = _size(i)
    found = np.zeros((*m.shape, size // 4), U32)
    found[m.active()] = m.local[_local_places(m, source, size)]
    _put_words(m, d, found)


@operation("STL", options="S16 64 128")
def _stl(m: Warps, i: Instruction) -> None:
    target, source = i.operands
    size = max(4, _size(i))  # of a word with 16 bits the upper half is never read
    m.local[_local_places(m, target, size)] = _words_of(m, source, size)


@operation("S2R", "S2UR", "CS2R.32")
def _s2r(m: Warps, i: Instruction) -> None:
    m.put(i.operands[0], m.special[i.operands[1].name][m.rows])


@operation("CS2R")
def _cs2r(m: Warps, i: Instruction) -> None:
    m.put_wide(i.operands[0], m.special[i.operands[1].name][m.rows].astype(U64))


@operation("LDC", options="U8 64")
def _ldc(m: Warps, i: Instruction) -> None:
    d, source = i.operands
    words = [m.constant(source, n) for n in range(max(1, _size(i) // 4))]
    if "U8" in i.options:
        words[0] = words[0] >> U32(8 * (source.offset % 4)) & U32(0xFF)
    for n, word in enumerate(words):
        m.put(d.after(n), word)


@operation("R2UR")
def _r2ur(m: Warps, i: Instruction) -> None:
    lanes, value = m.active(), m.unsigned(i.operands[1])
    first = np.take_along_axis(value, lanes.argmax(1)[:, None], 1)
    assert ((value == first) | ~lanes).all(), "not the same in all lanes"
    m.put(i.operands[0], first)


@operation("VOTE", "VOTEU", options="ANY ALL")
def _vote(m: Warps, i: Instruction) -> None:
    *ballot, out, given = i.operands
    lanes = m.active()
    chosen = lanes & m.truth(given)
    for d in ballot:
        m.put(d, bits_of(chosen)[:, None])
    m.put(out, (chosen.any(1) if "ANY" in i.options else (chosen == lanes).all(1))[:, None])


@operation("SHFL", options="BFLY IDX DOWN UP")
def _shfl(m: Warps, i: Instruction) -> None:
    is_there, d, *sources = i.operands
    value, by, bounds = (np.broadcast_to(m.unsigned(o), m.shape) for o in sources)
    segment, clamp = bounds >> U32(8) & U32(31), bounds & U32(31)
    least, most = LANES & segment, LANES & segment | clamp & ~segment
    (way,) = i.options
    other = {
        "BFLY": LANES ^ by & U32(31), "IDX": least | by & U32(31) & ~segment, "DOWN": LANES + by, "UP": LANES - by,
    }[way]  # fmt: skip
    is_inside = other.view(I32) >= most.view(I32) if way == "UP" else other <= most
    other = np.where(is_inside, other, LANES).astype(I64)
    is_active = np.take_along_axis(m.active(), other, 1)
    m.put(d, np.where(is_active, np.take_along_axis(value, other, 1), POISON))
    m.put(is_there, is_inside)


define("PRMT", "uuu", lambda x, choice, y: _permuted(np.asarray(x).astype(U64) | y.astype(U64) << U64(32), choice))


def _permuted(both: Array, choice: Array) -> Array:
    """Four of eight bytes, or their signs."""
    found: Array = U64(0)
    for n in range(4):
        nibble = (choice >> U32(4 * n) & U32(15)).astype(U64)
        byte = both >> (nibble & U64(7)) * U64(8) & U64(0xFF)
        sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
        found = found | np.where(nibble & U64(8), sign, byte) << U64(8 * n)
    return found.astype(U32)


_PREDICATES = 7


@operation("R2P")
def _r2p(m: Warps, i: Instruction) -> None:
    _, a, chosen = i.operands
    value = np.broadcast_to(m.unsigned(a), m.shape)
    for n in range(_PREDICATES):
        if chosen.number >> n & 1:
            m.put(Operand("P", n), (value & BITS[n]) != 0)


@operation("P2R")
def _p2r(m: Warps, i: Instruction) -> None:
    d, which, a, chosen = i.operands
    if which.name == "CC":
        found = m.is_zero[m.rows].astype(U32) | m.carry[m.rows] << U32(2)
    else:
        found = np.zeros(m.shape, U32)
        for n in range(_PREDICATES):
            found |= np.where(m.truth(Operand("P", n)), BITS[n], U32(0))
    m.put(d, found & U32(chosen.number) | m.unsigned(a) & ~U32(chosen.number))


@operation("B2R.RESULT")
def _b2r(m: Warps, i: Instruction) -> None:
    """Return what the block's barrier found."""
    d, out = i.operands
    found = np.broadcast_to(m.answer[m.block_of[m.rows]][:, None], m.shape)
    m.put(d, found.astype(U32))
    m.put(out, found)
