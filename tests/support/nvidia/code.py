"""The kernels in a cubin for sm_50 to sm_75: what its ELF file says of them, and their instructions as nvdisasm prints
them."""

from __future__ import annotations

import functools
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .. import elf

_OWN = Path(sys.executable).with_name("nvdisasm")  # where ``make nvdisasm`` puts it
NVDISASM = os.environ.get("NVDISASM") or (str(_OWN) if _OWN.exists() else None)
WANTED = "needs nvdisasm 12 to read machine code: make nvdisasm, or NVDISASM=PATH"
# The registers that hold nothing: RZ, URZ, PT, UPT.
_PARAM_CBANK = 0x0A  # attribute of a kernel
ZERO = {"R": 255, "UR": 63, "P": 7, "UP": 7}


class Operand(NamedTuple):
    """An operand.

    Attributes:
        kind: "R", "UR", "P", "UP" or "B" and a register's number; "i" and bits; "c" and the number of a bank of
            constants; "m": memory; "s": a special register; "l": a label.
        parts: which part of it is meant, and other words behind it.
        base, scale, uniform, offset: of "c" and "m", what an address is the sum of: a register times a scale, a uniform
            register, and a number of bytes.
        name: of "s" and "l".
    """

    kind: str
    number: int = 0
    negative: bool = False
    inverted: bool = False
    absolute: bool = False
    parts: tuple[str, ...] = ()
    base: Operand | None = None
    scale: int = 1
    uniform: Operand | None = None
    offset: int = 0
    name: str = ""

    @property
    def is_zero(self) -> bool:
        """Whether it is the register that holds nothing."""
        return self.number == ZERO.get(self.kind)

    def after(self, count: int = 1) -> Operand:
        """The register so many numbers further on; behind the one that holds nothing there is none."""
        return self if self.is_zero else self._replace(number=self.number + count)


class Instruction(NamedTuple):
    """One instruction. name: without its options; uniform: executed once for all lanes of a warp."""

    address: int
    guard: Operand | None
    name: str
    options: tuple[str, ...]
    operands: tuple[Operand, ...]
    uniform: bool
    text: str


@dataclass(frozen=True)
class MachineKernel:
    """A kernel of a cubin.

    Attributes:
        arch: 50 to 75.
        labels: the place in ``instructions`` that each names.
        constants: the content of banks by their numbers, without the one of the parameters.
        shared_bytes: of a block, beside those that a launch asks for.
        params_at, params_bytes: where in bank 0 the parameters are.
    """

    name: str
    arch: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    constants: dict[int, bytes]
    shared_bytes: int
    params_at: int
    params_bytes: int

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """Address of an instruction -> its place in the list."""
        return {i.address: place for place, i in enumerate(self.instructions)}

    def place(self, address: int) -> int:
        """That of the first instruction from an address on: up to sm_61 a word of scheduling may come before it."""
        return self.places[address if address in self.places else address + 8]


