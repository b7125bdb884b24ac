"""Code objects of AMD's compilers: ELF files whose header and metadata name the architecture that they are for."""

from __future__ import annotations

import struct

# EF_AMDGPU_MACH of the header's flags: LLVM's "User Guide for AMDGPU Backend", table of these values.
_MACH = {
    "gfx900": 0x2C, "gfx902": 0x2D, "gfx904": 0x2E, "gfx906": 0x2F, "gfx909": 0x31, "gfx90c": 0x32,
    "gfx1010": 0x33, "gfx1011": 0x34, "gfx1012": 0x35, "gfx1013": 0x42,
    "gfx1030": 0x36, "gfx1031": 0x37, "gfx1032": 0x38, "gfx1033": 0x39, "gfx1034": 0x3E, "gfx1035": 0x3D,
    "gfx1036": 0x45,
}  # fmt: skip
_FLAGS_AT = 48  # e_flags of a 64-bit ELF header
_TRIPLE = b"amdgcn-amd-amdhsa--"


class NotACodeObject(ValueError):
    """The bytes are no code object of a known architecture."""


def arch_of(code: bytes) -> str:
    """The architecture that a code object is for, by its header.

    Raises:
        NotACodeObject: it is none, or that of an architecture that is not known here.
    """
    if len(code) < 64 or code[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", code, 18)[0] != 224:
        raise NotACodeObject("not a 64-bit ELF file for AMDGPU")
    mach = struct.unpack_from("<I", code, _FLAGS_AT)[0] & 0xFF
    found = next((name for name, value in _MACH.items() if value == mach), None)
    if found is None:
        raise NotACodeObject(f"architecture {mach:#x} is not known")
    return found


def renamed(code: bytes, name: str) -> bytes:
    """The same code object for an architecture with the same instructions. The loader compares the header with the
    card; the target in the metadata, a MessagePack string of at most 31 bytes or of a byte of length, is renamed too.

    Args:
        name: "gfx1031"; one that takes as many letters as the code object's own.

    Raises:
        NotACodeObject: ``code`` is none.
        ValueError: the names differ in length, or ``name`` is not known.
    """
    own = arch_of(code)
    if own == name:
        return code
    if name not in _MACH or len(name) != len(own):
        raise ValueError(f"a code object for {own} cannot be renamed {name}")
    flags = struct.unpack_from("<I", code, _FLAGS_AT)[0]
    changed = bytearray(code.replace(_TRIPLE + own.encode(), _TRIPLE + name.encode()))
    struct.pack_into("<I", changed, _FLAGS_AT, flags & ~0xFF | _MACH[name])
    return bytes(changed)
