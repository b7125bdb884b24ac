"""The software of a GPU's maker, as far as the kernels need it: a :class:`Driver`, which loads and launches machine
code, and a compiler for what does not ship. CUDA's are in ``cuda.py`` and ``nvrtc.py``, HIP's in ``hip.py``."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from ...machine.device import DeviceInfo
from ..code.compilation import Compilation
from ..code.params import Params

_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
# HIP numbers its errors as the CUDA driver does.
FAULTS = frozenset({700, 702, 710, *range(714, 720)})  # some kernel has faulted or run too long
# What no later call of the process recovers from: besides those, the driver is shutting down (4), memory has failed
# (214, 220, 226), the context is gone (709), unknown (999).
LOST = FAULTS | {4, 214, 220, 226, 709, 999}
# The driver does not take this machine code: no image of a kernel (200), none for this card (209), or made by a newer
# compiler (218, 222).
REFUSED_IMAGE = frozenset({200, 209, 218, 222})


def _stream_of_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Without an object for the stream, where torch can do without.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_object)


class DriverError(RuntimeError):
    """A call of the CUDA driver, or of the HIP runtime, failed.

    Attributes:
        error_code: the driver's number for the error, -1 if unknown; torch's ``AcceleratorError`` calls it so too. The
            message holds its words, and the function's name.
    """

    def __init__(self, message: str, code: int = -1):
        super().__init__(message)
        self.error_code = code

    @property
    def loses_device(self) -> bool:
        """Whether this process can no longer use the device, by any route. The kernel that is to blame may be another
        than the one that was to be loaded or launched: faults are reported by the next call of the driver."""
        return self.error_code in LOST


class CompileError(RuntimeError):
    """A compiler refused the source; the message ends with its log."""


class Driver(ABC):
    """Loads and launches machine code on torch's devices, on torch's current streams.

    Attributes:
        maker: "CUDA" or "HIP"; prefix: of the names of the library's functions: HIP has many of CUDA's by other names.
    """

    maker: str
    prefix: str
    _lib: Any

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the library; a DriverError where it does not succeed."""
        code = getattr(self._lib, function)(*arguments)
        if code:
            message = f"{function}: {self._words_of(code) or f'error {code}'}"
            if code in LOST:
                message += f" ({self.maker} error {code}); this process can no longer use the GPU"
            raise DriverError(message, code)

    @abstractmethod
    def _words_of(self, code: int) -> str:
        """The library's words for an error, "" if it has none."""

    @abstractmethod
    def on(self, index: int) -> AbstractContextManager[None]:
        """A block in which the device is this thread's current one."""

    def load(self, index: int, image: bytes, functions: tuple[str, ...]) -> dict[str, Any]:
        """Handles of the functions of an image on a device; a DriverError where the driver does not take the image. May
        be called while a graph is being captured."""
        module, handles = ctypes.c_void_p(), {}
        with self.on(index), self._relaxed_capture():
            self.call(f"{self.prefix}ModuleLoadData", ctypes.byref(module), image)
            for name in functions:
                handles[name] = ctypes.c_void_p()
                self.call(f"{self.prefix}ModuleGetFunction", ctypes.byref(handles[name]), module, name.encode())
        return handles

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        # Loading allocates, which a capture in this thread would otherwise forbid. ROCm 5.2 had no such function.
        exchange = f"{self.prefix}ThreadExchangeStreamCaptureMode"
        if not hasattr(self._lib, exchange):
            yield
            return
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        self.call(exchange, ctypes.byref(mode))
        try:
            yield
        finally:
            self.call(exchange, ctypes.byref(mode))

    def allow_shared(self, index: int, function: Any, count: int) -> None:
        """Let a kernel ask for this many bytes of shared memory at launch; a DriverError where no block on this device
        can have so much."""
        raise DriverError(f"kernels for {self.maker} must need no dynamic shared memory, got {count} bytes")

    def launch(
        self, stream: int, function: Any, grid: tuple[int, int, int], threads: int, params: Params, shared_bytes: int
    ) -> None:
        """Queue a function of :meth:`load` on a stream of the current device (:meth:`on`); with a DriverError nothing
        has been queued. The driver copies the parameters, one structure.

        Args:
            shared_bytes: of a block, beside what the kernel declares.
        """
        self._launch(params, function, *grid, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream))

    @abstractmethod
    def _launch(self, params: Params, *how: object) -> None:
        """Call the library's function that launches, whose arguments but the last two are ``how``."""

    def stream(self, index: int) -> int:
        """The handle of torch's current stream of a device; torch's ROCm builds give a hipStream_t by this name."""
        return _raw_stream(index)


