"""A runtime compiler's library: HIPRTC's functions are NVRTC's by other names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from .runtime import CompileError


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
