"""A strict stand-in for the CUDA driver, behind the package's own ctypes calls.

It refuses, as the driver does, and writes down, as no driver does, a call before cuInit, a handle that it never gave, a
context that is not current or is left behind, an image for another card, whatever is beyond the card's limits, and
parameters of another size than the machine code reads. Kernels are executed from the bytes that it would copy.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pascal_attn_core.fused.code import params
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import all_variants, gguf_variants, linear_variants, source
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.cuda import CudaDriver
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.machine.device import DeviceInfo
from tools.models import sass

from .. import elf
from .answers import Answers, fails_once, library
from .emulation import CARD, structure_of

__all__ = ["Compiler", "StandIn", "cubin", "fails_once", "usage"]
_ARGUMENTS = {
    "cuInit": 1,
    "cuGetErrorString": 2,
    "cuDeviceGet": 2,
    "cuDevicePrimaryCtxRetain": 2,
    "cuCtxGetCurrent": 1,
    "cuCtxPushCurrent_v2": 1,
    "cuCtxPopCurrent_v2": 1,
    "cuThreadExchangeStreamCaptureMode": 1,
    "cuModuleLoadData": 2,
    "cuModuleGetFunction": 3,
    "cuFuncSetAttribute": 3,
    "cuLaunchKernel": 11,
}
# Of a multiprocessor of compute capability 5.0 to 7.0, for one block.
_REGISTERS, _SHARED_BYTES, _THREADS, _GRID_X, _GRID_YZ = 65536, 48 << 10, 1024, 2**31 - 1, 65535
# With leave (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES), by compute capability: CUDA C++ programming guide.
_MAX_DYNAMIC_SHARED = 8
_MOST_SHARED_KIB = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}
_CUDA_MACHINE = 190
_PARAM_CBANK, _MAX_THREADS = 0x0A, 0x05  # attributes in .nv.info


class Function(NamedTuple):
    """One kernel, as its cubin describes it and as the driver was told.

    Attributes:
        max_threads: 0 = not said.
        dynamic_bytes: shared memory that may be asked for at launch, as it was told; empty: what is left of 48 KiB.
    """

    name: str
    context: int
    variant: Compilation
    registers: int
    shared_bytes: int
    params_bytes: int
    max_threads: int
    dynamic_bytes: list[int]

    @property
    def most_dynamic(self) -> int:
        """Bytes of shared memory that may be asked for at launch."""
        return self.dynamic_bytes[-1] if self.dynamic_bytes else _SHARED_BYTES - self.shared_bytes


class StandIn(Answers, CudaDriver):
    """A driver over cards that are not here: see :class:`Answers`."""

    arguments, error_words, init = _ARGUMENTS, "cuGetErrorString", "cuInit"

    def __init__(self, card: DeviceInfo = CARD, *how: Callable[[Launch], object], **options: Any):
        Answers.__init__(self, card, *how, **options)
        self._of_device: dict[int, int] = {}  # device -> its context
        CudaDriver.__init__(self, library("driver.cpp"))

    def left_behind(self) -> list[str]:
        """The changes that this thread should have undone."""
        found = [f"{len(self._stack)} contexts on the stack"] * bool(self._stack)
        return found + super().left_behind()

    @property
    def _stack(self) -> list[int]:
        return self._thread.__dict__.setdefault("stack", [])

    def make_current(self, index: int) -> None:
        """Let the context of a device be the current one of this thread, as torch does when it computes there."""
        self._thread.__dict__["torchs"] = self._context(index).value

    @property
    def _current(self) -> int:
        return self._stack[-1] if self._stack else self._thread.__dict__.get("torchs", 0)

    _cuInit = Answers._begin

    def _cuDeviceGet(self, device: int, index: int) -> int:
        if index >= self.devices:
            return self._wrong(101, f"device {index} of {self.devices}")
        ctypes.c_int.from_address(device).value = index
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: int, device: int) -> int:
        if device not in self._of_device:
            self._of_device[device] = self._handle(f"context {device}")
        ctypes.c_void_p.from_address(context).value = self._of_device[device]
        return 0

    def _cuCtxGetCurrent(self, context: int) -> int:
        ctypes.c_void_p.from_address(context).value = self._current
        return 0

    def _cuCtxPushCurrent_v2(self, context: int) -> int:
        if context not in self._of_device.values():
            return self._wrong(201, f"{context:#x} is no context")
        self._stack.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, context: int) -> int:
        if not self._stack:
            return self._wrong(201, "no context to pop")
        ctypes.c_void_p.from_address(context).value = self._stack.pop()
        return 0

    _cuThreadExchangeStreamCaptureMode = Answers._exchange_mode

    def _cuModuleLoadData(self, module: int, image: int) -> int:
        if not self._current:
            return self._wrong(201, "an image loaded without a current context")
        code = self.image_at(image)
        if code[:4] != b"\x7fELF" or struct.unpack_from("<H", code, 18) != (_CUDA_MACHINE,):
            return 200
        major, minor = divmod(sass.arch(code), 10)
        assert self.card.capability is not None
        if major != self.card.capability[0] or minor > self.card.capability[1]:
            return 209
        ctypes.c_void_p.from_address(module).value = self._handle((self._current, code))
        return 0

    def _cuModuleGetFunction(self, function: int, module: int, name: int) -> int:
        kernel, found = ctypes.string_at(name).decode(), self._given.get(module)
        if not isinstance(found, tuple) or isinstance(found, Function):
            return self._wrong(400, f"{module:#x} is no module")
        context, code = found
        if self._current != context:
            return self._wrong(201, f"{kernel} asked for in another context than its module's")
        sections = {section.name: section for section in elf.sections(code)}
        if f".text.{kernel}" not in sections:
            return 500
        info = elf.attributes(sections[f".nv.info.{kernel}"].content)
        shared = sections.get(f".nv.shared.{kernel}")
        described = Function(
            kernel,
            context,
            self.variants[code],
            sections[f".text.{kernel}"].info >> 24,
            0 if shared is None else shared.size,
            struct.unpack_from("<H", info[_PARAM_CBANK], 6)[0],
            struct.unpack_from("<I", info[_MAX_THREADS])[0] if _MAX_THREADS in info else 0,
            [],
        )
        ctypes.c_void_p.from_address(function).value = self._handle(described)
        return 0

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        kernel = self._given.get(function)
        if not isinstance(kernel, Function):
            return self._wrong(400, f"{function:#x} is no function")
        if self._current != kernel.context:
            return self._wrong(201, f"{kernel.name} told of in another context than its own")
        if attribute != _MAX_DYNAMIC_SHARED:
            return self._wrong(1, f"attribute {attribute}")
        most = (_MOST_SHARED_KIB.get(self.card.capability or (0, 0), 48) << 10) - kernel.shared_bytes
        if not 0 <= value <= most:
            return self._wrong(1, f"{kernel.name}: {value} bytes of dynamic shared memory > {most}")
        kernel.dynamic_bytes.append(value)
        return 0

    def _cuLaunchKernel(self, function: int, x: int, y: int, z: int, *rest: int) -> int:
        block_x, block_y, block_z, shared_bytes, stream, pointers, extra = rest
        kernel = self._given.get(function)
        if not isinstance(kernel, Function):
            return self._wrong(400, f"{function:#x} is no function")
        if self._current != kernel.context:
            return self._wrong(201, f"{kernel.name} launched in another context than its own")
        structure = structure_of(kernel.name)
        threads = block_x * block_y * block_z
        refused = {
            f"grid {x, y, z}": not (0 < x <= _GRID_X and 0 < y <= _GRID_YZ and 0 < z <= _GRID_YZ),
            f"{threads} threads": not 0 < threads <= min(_THREADS, kernel.max_threads or _THREADS),
            f"{kernel.registers} registers x {threads}": -(-kernel.registers // 8) * 8 * threads > _REGISTERS,
            f"{kernel.shared_bytes} bytes of shared memory": kernel.shared_bytes > _SHARED_BYTES,
            f"{shared_bytes} bytes of dynamic shared memory": shared_bytes > kernel.most_dynamic,
            f"{shared_bytes} bytes of dynamic shared memory for {kernel.variant.name}":
                shared_bytes != Launch(kernel.variant, kernel.name, (1, 1, 1), 1, params.Params()).shared_bytes,
            f"stream {stream:#x}": stream not in self.streams,
            "parameters": extra != 0 or pointers == 0,
            f"{ctypes.sizeof(structure)} bytes of parameters, of which the machine code reads {kernel.params_bytes}":
                ctypes.sizeof(structure) != kernel.params_bytes,
        }  # fmt: skip
        if any(refused.values()):
            return self._wrong(1, f"{kernel.name}: {', '.join(what for what, is_so in refused.items() if is_so)}")
        given = ctypes.string_at(ctypes.c_void_p.from_address(pointers).value, kernel.params_bytes)
        return self._queue(Launch(kernel.variant, kernel.name, (x, y, z), threads, structure.from_buffer_copy(given)))


def cubin(variant: Compilation, arch: int, registers: int = 255, shared_bytes: int = 33024) -> bytes:
    """A file like those that NVRTC makes, as far as a driver looks at it before it runs anything; no machine code."""
    sections: list[tuple[str, int, int, bytes, int]] = [(".comment", 1, 0, variant.name.encode(), 0)]
    for name in variant.functions:
        size = ctypes.sizeof(structure_of(name))
        attributes = struct.pack("<BBHIHH", 4, _PARAM_CBANK, 8, 0, 0x140, size)
        sections += [
            (f".text.{name}", 1, registers << 24, bytes(16), 0),
            (f".nv.info.{name}", 0x70000000, 0, attributes, 0),
            (f".nv.shared.{name}", elf.NO_BITS, 0, b"", shared_bytes),
        ]
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, 0, names, 0))
    body, headers, name_at = b"", [bytes(elf.SECTION.size)], 1
    for name, kind, info, content, length in sections:
        place = elf.HEAD.size + len(body)
        headers.append(elf.SECTION.pack(name_at, kind, 0, 0, place, length or len(content), 0, info, 4, 0))
        body += content + bytes(-len(content) % 8)
        name_at += len(name) + 1
    head = elf.HEAD.pack(b"\x7fELF", 2, _CUDA_MACHINE, 1, 0, 0, elf.HEAD.size + len(body), arch, elf.HEAD.size, 0, 0,
                     elf.SECTION.size, len(headers), len(headers) - 1)  # fmt: skip
    return head + body + b"".join(headers)


TABLE = Path(__file__).resolve().parents[3] / "docs" / "fused-static.txt"


@functools.cache
def usage() -> dict[tuple[str, int], tuple[int, int]]:
    """(variant, architecture) -> (registers of the function that needs most, shared memory of a block), as the table
    of what ptxas says has it."""
    found = {}
    for line in TABLE.read_text().splitlines():
        name, *cells = line.split()
        for cell in cells if name != "#" else ():
            arch, registers, shared = cell.split(":")
            found[name, int(arch)] = max(int(n.split("!")[0]) for n in registers.split("/")), int(shared)
    return found


@functools.cache
def _by_macros() -> dict[tuple[str, str], Compilation]:
    every = (*all_variants(), *linear_variants(), *gguf_variants())
    return {(source(variant.kind), str(variant.macros())): variant for variant in every}


class Compiler:
    """In place of NVRTC, which takes seconds: what does not ship is a :func:`cubin` with the figures of the table."""

    version = (12, 6)

    def __init__(self) -> None:
        self.compiled: list[Compilation] = []

    def compile(self, text: str, arch: int, macros: dict[str, object]) -> nvrtc.Compiled:
        variant = _by_macros()[text, str(macros)]
        self.compiled.append(variant)
        of_table = max(known for name, known in usage() if name == variant.name and known <= arch)
        return nvrtc.Compiled(cubin(variant, arch, *usage()[variant.name, of_table]), "")
