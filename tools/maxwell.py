"""Reads the machine code of Maxwell and Pascal cubins (sm_50 ... sm_62) as far as counting needs it: which instructions
are FFMA, IDP (dp4a), branches, memory accesses and additions to memory (RED). Words of 64 bits, the first of every four
scheduling information."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Kind of instruction -> (mask, value) of the upper 32 bits of its word.
_OPCODES = {
    "FFMA": ((0xFF800000, 0x59800000), (0xFF800000, 0x49800000), (0xFF800000, 0x51800000),
             (0xFE800000, 0x32800000), (0xFC000000, 0x0C000000)),
    "IDP": ((0xFFF80000, 0x53F80000),),
    "BRA": ((0xFFF00000, 0xE2400000),),
    "EXIT": ((0xFFF00000, 0xE3000000),),
    "LDS": ((0xFFF80000, 0xEF480000),),
    "STS": ((0xFFF80000, 0xEF580000),),
    "LDG": ((0xFFF80000, 0xEED00000),),
    "STG": ((0xFFF80000, 0xEED80000),),
    "RED": ((0xFFF80000, 0xEBF80000),),
    "BAR": ((0xFFF80000, 0xF0A80000),),
    "MUFU": ((0xFFF80000, 0x50800000),),
    "F2F": ((0xFFF80000, 0x5CA80000),),
}  # fmt: skip
_WORD = 8


@dataclass(frozen=True)
class Instruction:
    """address in bytes; kind: a key of _OPCODES or "other"; target of a branch, else None; guarded: has a predicate."""

    address: int
    kind: str
    target: int | None
    guarded: bool


def sections(cubin: bytes) -> dict[str, bytes]:
    """Function -> its machine code, from the ELF file that a cubin is."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin must be a 64-bit ELF file")
    table = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for name_at, _, _, _, offset, length in headers:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[offset : offset + length]
    return found


def decode(code: bytes) -> list[Instruction]:
    """The instructions of one function."""
    words = struct.unpack(f"<{len(code) // _WORD}Q", code)
    return [_decode_word(i * _WORD, word) for i, word in enumerate(words) if i % 4]


def _decode_word(address: int, word: int) -> Instruction:
    high = word >> 32
    kind = next((k for k, forms in _OPCODES.items() if any(high & mask == value for mask, value in forms)), "other")
    target = None
    if kind == "BRA":
        distance = word >> 20 & 0xFFFFFF
        target = address + _WORD + (distance - (1 << 24) if distance >> 23 else distance)
    return Instruction(address, kind, target, (word >> 16 & 0xF) != 7)
