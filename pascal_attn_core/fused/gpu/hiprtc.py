"""HIPRTC, AMD's runtime compiler, through ctypes: it needs no GPU, no toolkit and no other compiler. torch's ROCm
wheels bring it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import torch

from . import hip_libraries
from .compiler import RuntimeCompiler, loaded

_ANY = (9, 0)


class Hiprtc(RuntimeCompiler):
    prefix = "hiprtc"

    def __init__(self, path: str):
        super().__init__(path)
        self.version = version_of(self.version, torch.version.hip)

    def compile(self, text: str, arch: str, macros: dict[str, object], options: Sequence[str] = ()) -> bytes:
        """The code object of one source text for an architecture, ``"gfx906"``.

        Raises:
            CompileError: with the compiler's log.
        """
        options = [f"--offload-arch={arch}", *options, *(f"-D{name}={value}" for name, value in macros.items())]
        return self._compiled(text, arch, options, "Code")[0]


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
    return next(loaded(Hiprtc, paths), None)


@functools.cache
def find() -> Hiprtc | None:
    """The HIPRTC of this machine, or None."""
    return load_first(hip_libraries.compiler_candidates())
