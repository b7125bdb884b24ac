"""Loading and launching cubins through the CUDA driver with ctypes: torch's context, torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .params import Params

_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# What no later call of the process recovers from: the driver is shutting down (4), memory has failed (214, 220, 226),
# some kernel has faulted or run too long (700, 702, 710, 714 to 719), the context is gone (709), unknown (999).
_LOST = {4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 999}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        code: the driver's number for the error, -1 if unknown. The message holds its words, and the function's name.
    """

    def __init__(self, message: str, code: int = -1):
        super().__init__(message)
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY

    @property
    def loses_device(self) -> bool:
        """Whether this process can no longer use the device, by any route. The kernel that is to blame may be another
        than the one that was to be loaded or launched: faults are reported by the next call of the driver."""
        return self.code in _LOST


class Driver:
    """The CUDA driver's library.

    Raises:
        OSError: there is none on this machine.
    """

    def __init__(self, name: str | None = None):
        self._lib = ctypes.CDLL(name or ("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the driver.

        Raises:
            DriverError: it did not return CUDA_SUCCESS.
        """
        code = getattr(self._lib, function)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(words))
            message = f"{function}: {words.value.decode() if words.value else f'error {code}'}"
            if code in _LOST:
                message += f" (CUDA error {code}); this process can no longer use the GPU"
            raise DriverError(message, code)

    def _context(self, index: int) -> ctypes.c_void_p:
        """The primary context of a device, which is torch's; retained once."""
        with self._lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(device), index)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context
            return self._contexts[index]

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """A block in which the device's context is this thread's current one."""
        self.call("cuCtxPushCurrent_v2", self._context(index))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def load(self, index: int, cubin: bytes, functions: tuple[str, ...]) -> dict[str, ctypes.c_void_p]:
        """The functions of a cubin on a device. May be called while a graph is being captured.

        Raises:
            DriverError: the driver does not take this cubin.
        """
        module, handles = ctypes.c_void_p(), {}
        with self.on(index), self._relaxed_capture():
            self.call("cuModuleLoadData", ctypes.byref(module), cubin)
            for name in functions:
                handles[name] = ctypes.c_void_p()
                self.call("cuModuleGetFunction", ctypes.byref(handles[name]), module, name.encode())
        return handles

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        # Loading allocates, which a capture in this thread would otherwise forbid.
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def stream(self, index: int) -> int:
        """The handle of torch's current stream of a device."""
        return torch.cuda.current_stream(index).cuda_stream

    def allow_shared(self, index: int, function: ctypes.c_void_p, count: int) -> None:
        """Let a kernel ask for so many bytes of shared memory at launch: above 48 KiB that has to be said before.

        Raises:
            DriverError: a block on this device cannot have so much.
        """
        with self.on(index):
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, count)

    def launch(
        self,
        index: int,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        threads: int,
        params: Params,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel on torch's current stream of a device. The driver copies the parameters.

        Args:
            shared_bytes: of a block, beside what the kernel declares.
        Raises:
            DriverError: nothing has been queued.
        """
        stream = ctypes.c_void_p(self.stream(index))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        with self.on(index):
            self.call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, stream, pointers, None)


@functools.cache
def driver() -> Driver:
    """The process's driver; see :class:`Driver` for what it raises."""
    return Driver()
