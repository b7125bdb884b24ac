"""HIPRTC, AMD's runtime compiler, through ctypes: it needs no GPU, no toolkit and no other compiler. torch's ROCm
wheels bring it."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence

import torch

from . import hip_libraries
from .gpu_runtime import CompileError

_ANY = (9, 0)


class Hiprtc:
    """One HIPRTC library.

    Raises:
        OSError: the file is no library that can be loaded here.
        AttributeError: it is not HIPRTC.
    """

    def __init__(self, path: str):
        self.path = path
        self._lib = ctypes.CDLL(path)
        self._lib.hiprtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)), "hiprtcVersion")
        self.version = version_of((major.value, minor.value), torch.version.hip)

    def compile(self, text: str, arch: str, macros: dict[str, object], options: Sequence[str] = ()) -> bytes:
        """The code object of one source text for an architecture, ``"gfx906"``.

        Raises:
            CompileError: with the compiler's log.
        """
        options = [f"--offload-arch={arch}", *options, *(f"-D{name}={value}" for name, value in macros.items())]
        program = ctypes.c_void_p()
        created = self._lib.hiprtcCreateProgram(ctypes.byref(program), text.encode(), b"pascal_attn.hip", 0, None, None)
        self._check(created, "hiprtcCreateProgram")
        try:
            passed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = self._lib.hiprtcCompileProgram(program, len(options), passed)
            if result:
                log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise CompileError(f"{self._error(result)} for {arch}\n{log}")
            return self._fetch(program, "Code")
        finally:
            self._lib.hiprtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"hiprtcGet{what}Size")(program, ctypes.byref(size)), f"hiprtcGet{what}Size")
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._check(getattr(self._lib, f"hiprtcGet{what}")(program, buffer), f"hiprtcGet{what}")
        return buffer.raw[: size.value]

    def _error(self, code: int) -> str:
        return self._lib.hiprtcGetErrorString(code).decode()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise CompileError(f"{what}: {self._error(code)}")


def version_of(said: tuple[int, int], hip: str | None) -> tuple[int, int]:
    """A library's version.

    Args:
        said: by itself: 9.0, whatever it is, in ROCm 5 and 6.
        hip: the version that torch was built with, ``"6.3.42133-1b9c17779"``, and whose compiler its wheels bring.
    """
    found = re.match(r"(\d+)\.(\d+)", hip or "")
    return (int(found[1]), int(found[2])) if found and said == _ANY else said


def load_first(paths: Sequence[str]) -> Hiprtc | None:
    """The first of these that can be loaded and is HIPRTC, or None."""
    for path in paths:
        try:
            return Hiprtc(path)
        except (OSError, AttributeError, CompileError):
            continue  # not there, for another platform, or something else by that name
    return None


@functools.cache
def find() -> Hiprtc | None:
    """The HIPRTC of this machine, or None."""
    return load_first(hip_libraries.compiler_candidates())