@functools.lru_cache(maxsize=8)
def kernels(code: bytes) -> dict[str, MachineKernel]:
    """The kernels of a cubin by name.

    Raises:
        NotImplementedError: a line, an operand or an architecture that is not known here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        text = subprocess.check_output([NVDISASM or "nvdisasm", "-c", str(path)], text=True)
    (flags,) = struct.unpack_from("<I", code, 48)
    arch = flags & 0xFF
    if not 50 <= arch <= 75:
        raise NotImplementedError(f"sm_{arch}")
    sections = {section.name: section for section in elf.sections(code)}
    bodies = (body.split("\n", 1) for body in re.split(r"\n//-+ \.text\.", text)[1:])
    return {name: _kernel(name, arch, body, sections) for name, body in ((h.split(" ", 1)[0], b) for h, b in bodies)}


def _kernel(name: str, arch: int, body: str, sections: dict[str, elf.Section]) -> MachineKernel:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        if label := re.match(r"(\S+):$", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"\s+/\*[0-9a-f]+\*/\s+[^/\s]", line):
            instructions.append(instruction(line, arch))
    banks = (re.fullmatch(rf"\.nv\.constant([1-9])(\.{re.escape(name)})?", key) for key in sections)
    constants = {int(bank[1]): sections[bank[0]].content for bank in banks if bank}
    shared = sections.get(f".nv.shared.{name}")
    info = elf.attributes(sections[f".nv.info.{name}"].content)
    params = struct.unpack_from("<HH", info[_PARAM_CBANK], 4)  # where they lie in bank 0, and their size
    return MachineKernel(name, arch, tuple(instructions), labels, constants, shared.size if shared else 0, *params)


_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+\{?\s*(?:@(!?)(U?P[\dT]) )?\s*([A-Z]\w*(?:\.\w+)*)(.*?)\s*;?\s*\}?\s*$")
_REGISTER = re.compile(r"(UR|UP|R|P|B)(\d+|Z|T)((?:\.\w+)*)$")
_CONSTANT = re.compile(r"c\[(0x\w+)\]\[([^]]+)\]((?:\.\w+)*)$")
_ADDRESS = re.compile(r"(?:(U?R)(\d+|Z)((?:\.\w+)*))?(?:\+?UR(\d+))?(?:\+?(-?0x[0-9a-f]+))?$")
_ONCE = ("S2UR", "R2UR", "VOTEU")  # besides those that begin with U


def instruction(line: str, arch: int) -> Instruction:
    """A line of nvdisasm's.

    Raises:
        NotImplementedError: it is none.
    """
    found = _LINE.match(line)
    if found is None:
        raise NotImplementedError(line.strip())
    address, negated, guard, full, rest = found.groups()
    rest = re.sub(r"\(\*.*?\*\)|\.reuse", "", rest).replace("] [", "][")
    rest = re.sub(r"(\w) +`", r"\1, `", rest)  # RET.REL.NODEC R2 `(name)
    if full == "BRX":
        rest = rest.replace(" -", ", -").lstrip(", ")
    operands = [_operand(part.strip()) for part in rest.split(",") if part.strip()]
    name, *options = full.split(".")
    if name == "IADD3" and arch < 70:  # of 20 bits, whose sign nvdisasm does not extend
        operands = [
            o._replace(number=o.number | 0xFFF00000) if (o.kind, o.number >> 19) == ("i", 1) else o for o in operands
        ]
    is_uniform = name in _ONCE or name.startswith("U")
    return Instruction(
        int(address, 16),
        None if guard is None else _operand(guard)._replace(inverted=bool(negated)),
        name[is_uniform and name not in _ONCE :],
        tuple(options),
        tuple(operands),
        is_uniform,
        line.split("*/", 1)[1].strip(" ;{}"),
    )


@functools.lru_cache(maxsize=1 << 16)
def _operand(text: str) -> Operand:
    negative = text.startswith("-") and not re.match(r"-(\d|INF|QNAN|0x)", text)
    inverted = text[0] in "~!"
    body = text[negative or inverted :]
    signs = {"negative": negative, "inverted": inverted, "absolute": body.startswith("|")}
    body = body.strip("|")
    if found := _REGISTER.match(body):
        kind, number, parts = found.groups()
        return Operand(kind, ZERO[kind] if number in "ZT" else int(number), **signs, parts=_words(parts))
    if found := _CONSTANT.match(body):
        bank, address, parts = found.groups()
        return Operand("c", int(bank, 16), **signs, parts=_words(parts), **_address(address))
    if body.startswith("["):
        return Operand("m", **_address(body.strip("[]")))
    if re.match(r"-?0x[0-9a-f]+$", body):
        return Operand("i", int(body, 16) & 0xFFFFFFFF, inverted=inverted)
    if re.match(r"[-+]?(\d|INF|QNAN)", body):
        return Operand("i", *struct.unpack("<I", struct.pack("<f", float(body.replace("QNAN", "nan")))))
    return Operand("l", name=body[2:-1]) if body.startswith("`(") else Operand("s", name=body)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").split(".")[1:])


def _address(text: str) -> dict[str, object]:
    """The fields of an operand that are an address."""
    found = _ADDRESS.match(text)
    if found is None:
        raise NotImplementedError(f"address {text}")
    kind, number, words, uniform, offset = found.groups()
    if kind == "UR":
        kind, uniform = None, number
    scale = next((int(word[1:]) for word in _words(words) if word.startswith("X")), 1)
    parts = tuple(word for word in _words(words) if not word.startswith("X"))
    base = None if kind is None else Operand(kind, ZERO[kind] if number == "Z" else int(number), parts=parts)
    of_uniform = None if uniform is None else Operand("UR", ZERO["UR"] if uniform == "Z" else int(uniform))
    return {"base": base, "scale": scale, "uniform": of_uniform, "offset": int(offset or "0", 16)}
