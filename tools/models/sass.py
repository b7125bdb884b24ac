"""Reads the machine code of cubins as far as counting and timing need it: the kind of each instruction and where a
branch goes. From Volta on also what memory it moves, and what the compiler wrote beside it for the scheduler.

Maxwell and Pascal (sm_50 ... sm_62) have words of 64 bits, the first of every four scheduling information. Volta and
its successors up to Hopper (sm_70 ... sm_90) have 128 bits for an instruction.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Kind of instruction -> (mask, value) of the upper 32 bits of its word.
_MAXWELL = {
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
# The lowest nine bits of an instruction of Volta say what it does, the next three where its operands come from. Kinds
# that are not here are "other", integer or logical work.
_VOLTA = {
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
_WORD, _SIZE = 8, 16  # bytes of an instruction of Maxwell, of Volta
_RECIPROCAL = 4  # of what MUFU computes
Loop = tuple[int, int]  # addresses of its first instruction and of the branch back


@dataclass(frozen=True)
class Instruction:
    """One instruction; Maxwell's have the first four fields.

    Attributes:
        address: in bytes.
        kind: a key of the tables above, or "other".
        target: of a branch, else None; guarded: whether it runs under a condition.
        lane_bytes: that a load or store moves for each lane; of LDSM those of its register results.
        stall: cycles until this warp may issue the next one.
        writes: scoreboard (0 ... 5) that is clear once the result is there, 7: none.
        reads: scoreboard that is clear once the operands have been read; waits: mask of scoreboards that must be clear.
    """

    address: int
    kind: str
    target: int | None = None
    guarded: bool = False
    lane_bytes: int = 0
    stall: int = 1
    writes: int = 7
    reads: int = 7
    waits: int = 0

    @property
    def is_product(self) -> bool:
        return self.kind.startswith("HMMA")


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


def arch(cubin: bytes) -> int:
    """75 for sm_75."""
    flags: int = struct.unpack_from("<I", cubin, 0x30)[0]
    return flags & 0xFF if flags & 0xFF >= 50 else flags >> 8 & 0xFF  # the second from CUDA 13 on


def maxwell(code: bytes) -> list[Instruction]:
    """Instructions of one function for Maxwell or Pascal."""
    words = struct.unpack(f"<{len(code) // _WORD}Q", code)
    return [_maxwell(i * _WORD, word) for i, word in enumerate(words) if i % 4]


def _maxwell(address: int, word: int) -> Instruction:
    high = word >> 32
    kind = next((k for k, forms in _MAXWELL.items() if any(high & mask == value for mask, value in forms)), "other")
    target = None
    if kind == "BRA":
        distance = word >> 20 & 0xFFFFFF
        target = address + _WORD + (distance - (1 << 24) if distance >> 23 else distance)
    return Instruction(address, kind, target, (word >> 16 & 0xF) != 7)


def volta(code: bytes, number: int = 75) -> list[Instruction]:
    """Instructions of one function for Volta, Turing, Ampere or Hopper; ``number``: 75 is sm_75."""
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    return [_volta(i * _SIZE, low, high, number) for i, (low, high) in enumerate(zip(words[::2], words[1::2]))]


def _volta(address: int, low: int, high: int, number: int) -> Instruction:
    kind = _VOLTA.get(low & 0x1FF, "other")
    if kind == "HMMA.884" and number >= 80:  # an addition of integers there
        kind = "other"
    guarded, target, lane_bytes = (low >> 12 & 15) != 7, None, 0
    if kind == "BRA":
        distance, sign = low >> 32, 31
        if number >= 90:  # its lowest eight bits stand apart, and it counts words of four bytes
            distance, sign = (low >> 34 | (high & 0x3FFFF) << 30) << 10 | (low >> 16 & 0xFF) << 2, 57
        target = address + _SIZE + (distance - (2 << sign) if distance >> sign else distance)
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
    board = {"writes": control >> 5 & 7, "reads": control >> 8 & 7, "waits": control >> 11 & 63}
    return Instruction(address, kind, target, guarded, lane_bytes, stall=control & 15, **board)


def loops(code: list[Instruction]) -> list[Loop]:
    """Every loop, in the order of the branches back."""
    return [(x.target, x.address) for x in code if x.target is not None and x.target < x.address]


def within(code: list[Instruction], loop: Loop) -> list[Instruction]:
    """Instructions of a loop, with those of the loops in it."""
    return [x for x in code if loop[0] <= x.address <= loop[1]]


def product_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Each innermost loop with tensor core products, in the order of the code."""
    spans = {span for span in loops(code) if any(x.is_product for x in within(code, span))}
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [within(code, span) for span in sorted(inner)]


_PART_OF_EVERY_ROUND = ("LDSM", "LDS", "STS", "BAR")


def usual_path(
    loop: list[Instruction], *, masked: bool = False, rises: bool = False, at_edge: bool = False
) -> list[Instruction]:
    """One round of a loop as most go. What a branch can skip is skipped, unless it loads a tile, multiplies, meets
    others or takes many exponentials: a softcap (exponentials and reciprocals) is rare.

    Args:
        masked: the tile's mask is looked at, whose bits lanes exchange or turn into predicates many at a time.
        rises: each row of the warp has a new maximum, to which its sums are scaled.
        at_edge: the band or the end of the keys cuts the tile.
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
        taken = _is_usual(skipped, masked) or {"rises": rises, "edge": at_edge}.get(_rare(skipped), False)
        if not (x.guarded and taken):
            i = index[x.target]
    return path


def _rare(part: list[Instruction]) -> str:
    """Say what happens where a part is not skipped: the sums of rows are scaled, or scores at an edge forbidden."""
    number = Counter(x.kind for x in part)
    if any(x.is_product for x in part) or number["RCP"] > 1 or number["R2P"] or number["SHFL"]:
        return ""
    if number["MUFU"] and number["FMUL"] > 4 * number["MUFU"]:
        return "rises"
    return "edge" if number["other"] + number["IMAD"] > 40 and not number["MUFU"] else ""


def _is_usual(part: Iterable[Instruction], masked: bool) -> bool:
    part = list(part)
    if masked and any(x.kind in ("R2P", "SHFL") for x in part):
        return True
    if any(x.kind == "RCP" for x in part):
        return False
    if any(x.is_product or x.kind in _PART_OF_EVERY_ROUND for x in part):
        return True
    return any(x.kind == "LDG" and x.lane_bytes == 16 for x in part) or sum(x.kind == "MUFU" for x in part) > 8
