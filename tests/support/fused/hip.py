"""A strict stand-in for the HIP runtime, behind the package's own ctypes calls.

Beside what :mod:`.driver` refuses and writes down: a kernel of another device than the current one, a current device
that is left changed, an image for what the card is not taken for, an instruction that the card lacks.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code import params
from pascal_attn_core.fused.code.amd_code import arch_of
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import Variant, amd_variants, gguf_linear_variants, source
from pascal_attn_core.fused.geometry import amd as amd_geometry
from pascal_attn_core.fused.gpu.hip import HipDriver
from pascal_attn_core.fused.gpu.runtime import CompileError
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, plan_call
from pascal_attn_core.machine.device import DeviceInfo

from .answers import Answers, library
from .code_objects import code_object, read
from .emulation import structure_of


def _card(name: str, arch: str, units: int, gib: int) -> DeviceInfo:
    wave = 64 if arch.startswith("gfx9") else 32
    sizes = {"l2_bytes": 4 << 20, "total_bytes": gib << 30, "shared_bytes": 64 << 10}
    return DeviceInfo("hip", f"AMD Radeon {name}", num_sms=units, arch=arch, wave_size=wave, **sizes)


RADEON_VII = _card("VII", "gfx906", 60, 16)
RX_5700 = _card("RX 5700 XT", "gfx1010", 20, 8)
RX_6800 = _card("RX 6800", "gfx1030", 30, 16)
RX_7600 = _card("RX 7600", "gfx1102", 16, 8)
RX_9070 = _card("RX 9070", "gfx1201", 28, 16)
# With HSA_OVERRIDE_GFX_VERSION=10.3.0.
OVERRIDDEN = replace(RX_5700, arch="gfx1030", true_arch="gfx1010")
_ARGUMENTS = {
    "hipGetErrorString": 2,
    "hipInit": 1,
    "hipRuntimeGetVersion": 1,
    "hipGetDevice": 1,
    "hipSetDevice": 1,
    "hipThreadExchangeStreamCaptureMode": 1,
    "hipModuleLoadData": 2,
    "hipModuleGetFunction": 3,
    "hipModuleLaunchKernel": 11,
}
# Of one block. A grid is counted in threads: no direction may have 2^32 of them.
_LDS_BYTES, _THREADS, _GRID_YZ, _MOST_THREADS = 64 << 10, 1024, 65535, 2**32 - 1
# Registers of a thread, and of a SIMD for one wave's lane: waves of 64 lanes share 256, of 32 lanes 1024.
_REGISTERS, _WAVES_OF_A_UNIT = 256, {64: (4, 256), 32: (4, 1024)}
_BUFFER, _SIZE, _END = 1, 2, 3


class Function(NamedTuple):
    """A kernel of a module that was loaded on a device."""

    device: int
    variant: Variant
    kernel: dict[str, Any]


class HipStandIn(Answers, HipDriver):
    """A runtime over cards that are not here: see :class:`Answers`. What a card is taken for is its ``arch``, what it
    is its ``known_arch``."""

    arguments, error_words, init = _ARGUMENTS, "hipGetErrorString", "hipInit"

    def __init__(self, card: DeviceInfo = RADEON_VII, *how: Callable[[Launch], object], **options: Any):
        Answers.__init__(self, card, *how, **options)
        HipDriver.__init__(self, [library("hip.cpp")])

    def left_behind(self) -> list[str]:
        """The changes that this thread should have undone."""
        found = [f"device {self._device} as the current one"] * (self._device != 0)
        return found + super().left_behind()

    @property
    def _device(self) -> int:
        return getattr(self._thread, "device", 0)

    _hipInit = Answers._begin

    def _hipRuntimeGetVersion(self, version: int) -> int:
        ctypes.c_int.from_address(version).value = 6_03_42133
        return 0

    def _hipGetDevice(self, device: int) -> int:
        ctypes.c_int.from_address(device).value = self._device
        return 0

    def _hipSetDevice(self, device: int) -> int:
        if device >= self.devices:
            return self._wrong(101, f"device {device} of {self.devices}")
        self._thread.device = device
        return 0

    _hipThreadExchangeStreamCaptureMode = Answers._exchange_mode

    def _hipModuleLoadData(self, module: int, image: int) -> int:
        content = self.image_at(image)
        found = read(content)
        if found is None:
            return 200
        arch = arch_of(content)
        if arch != self.card.arch:
            return 209
        if found["amdhsa.target"].split("--")[1].split(":")[0] != arch:
            return self._wrong(200, f"the header says {arch} and the metadata {found['amdhsa.target']}")
        ctypes.c_void_p.from_address(module).value = self._handle(
            (self._device, self.variants[content], found["amdhsa.kernels"])
        )
        return 0

    def _hipModuleGetFunction(self, function: int, module: int, name: int) -> int:
        kernel, found = ctypes.string_at(name).decode(), self._given.get(module)
        if not isinstance(found, tuple) or isinstance(found, Function):
            return self._wrong(400, f"{module:#x} is no module")
        device, variant, kernels = found
        if device != self._device:
            return self._wrong(400, f"{kernel} asked for on device {self._device}, its module is of {device}")
        if kernel not in kernels:
            return 500
        ctypes.c_void_p.from_address(function).value = self._handle(Function(device, variant, kernels[kernel]))
        return 0

    def _hipModuleLaunchKernel(self, function: int, x: int, y: int, z: int, *rest: int) -> int:
        block_x, block_y, block_z, shared_bytes, stream, pointers, extra = rest
        found = self._given.get(function)
        if not isinstance(found, Function):
            return self._wrong(400, f"{function:#x} is no function")
        kernel, name = found.kernel, found.kernel[".name"]
        if found.device != self._device:
            return self._wrong(400, f"{name} of device {found.device} launched on device {self._device}")
        structure, threads = structure_of(name), block_x * block_y * block_z
        lanes, registers, wanted = kernel[".wavefront_size"], kernel[".vgpr_count"], kernel[".kernarg_segment_size"]
        lds_bytes = kernel[".group_segment_fixed_size"]
        simds, registers_of_simd = _WAVES_OF_A_UNIT[self.card.wave_size]
        waves, size = -(-threads // lanes), ctypes.sizeof(structure)
        problem, given = _argument_buffer(pointers, extra)
        arguments = [(each[".offset"], each[".size"], each[".value_kind"]) for each in kernel[".args"]]
        refused = {
            f"grid {x, y, z}": not (0 < x * block_x <= _MOST_THREADS and 0 < y <= _GRID_YZ and 0 < z <= _GRID_YZ),
            f"{threads} threads": not 0 < threads <= min(_THREADS, kernel[".max_flat_workgroup_size"]),
            f"waves of {lanes}": lanes != self.card.wave_size,
            f"{registers} registers": registers > _REGISTERS,
            f"{registers} registers x {waves} waves": registers * -(-waves // simds) > registers_of_simd,
            f"{lds_bytes} + {shared_bytes} bytes of LDS": lds_bytes + shared_bytes > _LDS_BYTES,
            f"{shared_bytes} bytes of dynamic LDS for {found.variant.name}":
                shared_bytes != Launch(found.variant, name, (1, 1, 1), 1, params.Params()).shared_bytes,
            f"stream {stream:#x}": stream not in self.streams,
            problem: bool(problem),
            f"an argument buffer of {len(given)} bytes, of which the code object reads {wanted}":
                not problem and len(given) != wanted,
            f"arguments {arguments}": arguments != [(0, size, "by_value")],
        }  # fmt: skip
        if any(refused.values()):
            return self._wrong(1, f"{name}: {', '.join(what for what, is_so in refused.items() if is_so)}")
        if _has_dot_products(found.variant) and not amd_geometry.has_dots(self.card.known_arch or "gfx900"):
            return self._wrong(719, f"{name}: an instruction that {self.card.true_arch} does not have")
        return self._queue(Launch(found.variant, name, (x, y, z), threads, structure.from_buffer_copy(given)))


def _argument_buffer(pointers: int, extra: int) -> tuple[str, bytes]:
    """(what is wrong, the bytes) of a launch's arguments."""
    if pointers or not extra:
        return "arguments one by one", b""
    words = struct.unpack("<5Q", ctypes.string_at(extra, 40))
    if (words[0], words[2], words[4]) != (_BUFFER, _SIZE, _END):
        return f"a list of arguments that says {words[0], words[2], words[4]}", b""
    size = ctypes.c_size_t.from_address(words[3]).value
    return ("an argument buffer that is not aligned" if words[1] % 8 else ""), ctypes.string_at(words[1], size)


