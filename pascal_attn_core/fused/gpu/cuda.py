"""CUDA: loading and launching cubins through the driver with ctypes, in torch's context, on torch's current stream; and
NVRTC, which makes them."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ...machine.device import DeviceInfo
from ...machine.facts import ask_driver
from ..code.compilation import Compilation
from ..code.params import Params
from ..code.source import source
from . import nvrtc
from .runtime import Driver, GpuRuntime

_POINTERS = ctypes.c_void_p * 1  # of a launch, to its parameters
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaDriver(Driver):
    """The CUDA driver's library; an OSError where there is none on this machine."""

    maker, prefix = "CUDA", "cu"

    def __init__(self, name: str | None = None):
        self._lib = ctypes.CDLL(name or ("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self.call("cuInit", 0)

    def _words_of(self, code: int) -> str:
        words = ctypes.c_char_p()
        self._lib.cuGetErrorString(code, ctypes.byref(words))
        return words.value.decode() if words.value else ""

    def _context(self, index: int) -> ctypes.c_void_p:
        """The primary context of a device, which is torch's; retained once."""
        with self._lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(device), index)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context
            return self._contexts[index]

    def on(self, index: int) -> AbstractContextManager[None]:
        """A context is pushed only where another one is current than the device's."""
        context, current = self._contexts.get(index) or self._context(index), ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        return nullcontext() if current.value == context.value else self._pushed(context)

    @contextmanager
    def _pushed(self, context: ctypes.c_void_p) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allow_shared(self, index: int, function: ctypes.c_void_p, count: int) -> None:
        """Above 48 KiB that has to be said before a launch."""
        with self.on(index):
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, count)

    def _launch(self, params: Params, *how: object) -> None:
        self.call("cuLaunchKernel", *how, _POINTERS(ctypes.addressof(params)), None)


cuda_driver = functools.cache(CudaDriver)


class CudaRuntime(GpuRuntime):
    """NVIDIA's driver, and NVRTC: ``find_compiler`` takes an architecture as a number, 61 for sm_61."""

    open_driver, find_compiler = staticmethod(cuda_driver), staticmethod(nvrtc.find)
    driver_name, compiler_name = "CUDA driver", "NVRTC"
    where_compiler_is = "; pip install nvidia-cuda-nvrtc-cu12"

    def arch(self, info: DeviceInfo) -> str:
        major, minor = info.capability or (0, 0)
        return f"sm_{major}{minor}"

    def refusal(self, info: DeviceInfo) -> str:
        if info.capability is None or info.capability < (5, 0):
            found = "an unknown one" if info.capability is None else f"{info.capability[0]}.{info.capability[1]}"
            return f"the fused kernel needs compute capability 5.0, got {found}"
        return ""

    def driver_version(self) -> str:
        return ask_driver()

    def compiler(self, arch: str) -> nvrtc.Nvrtc | None:
        return self.find_compiler(_number(arch))

    def compile(self, variant: Compilation, arch: str) -> bytes:
        macros = variant.macros()
        if _number(arch) >= 80 and "PA_INTEGER_PACKED" in macros:  # one fast instruction rounds two numbers there
            macros["PA_INTEGER_PACKED"] = 0
        cubin: bytes = self._compiler(arch).compile(source(variant.kind), _number(arch), macros).cubin
        return cubin


def _number(arch: str) -> int:
    """``"sm_61"`` -> 61."""
    return int(arch.removeprefix("sm_"))
