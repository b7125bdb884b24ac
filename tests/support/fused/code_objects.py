"""Code objects of AMD's compilers, as far as a runtime looks at them before it runs anything: the ELF header, and the
metadata in MessagePack that LLVM's "User Guide for AMDGPU Backend" (Code Object Metadata) describes."""

import ctypes
import struct
from typing import Any

from pascal_attn_core.fused.code.amd_code import _MACH, NotACodeObject, arch_of, renamed
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.kinds import FEW
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.geometry import amd as amd_geometry

from .emulation import structure_of

MACHINE, OS_ABI, ABI_VERSIONS = 224, 64, (2, 3)  # EM_AMDGPU, ELFOSABI_AMDGPU_HSA, code object versions 4 and 5
_METADATA = 32  # NT_AMDGPU_METADATA
_PROGRAM_NOTE = 4  # PT_NOTE
_HEAD = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")


def read(image: bytes) -> dict[str, Any] | None:
    """The metadata of an image, its kernels by name; None: no code object of version 4 or 5 for AMD's cards."""
    if len(image) < _HEAD.size or image[7] != OS_ABI or image[8] not in ABI_VERSIONS:
        return None
    try:
        found = metadata(image)
    except NotACodeObject:
        return None
    return {**found, "amdhsa.kernels": {kernel[".name"]: kernel for kernel in found["amdhsa.kernels"]}}


def threads_of(variant: Compilation, function: str) -> int:
    """Threads of a block of one of the functions, as the host launches it."""
    if isinstance(variant, GgufLinearVariant):
        return {"pa_gguf_linear": variant.threads}.get(function) or getattr(FEW.get(function), "threads", 256)
    assert isinstance(variant, Variant)
    has_128 = function in ("pa_combine", "pa_capped_combine", "pa_delta") or "_pack_" in function or "_bits" in function
    return 128 if has_128 else variant.geometry.threads


def code_object(variant: Compilation) -> bytes:
    """A file like those that AMD's compilers make for a variant, without machine code."""
    arch = amd_geometry.base(variant.arch)
    kernels = [
        {
            ".name": name,
            ".args": [{".offset": 0, ".size": ctypes.sizeof(structure_of(name)), ".value_kind": "by_value"}],
            ".kernarg_segment_size": ctypes.sizeof(structure_of(name)),
            ".group_segment_fixed_size":
                variant.tile_bytes
                if isinstance(variant, Variant) and (name == variant.functions[0] or variant.is_gradient) else 0,
            ".vgpr_count": 128,
            ".max_flat_workgroup_size": threads_of(variant, name),
            ".wavefront_size": amd_geometry.wave_size(variant.arch),
            "comment": variant.name,
        }
        for name in variant.functions
    ]  # fmt: skip
    said = pack({"amdhsa.kernels": kernels, "amdhsa.target": f"amdgcn-amd-amdhsa--{arch}", "amdhsa.version": [1, 1]})
    note = struct.pack("<III", 7, len(said), _METADATA) + b"AMDGPU\0\0" + said + bytes(-len(said) % 4)
    at = _HEAD.size + _SEGMENT.size
    head = _HEAD.pack(b"\x7fELF", 2, 1, 1, OS_ABI, ABI_VERSIONS[0], 3, MACHINE, 1, 0, _HEAD.size, 0, _MACH[arch],
                      _HEAD.size, _SEGMENT.size, 1, 0, 0, 0)  # fmt: skip
    segment = _SEGMENT.pack(_PROGRAM_NOTE, 4, at, at, at, len(note), len(note), 4)
    return renamed(head + segment + note, amd_geometry.target(variant.arch))


def pack(value: Any) -> bytes:
    """In MessagePack: numbers that are not negative, texts, lists and mappings."""
    if isinstance(value, int):
        return bytes([value]) if value < 0x80 else b"\xce" + struct.pack(">I", value)
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xA0 | len(text)]) if len(text) < 32 else b"\xd9" + bytes([len(text)])) + text
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(pack, value))
    packed = b"".join(pack(key) + pack(item) for key, item in value.items())
    return b"\xde" + struct.pack(">H", len(value)) + packed


def metadata(code: bytes) -> dict[str, Any]:
    """The metadata of a code object and of its kernels: the MessagePack map of its note, version 1.1 or later as in
    LLVM's "User Guide for AMDGPU Backend", "Code Object V3 Metadata".

    Raises:
        NotACodeObject: it is none, or has none.
    """
    arch_of(code)
    first, (size, count) = struct.unpack_from("<Q", code, 32)[0], struct.unpack_from("<HH", code, 54)
    for header in range(first, first + size * count, size):
        kind, _, at, _, _, length, *_ = _SEGMENT.unpack_from(code, header)
        end = at + length
        while kind == _PROGRAM_NOTE and at < end:
            name_size, content_size, note = struct.unpack_from("<III", code, at)
            content = at + 12 + (name_size + 3) // 4 * 4
            if note == _METADATA and code[at + 12 : at + 18] == b"AMDGPU":
                return _unpacked(code, content)[0]
            at = content + (content_size + 3) // 4 * 4
    raise NotACodeObject("a code object without metadata")


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """The MessagePack value that begins there, and where it ends; of the kinds that code objects have."""
    kind, after = data[at], at + 1
    if kind < 0x80 or kind >= 0xE0:
        return kind - 0x100 if kind >= 0xE0 else kind, after
    if kind < 0xC0:
        read, mask = (_map, 0x0F) if kind < 0x90 else (_array, 0x0F) if kind < 0xA0 else (_text, 0x1F)
        return read(data, after, kind & mask)
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