def _has_dot_products(variant: Compilation) -> bool:
    if not isinstance(variant, Variant):
        return True
    geometry = variant.geometry
    if not isinstance(geometry, amd_geometry.AmdGeometry):  # of gfx11 and gfx12, which all have them
        return True
    return geometry.pairs > 0 or variant.kind == "int8"


def plain_launch(arch: str = "gfx906", dtype: torch.dtype = torch.float32) -> Launch:
    """The launch of a call of 70 tokens, head_dim 64, on an architecture."""
    query = torch.randn(1, 1, 70, 64, dtype=dtype)
    call = check_call(query, query, query)
    plan = Plan(plan_call(call, 1, arch=arch).forward)
    (launch,) = forward_launches(call, plan, torch.empty_like(query))
    return launch


class HipCompiler:
    """In place of HIPRTC: what does not ship becomes a :func:`.code_objects.code_object`."""

    version = (6, 3)

    def __init__(self) -> None:
        self.compiled: list[Compilation] = []
        self.archs: list[str] = []

    def compile(self, text: str, arch: str, macros: dict[str, object], options: Sequence[str] = ()) -> bytes:
        if options != amd_geometry.options(arch):
            raise CompileError(f"HIPRTC_ERROR_INVALID_OPTION: {options}")
        every: tuple[Compilation, ...] = (*amd_variants(arch), *gguf_linear_variants(arch))
        variant = next((v for v in every if source(v.kind, arch) == text and v.macros() == macros), None)
        if variant is None:
            raise CompileError(f"HIPRTC_ERROR_COMPILATION for {arch}\nno variant of that text and these macros")
        self.compiled.append(variant)
        self.archs.append(arch)
        return code_object(variant)
