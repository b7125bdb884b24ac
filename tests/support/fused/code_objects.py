"""Code objects of AMD's compilers, as far as a runtime looks at them before it runs anything: the ELF header, and the
metadata in MessagePack that LLVM's "User Guide for AMDGPU Backend" (Code Object Metadata) describes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from pascal_attn_core.fused import amd_geometry, params
from pascal_attn_core.fused.amd_code import _MACH, renamed
from pascal_attn_core.fused.source import Variant

from .emulation import PARAMS

MACHINE, OS_ABI, ABI_VERSIONS = 224, 64, (2, 3)  # EM_AMDGPU, ELFOSABI_AMDGPU_HSA, code object versions 4 and 5
_METADATA = 32  # NT_AMDGPU_METADATA
_PROGRAM_NOTE = 4  # PT_NOTE
_HEAD = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")


class Kernel(NamedTuple):
    """What the metadata say of one kernel."""

    name: str
    kernarg_bytes: int
    arguments: tuple[tuple[int, int, str], ...]  # offset, size and kind of each
    lds_bytes: int
    scratch_bytes: int
    registers: int
    most_threads: int
    wave_size: int


class CodeObject(NamedTuple):
    """A code object's header and metadata."""

    arch_flags: int
    abi_version: int
    target: str
    kernels: dict[str, Kernel]


def read(image: bytes) -> CodeObject | None:
    """What an image is; None: no code object of version 4 or 5 for AMD's cards."""
    if len(image) < _HEAD.size:
        return None
    fields = _HEAD.unpack_from(image)
    magic, bits, order, _, os_abi, abi_version, _, machine = fields[:8]
    if (magic, bits, order) != (b"\x7fELF", 2, 1) or machine != MACHINE or os_abi != OS_ABI:
        return None
    if abi_version not in ABI_VERSIONS:
        return None
    _, _, segments, _, flags, _, size, count = fields[8:16]
    for i in range(count):
        kind, _, at, _, _, length, *_ = _SEGMENT.unpack_from(image, segments + i * size)
        if kind == _PROGRAM_NOTE:
            metadata = next(_notes(image[at : at + length]), None)
            if metadata is not None:
                return CodeObject(flags, abi_version, metadata["amdhsa.target"], _kernels(metadata))
    return None


def _notes(content: bytes) -> Iterable[dict[str, Any]]:
    at = 0
    while at < len(content):
        name_bytes, size, kind = struct.unpack_from("<III", content, at)
        begin = at + 12 + -(-name_bytes // 4) * 4
        if kind == _METADATA:
            yield unpack(content[begin : begin + size])[0]
        at = begin + -(-size // 4) * 4


def _kernels(metadata: dict[str, Any]) -> dict[str, Kernel]:
    return {
        each[".name"]: Kernel(
            each[".name"],
            each[".kernarg_segment_size"],
            tuple((a[".offset"], a[".size"], a[".value_kind"]) for a in each.get(".args", [])),
            each[".group_segment_fixed_size"],
            each[".private_segment_fixed_size"],
            each[".vgpr_count"],
            each[".max_flat_workgroup_size"],
            each[".wavefront_size"],
        )
        for each in metadata["amdhsa.kernels"]
    }


def code_object(variant: Variant, registers: int = 128, lds_bytes: int | None = None) -> bytes:
    """A file like those that AMD's compilers make for a variant, without machine code."""
    arch = amd_geometry.base(variant.arch)
    kernels = []
    for name in variant.functions:
        size = ctypes.sizeof(getattr(params, PARAMS[name]))
        of_tiles = variant.tile_bytes if name == variant.functions[0] or variant.is_gradient else 0
        threads = variant.geometry.threads if name in _OWN_TILES else 128
        kernels.append(
            {
                ".name": name,
                ".symbol": f"{name}.kd",
                ".args": [{".offset": 0, ".size": size, ".value_kind": "by_value"}],
                ".kernarg_segment_size": size,
                ".kernarg_segment_align": 8,
                ".group_segment_fixed_size": of_tiles if lds_bytes is None else lds_bytes,
                ".private_segment_fixed_size": 0,
                ".vgpr_count": registers,
                ".max_flat_workgroup_size": threads,
                ".wavefront_size": amd_geometry.wave_size(variant.arch),
                "comment": variant.name,
            }
        )
    metadata = pack(
        {"amdhsa.kernels": kernels, "amdhsa.target": f"amdgcn-amd-amdhsa--{arch}", "amdhsa.version": [1, 1]}
    )
    note = struct.pack("<III", 7, len(metadata), _METADATA) + b"AMDGPU\0\0" + metadata + bytes(-len(metadata) % 4)
    at = _HEAD.size + _SEGMENT.size
    head = _HEAD.pack(b"\x7fELF", 2, 1, 1, OS_ABI, ABI_VERSIONS[0], 3, MACHINE, 1, 0, _HEAD.size, 0, _MACH[arch],
                      _HEAD.size, _SEGMENT.size, 1, 0, 0, 0)  # fmt: skip
    segment = _SEGMENT.pack(_PROGRAM_NOTE, 4, at, at, at, len(note), len(note), 4)
    return renamed(head + segment + note, amd_geometry.target(variant.arch))


_OWN_TILES = ("pa_forward", "pa_forward_split", "pa_grad_query", "pa_grad_key_value")


# ---- MessagePack, as far as LLVM writes it ---------------------------------------------------------------------------


def unpack(content: bytes, at: int = 0) -> tuple[Any, int]:
    """(the value that begins there, where the next one does)."""
    kind = content[at]
    if kind < 0x80:
        return kind, at + 1
    if kind < 0x90:
        return _unpack_map(content, at + 1, kind & 0x0F)
    if kind < 0xA0:
        return _unpack_list(content, at + 1, kind & 0x0F)
    if kind < 0xC0:
        return _text(content, at + 1, kind & 0x1F)
    if kind >= 0xE0:
        return kind - 0x100, at + 1
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at + 1
    if kind in _NUMBERS:
        shape = struct.Struct(_NUMBERS[kind])
        return shape.unpack_from(content, at + 1)[0], at + 1 + shape.size
    (length,) = struct.unpack_from(_LENGTHS[kind][0], content, at + 1)
    return _LENGTHS[kind][1](content, at + 1 + struct.calcsize(_LENGTHS[kind][0]), length)


def _text(content: bytes, at: int, length: int) -> tuple[str, int]:
    return content[at : at + length].decode(), at + length


def _unpack_list(content: bytes, at: int, length: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(length):
        value, at = unpack(content, at)
        found.append(value)
    return found, at


def _unpack_map(content: bytes, at: int, length: int) -> tuple[dict[Any, Any], int]:
    found = {}
    for _ in range(length):
        key, at = unpack(content, at)
        found[key], at = unpack(content, at)
    return found, at


_NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {
    0xD9: (">B", _text), 0xDA: (">H", _text), 0xDB: (">I", _text),
    0xDC: (">H", _unpack_list), 0xDD: (">I", _unpack_list),
    0xDE: (">H", _unpack_map), 0xDF: (">I", _unpack_map),
}  # fmt: skip


def pack(value: Any) -> bytes:
    """Of numbers that are not negative, texts, lists and mappings."""
    if isinstance(value, int):
        return bytes([value]) if value < 0x80 else b"\xce" + struct.pack(">I", value)
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xA0 | len(text)]) if len(text) < 32 else b"\xd9" + bytes([len(text)])) + text
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(pack, value))
    packed = b"".join(pack(key) + pack(item) for key, item in value.items())
    return b"\xde" + struct.pack(">H", len(value)) + packed
