"""Code objects of AMD's compilers: ELF files whose header and metadata name the architecture that they are for."""

from __future__ import annotations

import struct

# EF_AMDGPU_MACH of the header's flags: LLVM's "User Guide for AMDGPU Backend", table of these values.
_MACH = {
    "gfx900": 0x2C, "gfx902": 0x2D, "gfx904": 0x2E, "gfx906": 0x2F, "gfx909": 0x31, "gfx90c": 0x32,
    "gfx1010": 0x33, "gfx1011": 0x34, "gfx1012": 0x35, "gfx1013": 0x42,
    "gfx1030": 0x36, "gfx1031": 0x37, "gfx1032": 0x38, "gfx1033": 0x39, "gfx1034": 0x3E, "gfx1035": 0x3D,
    "gfx1036": 0x45, "gfx1100": 0x41, "gfx1101": 0x46, "gfx1102": 0x47, "gfx1103": 0x44, "gfx1150": 0x43,
    "gfx1151": 0x4A, "gfx1152": 0x55, "gfx1153": 0x58, "gfx1200": 0x48, "gfx1201": 0x4E,
}  # fmt: skip
_EM_AMDGPU, _FLAGS_AT = 224, 48  # e_machine, and where e_flags lie in a 64-bit ELF header
_TRIPLE = b"amdgcn-amd-amdhsa--"
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


class NotACodeObject(ValueError):
    """The bytes are no code object of a known architecture."""


def arch_of(code: bytes) -> str:
    """The architecture that a code object is for, by its header; NotACodeObject where it is none, or that of an
    architecture that is not known here."""
    if len(code) < 64 or code[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", code, 18)[0] != _EM_AMDGPU:
        raise NotACodeObject("not a 64-bit ELF file for AMDGPU")
    mach = struct.unpack_from("<I", code, _FLAGS_AT)[0] & 0xFF
    found = next((name for name, value in _MACH.items() if value == mach), None)
    if found is None:
        raise NotACodeObject(f"architecture {mach:#x} is not known")
    return found


def unbundled(code: bytes) -> bytes:
    """The code object in clang's bundle of one (a table of offset, size and name of each entry), or ``code`` itself;
    NotACodeObject for a bundle without one."""
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
    """A code object, or one in a bundle, under another name ("gfx1031") for an architecture with the same instructions:
    the loader compares the card with the header, and with the target in the metadata. NotACodeObject where ``code`` is
    none, ValueError where the names differ in length, or ``name`` is not known."""
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
