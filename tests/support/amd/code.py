"""The kernels in a code object for gfx9, gfx10 or gfx11: their descriptors, and their instructions as llvm-objdump
prints them."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pascal_attn_core.fused.code.amd_code import arch_of

from .. import elf

OBJDUMP = shutil.which("llvm-objdump-16")
# Scalar registers by name: the numbers that their encodings have.
VCC, M0, NULL, EXEC = 106, 124, 125, 126
_NAMED = {
    "vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "null": NULL,
    "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1,
}  # fmt: skip
_INLINE_FLOATS = {
    sign + text: struct.unpack("<I", struct.pack("<f", float(sign + text)))[0]
    for sign in ("", "-")
    for text in ("0.5", "1.0", "2.0", "4.0")
} | {"0.15915494": 0x3E22F983}
# Registers that are set before the first instruction: bits of kernel_code_properties in their order, and how many
# scalar registers each fills (LLVM, "User Guide for AMDGPU Backend", Kernel Descriptor).
_USER_REGISTERS = (
    ("scratch", 4), ("packet", 2), ("queue", 2), ("arguments", 2), ("dispatch_id", 2), ("flat_scratch", 2),
    ("scratch_size", 1),
)  # fmt: skip
_EXACT_FLOATS = 0xF0  # round to nearest even, denormal numbers kept


class Operand(NamedTuple):
    """An operand: ``kind`` "v" or "s" and a register's number, "c" and a constant's bits, or "off"; count: of registers
    from that one on; extended: a part of it, with its sign."""

    kind: str
    number: int = 0
    negative: bool = False
    absolute: bool = False
    count: int = 1
    extended: bool = False


class Instruction(NamedTuple):
    """One instruction. target: of a branch, the place of the next instruction in the kernel's list; both: of a
    ``v_dual``, the two that are executed at once (gfx11)."""

    name: str
    operands: tuple[Operand, ...]
    options: dict[str, str]
    target: int
    text: str
    both: tuple[Instruction, ...] = ()

    @property
    def offset(self) -> int:
        """The number of bytes that is added to an address."""
        return int(self.options.get("offset", "0"))


@dataclass(frozen=True)
class MachineKernel:
    """A kernel of a code object.

    Attributes:
        lds_bytes, scratch_bytes: of a block, and of a lane.
        user_registers: what the scalar registers hold at first, and how many each takes.
        lanes: of a wave, 64 or 32.
    """

    name: str
    lds_bytes: int
    scratch_bytes: int
    user_registers: tuple[tuple[str, int], ...]
    lanes: int
    instructions: tuple[Instruction, ...]


@functools.lru_cache(maxsize=8)
def kernels(code: bytes) -> dict[str, MachineKernel]:
    """The kernels of a code object by name.

    Raises:
        NotImplementedError: bytes that are no instruction of the architecture that the code object names, or upper
            halves of registers.
    """
    symbols = dict(_symbols(code))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.co"
        path.write_bytes(code)
        command = [OBJDUMP or "llvm-objdump-16", "-d", f"--mcpu={arch_of(code)}", str(path)]
        text = subprocess.check_output(command, text=True)
    halves = _UPPER_HALVES.search(text) if arch_of(code).startswith("gfx11") else None
    if halves:
        raise NotImplementedError(halves[0].strip())
    found = {}
    for part in re.split(r"\n(?=[0-9a-f]{16} <)", text)[1:]:
        head, _, body = part.partition("\n")
        name = re.findall(r"<(\w+)>", head)[0]
        at = symbols[f"{name}.kd"]
        found[name] = _kernel(name, code[at : at + 64], _instructions(body, int(head[:16], 16)))
    return found


def _kernel(name: str, descriptor: bytes, instructions: tuple[Instruction, ...]) -> MachineKernel:
    lds_bytes, scratch_bytes = struct.unpack_from("<II", descriptor)
    rsrc1, rsrc2, properties = struct.unpack_from("<IIH", descriptor, 48)
    assert rsrc1 >> 12 & 0xFF == _EXACT_FLOATS, f"{name}: floating point mode {rsrc1 >> 12 & 0xFF:#x}"
    registers = [of for bit, of in enumerate(_USER_REGISTERS) if properties >> bit & 1]
    unused = (rsrc2 >> 1 & 0x1F) - sum(size for _, size in registers)
    registers += [("unused", unused)] if unused else []  # gfx1102 sets 16 scalar registers at least
    axes = sum(rsrc2 >> bit & 1 for bit in (7, 8, 9))
    assert unused == 0 or sum(size for _, size in registers) + axes == 16, f"{name}: {registers}, and another count"
    registers += [(axis, 1) for bit, axis in ((7, "x"), (8, "y"), (9, "z")) if rsrc2 >> bit & 1]
    lanes = 32 if properties >> 10 & 1 else 64
    return MachineKernel(name, lds_bytes, scratch_bytes, tuple(registers), lanes, instructions)


def _symbols(code: bytes) -> Iterator[tuple[str, int]]:
    """(name, place in the file) of all dynamic symbols."""
    sections = elf.sections(code)
    named = {section.name: section.content for section in sections}
    for name, _, _, at, address in struct.iter_unpack("<IBBHQ8x", named[".dynsym"]):
        text = named[".dynstr"][name:].partition(b"\0")[0]
        yield text.decode(), sections[at].at + address - sections[at].address


_LINE = re.compile(r"\s(\w+)(.*?)\s*// ([0-9A-F]+): [^<]*(?:<\w+(?:\+0x([0-9a-f]+))?>)?")
_OPTION = re.compile(r"\b(\w+):(swizzle\([^)]*\)|\[[\d,]*\]|-?\w+)(?![\d:]*\])")
_FLAGS = re.compile(r"\b(glc|slc|dlc)\b")  # which caches a transfer passes by
_KNOWN_OPTIONS = {
    "offset", "offset0", "offset1", "op_sel_hi", "neg_lo", "dst_sel", "dst_unused", "src0_sel", "src1_sel"
}  # fmt: skip
_SELECTING = ("v_fma_mix_f32", "v_permlanex16_b32")
_NO_OPERANDS = (
    "s_nop", "s_endpgm", "s_barrier", "s_clause", "s_inst_prefetch", "s_waitcnt_depctr", "s_code_end", "s_delay_alu",
    "s_sendmsg",
)  # fmt: skip
# What gfx11 calls by other names than gfx9 and gfx10.
_SIZES = {
    "b8": "byte", "u8": "ubyte", "b16": "short", "u16": "ushort",
    **{f"b{32 * words}": "dword" + f"x{words}" * (words > 1) for words in (1, 2, 3, 4, 8, 16)},
}  # fmt: skip
_RENAMED = (
    ("ds_load", "ds_read"), ("ds_store", "ds_write"), ("_2addr_stride64_", "2st64_"), ("_2addr_", "2_"),
    ("_not1_", "n2_"), ("dot2acc", "dot2c"), ("s_set_inst_prefetch_distance", "s_inst_prefetch"), ("v_dual_", "v_"),
)  # fmt: skip
_SIZED = re.compile(r"((?:s|flat|global)_(?:load|store)_)([bu]\d+)$")
# In this form gfx11 takes registers from 128 on for the upper halves of those below.
_UPPER_HALVES = re.compile(r"\sv_(?!dot)\w+16\w*_e32 .*\bv(12[89]|1[3-9]\d|2\d\d)\b.*")


def _instructions(body: str, start: int) -> tuple[Instruction, ...]:
    unknown = [line for line in body.splitlines() if "//" in line and not _LINE.match(line)]
    if unknown:
        raise NotImplementedError(unknown[0].strip())
    lines = [found for found in map(_LINE.match, body.splitlines()) if found]
    places = {int(line[3], 16): place for place, line in enumerate(lines)}
    return tuple(
        instruction(line[1], line[2].strip(), places[start + int(line[4] or "0", 16)] if "branch" in line[1] else 0)
        for line in lines
    )


def instruction(name: str, rest: str, target: int) -> Instruction:
    """As llvm-objdump writes it: its name, and what follows.

    Raises:
        NotImplementedError: an option that is not known here.
    """
    text = f"{name} {rest}"
    if "::" in rest:
        both = tuple(_half(*half.strip().split(" ", 1)) for half in text.split("::"))
        return Instruction("v_dual", (), {}, 0, text, both)
    for gfx11, own in _RENAMED:
        name = name.replace(gfx11, own)
    name = _SIZED.sub(lambda found: found[1] + _SIZES[found[2]], name)
    if name == "s_waitcnt":
        return Instruction(name, (), dict(re.findall(r"(\w+)\((\d+)\)", rest)), 0, text)
    if name == "s_waitcnt_vscnt":
        return Instruction(name, (), {"vscnt": str(int(rest.removeprefix("null,"), 0))}, 0, text)
    if "branch" in name or name in _NO_OPERANDS:
        return Instruction(name, (), {}, target, text)
    options = dict(_OPTION.findall(rest))
    if not options.keys() <= _KNOWN_OPTIONS | {"op_sel"} or ("op_sel" in options and name not in _SELECTING):
        raise NotImplementedError(text)
    words = _FLAGS.sub("", _OPTION.sub("", rest)).split(",")
    return Instruction(
        re.sub(r"_e(32|64)$", "", name),
        tuple(_operand(word.strip()) for word in words if word.strip()),
        options,
        0,
        text,
    )


def _half(name: str, rest: str) -> Instruction:
    """One of two that are executed at once; where it chooses, it is by VCC, which it does not name."""
    return instruction(name, f"{rest}, vcc_lo" if "cndmask" in name else rest, 0)


def _operand(text: str) -> Operand:
    if text.startswith("sext("):
        return _operand(text[5:-1])._replace(extended=True)
    found = re.fullmatch(r"(-?)(\|?)([vs])(?:(\d+)|\[(\d+):(\d+)\])\|?", text)
    if found:
        count = int(found[6]) - int(found[5]) + 1 if found[5] else 1
        return Operand(found[3], int(found[4] or found[5]), bool(found[1]), bool(found[2]), count)
    if text == "off":
        return Operand("off")
    if text in _NAMED:
        return Operand("s", _NAMED[text])
    if text == "src_shared_base":  # of addresses that flat instructions would take for shared memory
        return Operand("c", 1 << 48)
    return Operand("c", _INLINE_FLOATS[text] if text in _INLINE_FLOATS else int(text, 0))
