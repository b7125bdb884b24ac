"""Code objects of AMD's compilers: ELF files whose header and metadata name the architecture that they are for."""

from __future__ import annotations

import struct
from typing import Any

# EF_AMDGPU_MACH of the header's flags: LLVM's "User Guide for AMDGPU Backend", table of these values.
_MACH = {
    "gfx900": 0x2C, "gfx902": 0x2D, "gfx904": 0x2E, "gfx906": 0x2F, "gfx909": 0x31, "gfx90c": 0x32,
    "gfx1010": 0x33, "gfx1011": 0x34, "gfx1012": 0x35, "gfx1013": 0x42,
    "gfx1030": 0x36, "gfx1031": 0x37, "gfx1032": 0x38, "gfx1033": 0x39, "gfx1034": 0x3E, "gfx1035": 0x3D,
    "gfx1036": 0x45,
}  # fmt: skip
_EM_AMDGPU, _FLAGS_AT = 224, 48  # e_machine, and where e_flags lie in a 64-bit ELF header
_TRIPLE = b"amdgcn-amd-amdhsa--"
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_PT_NOTE, _NT_METADATA = 4, 32


class NotACodeObject(ValueError):
    """The bytes are no code object of a known architecture."""


def arch_of(code: bytes) -> str:
    """The architecture that a code object is for, by its header.

    Raises:
        NotACodeObject: it is none, or that of an architecture that is not known here.
    """
    if len(code) < 64 or code[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", code, 18)[0] != _EM_AMDGPU:
        raise NotACodeObject("not a 64-bit ELF file for AMDGPU")
    mach = struct.unpack_from("<I", code, _FLAGS_AT)[0] & 0xFF
    found = next((name for name, value in _MACH.items() if value == mach), None)
    if found is None:
        raise NotACodeObject(f"architecture {mach:#x} is not known")
    return found


def unbundled(code: bytes) -> bytes:
    """The code object in clang's bundle of one (a table of offset, size and name of each entry), or ``code`` itself.

    Raises:
        NotACodeObject: a bundle without one.
    """
    if not code.startswith(_BUNDLE):
        return code
    (count,) = struct.unpack_from("<Q", code, len(_BUNDLE))
    at = len(_BUNDLE) + 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", code, at)
        if b"amdgcn" in code[at + 24 : at + 24 + length] and size:
            return code[offset : offset + size]
        at += 24 + length
    raise NotACodeObject("a bundle without a code object")


def renamed(code: bytes, name: str) -> bytes:
    """The same code object for an architecture with the same instructions: the loader compares the card with the
    header, and with the target in the metadata.

    Args:
        code: it, or a bundle of it.
        name: "gfx1031"; one that takes as many letters as the code object's own.

    Raises:
        NotACodeObject: ``code`` is none.
        ValueError: the names differ in length, or ``name`` is not known.
    """
    code = unbundled(code)
    own = arch_of(code)
    if own == name:
        return code
    if name not in _MACH or len(name) != len(own):
        raise ValueError(f"a code object for {own} cannot be renamed {name}")
    flags = struct.unpack_from("<I", code, _FLAGS_AT)[0]
    changed = bytearray(code.replace(_TRIPLE + own.encode(), _TRIPLE + name.encode()))
    struct.pack_into("<I", changed, _FLAGS_AT, flags & ~0xFF | _MACH[name])
    return bytes(changed)


def metadata(code: bytes) -> dict[str, Any]:
    """What a code object says of itself and of its kernels: the MessagePack map of its note, version 1.1 or later as in
    LLVM's "User Guide for AMDGPU Backend", "Code Object V3 Metadata".

    Raises:
        NotACodeObject: it is none, or has none.
    """
    arch_of(code)
    first, size, count = (
        struct.unpack_from("<Q", code, 32)[0],
        *struct.unpack_from("<HH", code, 54),
    )
    for header in range(first, first + size * count, size):
        kind, offset, length = (
            struct.unpack_from("<I", code, header)[0],
            struct.unpack_from("<Q", code, header + 8)[0],
            struct.unpack_from("<Q", code, header + 32)[0],
        )
        at = offset
        while kind == _PT_NOTE and at < offset + length:
            name_size, content_size, note = struct.unpack_from("<III", code, at)
            content = at + 12 + (name_size + 3) // 4 * 4
            if note == _NT_METADATA and code[at + 12 : at + 18] == b"AMDGPU":
                return _unpacked(code, content)[0]
            at = content + (content_size + 3) // 4 * 4
    raise NotACodeObject("a code object without metadata")


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """The MessagePack value that begins there, and where it ends; of the kinds that code objects have."""
    kind, after = data[at], at + 1
    if kind < 0x80:
        return kind, after
    if kind >= 0xE0:
        return kind - 0x100, after
    if kind < 0x90:
        return _map(data, after, kind & 0x0F)
    if kind < 0xA0:
        return _array(data, after, kind & 0x0F)
    if kind < 0xC0:
        return _text(data, after, kind & 0x1F)
    if kind in (0xC2, 0xC3):
        return kind == 0xC3, after
    if kind in _NUMBERS:
        number = struct.Struct(_NUMBERS[kind])
        return number.unpack_from(data, after)[0], after + number.size
    if kind in _SIZED:
        form, read = _SIZED[kind]
        size = struct.Struct(form)
        return read(data, after + size.size, size.unpack_from(data, after)[0])
    raise NotACodeObject(f"metadata of kind {kind:#x}")


def _text(data: bytes, at: int, length: int) -> tuple[str, int]:
    return data[at : at + length].decode(), at + length


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = _unpacked(data, at)
        found.append(value)
    return found, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    pairs, at = _array(data, at, 2 * count)
    return dict(zip(pairs[::2], pairs[1::2])), at


_NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_SIZED = {0xD9: (">B", _text), 0xDA: (">H", _text), 0xDB: (">I", _text), 0xDC: (">H", _array), 0xDD: (">I", _array),
          0xDE: (">H", _map), 0xDF: (">I", _map)}  # fmt: skip
