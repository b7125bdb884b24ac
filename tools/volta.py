"""Reads the machine code of Volta, Turing and newer cubins (sm_70 ... sm_90) as far as counting and timing need it: the
kind of each instruction, what memory it moves, where a branch goes, and what the compiler wrote beside it for the
scheduler. One instruction has 128 bits; :mod:`maxwell` reads those of older cards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

# The lowest nine bits of an instruction say what it does, the next three where its operands come from. Kinds that are
# not here are "other", integer or logical work.
_KINDS = {
    0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x024: "IMAD", 0x025: "IMAD", 0x026: "IDP", 0x027: "IMAD",
    0x030: "HADD2", 0x031: "HFMA2", 0x032: "HMUL2", 0x036: "HMMA.884", 0x03B: "LDSM", 0x03C: "HMMA.1688", 0x03E: "F2FP",
    0x004: "R2P", 0x006: "VOTE", 0x104: "F2F", 0x105: "F2I", 0x106: "I2F", 0x107: "FRND", 0x108: "MUFU", 0x109: "POPC",
    0x110: "F2F", 0x111: "F2I", 0x112: "I2F", 0x118: "NOP", 0x119: "S2R", 0x11D: "BAR", 0x11A: "DEPBAR",
    0x141: "BSYNC", 0x142: "BREAK", 0x144: "CALL", 0x145: "BSSY", 0x146: "YIELD", 0x147: "BRA", 0x148: "WARPSYNC",
    0x14D: "EXIT", 0x150: "RET", 0x155: "BMOV", 0x180: "LD", 0x181: "LDG", 0x182: "LDC", 0x183: "LDL", 0x184: "LDS",
    0x185: "ST", 0x186: "STG", 0x187: "STL", 0x188: "STS", 0x189: "SHFL", 0x18E: "RED", 0x192: "MEMBAR",
    0x0B9: "ULDC",
}  # fmt: skip
_BYTES = (1, 1, 2, 2, 4, 8, 16, 16)  # of a lane, by the three bits of a load's or store's size
_SIZE = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes.
        kind: of _KINDS, or "other".
        lane_bytes: that a load or store moves for each lane; of LDSM those of its register results.
        target: of a branch, else None; guarded: whether it runs under a condition.
        stall: cycles until this warp may issue the next one.
        writes: scoreboard (0 ... 5) that is clear once the result is there, 7: none.
        reads: the same for when the operands have been read; waits: mask of scoreboards that must be clear.
    """

    address: int
    kind: str
    lane_bytes: int = 0
    target: int | None = None
    guarded: bool = False
    stall: int = 1
    writes: int = 7
    reads: int = 7
    waits: int = 0

    @property
    def is_product(self) -> bool:
        return self.kind.startswith("HMMA")


def decode(code: bytes) -> list[Instruction]:
    """The instructions of one function; :func:`maxwell.sections` finds the functions of a cubin."""
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    return [_decode(i * _SIZE, low, high) for i, (low, high) in enumerate(zip(words[::2], words[1::2]))]


def _decode(address: int, low: int, high: int) -> Instruction:
    kind = _KINDS.get(low & 0x1FF, "other")
    guarded, target, lane_bytes = (low >> 12 & 15) != 7, None, 0
    if kind == "BRA":
        distance = low >> 32
        target = address + _SIZE + (distance - (1 << 32) if distance >> 31 else distance)
        guarded |= (high >> 23 & 15) != 7
    elif kind == "LDSM":
        lane_bytes = 4 << (high >> 8 & 3)
    elif kind in ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST"):
        lane_bytes = _BYTES[high >> 9 & 7]
    elif kind in ("SHFL", "RED"):
        lane_bytes = 4
    elif kind == "MUFU" and high >> 10 & 15 == _RECIPROCAL:
        kind = "RCP"
    control = high >> 41
    return Instruction(
        address, kind, lane_bytes, target, guarded,
        control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63,
    )  # fmt: skip


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Each innermost loop with tensor core products, in the order of the code."""
    index = {x.address: i for i, x in enumerate(code)}
    spans = {(index[x.target], i) for i, x in enumerate(code) if x.target in index and x.target <= x.address}
    spans = {(a, b) for a, b in spans if any(x.is_product for x in code[a : b + 1])}
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [code[a : b + 1] for a, b in sorted(inner)]


_PART_OF_EVERY_ROUND = ("LDSM", "LDS", "STS", "BAR")
_RECIPROCAL = 4  # of what MUFU computes


def usual_path(loop: list[Instruction], *, masked: bool = False) -> list[Instruction]:
    """One round of a loop as most go. What a branch can skip is skipped, unless it loads a tile, multiplies, meets
    others or takes many exponentials: masks at an edge, a maximum that rises, and a softcap (exponentials and
    reciprocals) are rare.

    Args:
        masked: the tile's mask is looked at, whose bits lanes exchange or turn into predicates many at a time.
    """
    index = {x.address: i for i, x in enumerate(loop)}
    path, i = [], 0
    while i < len(loop):
        x = loop[i]
        path.append(x)
        i += 1
        if x.target is None or x.target <= x.address or x.target not in index:
            continue
        skipped = loop[i : index[x.target]]
        if not (x.guarded and _is_usual(skipped, masked)):
            i = index[x.target]
    return path


def _is_usual(part: Iterable[Instruction], masked: bool) -> bool:
    part = list(part)
    if masked and any(x.kind in ("R2P", "SHFL") for x in part):
        return True
    if any(x.kind == "RCP" for x in part):
        return False
    if any(x.is_product or x.kind in _PART_OF_EVERY_ROUND for x in part):
        return True
    return any(x.kind == "LDG" and x.lane_bytes == 16 for x in part) or sum(x.kind == "MUFU" for x in part) > 8
