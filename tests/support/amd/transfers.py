"""Transfers of gfx9 and gfx10 between registers and memory, or between lanes by way of shared memory ("Vega"
Instruction Set Architecture, chapters 7, 8, 10 and 11; "RDNA 2" Instruction Set Architecture, the same chapters), as
far as the kernels have it."""

import re
from collections.abc import Callable

import numpy as np

from .code import Instruction, Operand
from .scalar import Operation
from .wave import I64, U32, U64, Wave

TRANSFERS: dict[str, Operation] = {}


def _scalar_load(count: int) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        destination, base, offset = i.operands
        address = wave.scalar64(base) + wave.scalar(offset) & ~3
        words = wave.memory.read(np.array([address], U64), 4 * count)
        wave.receive_scalars(destination.number, words[0].tolist())

    return run


for _words, _suffix in ((1, ""), (2, "x2"), (4, "x4"), (8, "x8"), (16, "x16")):
    TRANSFERS[f"s_load_dword{_suffix}"] = _scalar_load(_words)


def _addresses(wave: Wave, i: Instruction, lanes: np.ndarray, vector: Operand, scalar: Operand | None) -> np.ndarray:
    """Addresses of flat and global instructions, in the active lanes."""
    if scalar is None or scalar.kind == "off":
        base = wave.unsigned64(vector)
    else:
        base = wave.unsigned(vector).astype(U64) + U64(wave.scalar64(scalar))
    return (base.view(I64) + i.offset).view(U64)[lanes]


def _load(size: int, is_flat: bool) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        destination, vector, *scalar = i.operands
        lanes = wave.active
        words = wave.memory.read(_addresses(wave, i, lanes, vector, scalar[0] if scalar else None), size)
        wave.receive("vmcnt", destination.number, lanes, words, in_order=not is_flat)
        if is_flat:  # it might have been shared memory
            wave.send("lgkmcnt", in_order=False)

    return run


def _store(size: int, is_flat: bool) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        vector, source, *scalar = i.operands
        lanes = wave.active
        words = wave.vectors[source.number : source.number + max(1, size // 4), lanes].T
        wave.memory.write(_addresses(wave, i, lanes, vector, scalar[0] if scalar else None), words, size)
        wave.send(wave.store_counter, in_order=not is_flat)
        if is_flat:
            wave.send("lgkmcnt", in_order=False)

    return run


for _kind in ("flat", "global"):
    for _name, _size in (("dword", 4), ("dwordx2", 8), ("dwordx3", 12), ("dwordx4", 16), ("ubyte", 1), ("ushort", 2)):
        TRANSFERS[f"{_kind}_load_{_name}"] = _load(_size, _kind == "flat")
        TRANSFERS[f"{_kind}_store_{_name.replace('u', '')}"] = _store(_size, _kind == "flat")


_NEXT = np.arange(4)


def _words_of_lds(wave: Wave, vector: Operand, offset: int, lanes: np.ndarray, count: int) -> np.ndarray:
    """Which words of shared memory each active lane means, ``[lanes, count]``."""
    at = wave.unsigned(vector)[lanes].astype(I64) + offset
    assert np.bitwise_or.reduce(at) & 3 == 0, "shared memory at an address that is not a word's"
    first = at >> 2
    assert np.minimum.reduce(first, initial=0) == 0, "an address below shared memory"
    assert np.maximum.reduce(first, initial=-count) + count <= len(wave.lds), (
        "an address behind the block's shared memory"
    )
    return first[:, None] + _NEXT[:count]


def _lds(count: int, unit: int, run: Callable[..., None]) -> Operation:
    """``run`` is given the words of each active lane, of one place, or of two that the instruction counts in units of
    so many bytes (0: one)."""

    def of_places(wave: Wave, i: Instruction) -> None:
        at = 0 if run is _lds_write else 1
        offsets = [unit * int(i.options.get(name, "0")) for name in ("offset0", "offset1")] if unit else [i.offset]
        places = [_words_of_lds(wave, i.operands[at], offset, wave.active, count) for offset in offsets]
        run(wave, i, places)

    return of_places


def _lds_read(wave: Wave, i: Instruction, places: list[np.ndarray]) -> None:
    words = np.concatenate([wave.lds[place] for place in places], 1)
    wave.receive("lgkmcnt", i.operands[0].number, wave.active, words)


def _lds_write(wave: Wave, i: Instruction, places: list[np.ndarray]) -> None:
    for source, place in zip(i.operands[1:], places):
        wave.lds[place] = wave.vectors[source.number : source.number + place.shape[1], wave.active].T
    wave.send("lgkmcnt", writes_lds=True)


for _what, _run in (("read", _lds_read), ("write", _lds_write)):
    for _words, _bits in ((1, 32), (2, 64), (3, 96), (4, 128)):
        TRANSFERS[f"ds_{_what}_b{_bits}"] = _lds(_words, 0, _run)
    for _words, _bits in ((1, 32), (2, 64)):
        TRANSFERS[f"ds_{_what}2_b{_bits}"] = _lds(_words, 4 * _words, _run)
        TRANSFERS[f"ds_{_what}2st64_b{_bits}"] = _lds(_words, 256 * _words, _run)


def _from_lanes(wave: Wave, destination: Operand, source: Operand, other: np.ndarray) -> None:
    """Each lane receives another one's word; 0 from one that is not active."""
    lanes = wave.active
    words = np.where(wave.lanes[other], wave.unsigned(source)[other], U32(0))
    wave.receive("lgkmcnt", destination.number, lanes, words[lanes, None])


def _permute(wave: Wave, i: Instruction) -> None:
    destination, vector, source = i.operands
    _from_lanes(wave, destination, source, (wave.unsigned(vector).astype(I64) + i.offset) // 4 % wave.size)


def _swizzle(wave: Wave, i: Instruction) -> None:
    found = re.fullmatch(r"swizzle\(SWAP,(\d+)\)", i.options["offset"])
    if found is None:
        raise NotImplementedError(i.text)
    destination, source = i.operands
    _from_lanes(wave, destination, source, wave.numbers ^ int(found[1]))


TRANSFERS |= {"ds_bpermute_b32": _permute, "ds_swizzle_b32": _swizzle}
