"""HIP, for AMD cards: loading and launching code objects through the runtime that torch has loaded, with ctypes, on
torch's current stream; and HIPRTC, which makes them."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...machine.amd_system import OVERRIDE
from ...machine.device import DeviceInfo
from ..code.amd_code import renamed
from ..code.compilation import Compilation
from ..code.params import Params
from ..code.source import source
from ..geometry.amd import compile_target, kernel_arch, options, target
from . import hip_libraries
from .runtime import CompileError, Driver, DriverError, GpuRuntime, RuntimeCompiler, loaded

_BUFFER, _SIZE, _END = 1, 2, 3  # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
_ANY_VERSION = (9, 0)  # that HIPRTC of ROCm 5 and 6 says it has


class HipDriver(Driver):
    """The HIP runtime's library, the first of ``paths`` that is it; an OSError where there is none on this machine, a
    DriverError where it finds no card."""

    maker, prefix = "HIP", "hip"

    def __init__(self, paths: list[str] | None = None):
        self._lib = _open(hip_libraries.runtime_candidates() if paths is None else paths)
        self._lib.hipGetErrorString.restype = ctypes.c_char_p
        self._images: list[bytes] = []  # the runtime may go on reading from what was loaded, instead of a copy
        self.call("hipInit", 0)

    def _words_of(self, code: int) -> str:
        words = self._lib.hipGetErrorString(code)
        return words.decode() if words else ""

    @property
    def version(self) -> str:
        """The runtime's version: ``"6.3.42133"``."""
        number = ctypes.c_int()
        self.call("hipRuntimeGetVersion", ctypes.byref(number))
        major, rest = divmod(number.value, 10_000_000)
        return f"{major}.{rest // 100_000}.{rest % 100_000}"

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Which device is current belongs to each thread; torch's choice is put back."""
        before = ctypes.c_int()
        self.call("hipGetDevice", ctypes.byref(before))
        if before.value == index:
            yield
            return
        self.call("hipSetDevice", index)
        try:
            yield
        finally:
            self.call("hipSetDevice", before.value)

    def load(self, index: int, image: bytes, functions: tuple[str, ...]) -> dict[str, Any]:
        self._images.append(image)
        return super().load(index, image, functions)

    def _launch(self, params: Params, *how: object) -> None:
        """The bytes of the structure are the whole argument buffer: the kernels have no hidden arguments."""
        size = ctypes.c_size_t(ctypes.sizeof(params))
        extra = (ctypes.c_void_p * 5)(_BUFFER, ctypes.addressof(params), _SIZE, ctypes.addressof(size), _END)
        self.call("hipModuleLaunchKernel", *how, None, extra)


def _open(paths: list[str]) -> ctypes.CDLL:
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "hipModuleLaunchKernel"):
            return library
    raise OSError("torch has loaded no HIP runtime, and there is none on this machine")


hip_driver = functools.cache(HipDriver)


class Hiprtc(RuntimeCompiler):
    """HIPRTC, AMD's runtime compiler: it needs no GPU, no toolkit and no other compiler."""

    prefix = "hiprtc"

    def __init__(self, path: str):
        super().__init__(path)
        self.version = version_of(self.version, torch.version.hip)

    def compile(self, text: str, arch: str, macros: dict[str, object], options: Sequence[str] = ()) -> bytes:
        """The code object of one source text for an architecture, ``"gfx906"``. Raises CompileError."""
        options = [f"--offload-arch={arch}", *options, *(f"-D{name}={value}" for name, value in macros.items())]
        return self._compiled(text, arch, options, "Code")[0]


def version_of(said: tuple[int, int], hip: str | None) -> tuple[int, int]:
    """The version of a library that has ``said`` one itself; ``hip``: that torch was built with, and whose compiler its
    wheels bring, ``"6.3.42133-1b9c17779"``."""
    found = re.match(r"(\d+)\.(\d+)", hip or "")
    return (int(found[1]), int(found[2])) if found and said == _ANY_VERSION else said


@functools.cache
def hip_compiler() -> Hiprtc | None:
    """The HIPRTC of this machine, or None."""
    return next(loaded(Hiprtc, hip_libraries.compiler_candidates()), None)


class HipRuntime(GpuRuntime):
    """AMD's HIP runtime, and HIPRTC."""

    open_driver, find_compiler = staticmethod(hip_driver), staticmethod(hip_compiler)
    driver_name, compiler_name = "HIP runtime", "HIPRTC"
    where_compiler_is = ", which torch's ROCm wheels bring"

    def arch(self, info: DeviceInfo) -> str:
        """As :func:`..geometry.amd.kernel_arch`; "" where there are no kernels for the card."""
        return kernel_arch(info.arch, info.known_arch) or ""

    def refusal(self, info: DeviceInfo) -> str:
        if not self.arch(info):
            return f"there is no fused kernel for {info.arch or 'an unknown architecture'}"
        if info.known_arch is not None and info.known_arch[:-2] != info.arch[:-2]:  # gfx10: of another generation
            return f"the card is a {info.known_arch}, and {OVERRIDE} makes it a {info.arch}"
        return ""

    def driver_version(self) -> str:
        """The versions of the runtime, and of the kernel that the GPU's driver is a part of."""
        try:
            version = self.open_driver().version
        except (OSError, DriverError):
            return ""
        return f"HIP {version}, {platform.release()}"

    def compiler(self, arch: str) -> Hiprtc | None:
        return self.find_compiler()

    def compile(self, variant: Compilation, arch: str) -> bytes:
        text = source(variant.kind, variant.arch)
        code = self._compiler(arch).compile(text, compile_target(arch), variant.macros(), options(arch))
        try:
            return renamed(code, target(arch))
        except ValueError as error:
            raise CompileError(f"HIPRTC made no code object for {arch}: {error}") from error