class RuntimeCompiler:
    """A compiler's library, whose functions' names begin with ``prefix``. An OSError where the file is no library that
    can be loaded here, an AttributeError or CompileError where it is not this compiler."""

    prefix: str

    def __init__(self, path: str):
        self.path = path
        self._lib = ctypes.CDLL(path)
        getattr(self._lib, f"{self.prefix}GetErrorString").restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _compiled(self, text: str, arch: str, options: Sequence[str], code: str) -> tuple[bytes, str]:
        """Machine code of one source text, and the compiler's log; a CompileError with that log and ``arch``. The
        compiler's function for machine code is ``<prefix>Get<code>``."""
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), b"pascal_attn.cu", 0, None, None)
        try:
            passed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = getattr(self._lib, f"{self.prefix}CompileProgram")(program, len(options), passed)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if result:
                raise CompileError(f"{self._error(result)} for {arch}\n{log}")
            return self._fetch(program, code), log
        finally:
            getattr(self._lib, f"{self.prefix}DestroyProgram")(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"Get{what}", program, buffer)
        return buffer.raw[: size.value]

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._lib, self.prefix + function)(*arguments)
        if code:
            raise CompileError(f"{self.prefix}{function}: {self._error(code)}")

    def _error(self, code: int) -> str:
        return getattr(self._lib, f"{self.prefix}GetErrorString")(code).decode()


Library = TypeVar("Library", bound=RuntimeCompiler)


def loaded(kind: type[Library], paths: Iterable[str]) -> Iterator[Library]:
    """The libraries among these files that can be loaded and are this compiler."""
    for path in paths:
        try:
            library = kind(path)
        except (OSError, AttributeError, CompileError):
            continue  # not there, for another platform, or something else by that name
        yield library


class GpuRuntime(ABC):
    """A maker's driver and compiler. Architectures have their compiler's names: ``"sm_61"``, ``"gfx906"``.

    Args:
        open_driver, find_compiler: instead of the maker's: give the process's driver, and a compiler or None. The first
            raises OSError where there is no driver on this machine, DriverError where it cannot be initialised.
    """

    open_driver: Callable[..., Any]
    find_compiler: Callable[..., Any]
    driver_name: str
    compiler_name: str
    where_compiler_is: str  # for a sentence that says that it is missing

    def __init__(
        self, open_driver: Callable[[], Any] | None = None, find_compiler: Callable[..., Any] | None = None
    ) -> None:
        self.open_driver, self.find_compiler = open_driver or self.open_driver, find_compiler or self.find_compiler

    @abstractmethod
    def arch(self, info: DeviceInfo) -> str:
        """The architecture whose machine code a device runs."""

    @abstractmethod
    def refusal(self, info: DeviceInfo) -> str:
        """Why no kernel runs on a device, by its facts alone; "" = nothing is known against it."""

    @abstractmethod
    def driver_version(self) -> str:
        """The version of what is installed on this machine, in one word or two; "" where that is not known."""

    @abstractmethod
    def compiler(self, arch: str) -> Any:
        """A :class:`.RuntimeCompiler` on this machine that compiles for an architecture; None = there is none."""

    def compiler_version(self, arch: str) -> tuple[int, int] | None:
        """The version of :meth:`compiler`; None = there is none."""
        return getattr(self.compiler(arch), "version", None)

    def _compiler(self, arch: str) -> Any:
        """:meth:`compiler`, or a CompileError."""
        compiler = self.compiler(arch)
        if compiler is None:
            raise CompileError(self.no_compiler(arch))
        return compiler

    @abstractmethod
    def compile(self, variant: Compilation, arch: str) -> bytes:
        """Machine code of a variant; a CompileError where there is no compiler, or with its log."""

    def no_compiler(self, arch: str) -> str:
        """A sentence for an architecture without a compiler: what is missing, and how it is had."""
        return f"no {self.compiler_name} for {arch}{self.where_compiler_is}"
