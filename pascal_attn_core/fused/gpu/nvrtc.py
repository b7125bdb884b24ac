"""NVRTC, NVIDIA's runtime compiler, through ctypes: it needs no driver, no toolkit and no other compiler. torch's
CUDA 12 wheels bring it; CUDA 13's compiles for sm_75 and newer only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .runtime import CompileError, RuntimeCompiler, loaded

log = logging.getLogger("pascal_attn")
OPTIONS = ("--std=c++14", "-w", "--ptxas-options=-v")


class Compiled(NamedTuple):
    """A cubin, and the log in which ptxas reports registers, spills and shared memory."""

    cubin: bytes
    log: str


def usage(log: str) -> tuple[list[tuple[int, int]], int]:
    """([(registers per thread, spilled bytes) of each function], largest shared memory of a block in bytes) that the
    log of a compilation reports."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
    return list(zip(registers, spills, strict=True)), max(shared, default=0)


class Nvrtc(RuntimeCompiler):
    """One NVRTC library, and its builtins."""

    prefix = "nvrtc"

    def __init__(self, path: str):
        if os.path.isabs(path):
            for builtins in sorted(Path(path).parent.glob("*nvrtc-builtins*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(builtins))  # opened by name at a compilation; CUDA 13's is not looked for there
        super().__init__(path)

    def archs(self) -> list[int]:
        """Architectures it compiles for: 61 is sm_61."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", archs)
        return list(archs)

    def compile(self, text: str, arch: int, macros: dict[str, object]) -> Compiled:
        """Machine code of one source text; a CompileError with the compiler's log where it refuses it."""
        options = [*OPTIONS, f"--gpu-architecture=sm_{arch}", *(f"-D{name}={value}" for name, value in macros.items())]
        return Compiled(*self._compiled(text, f"sm_{arch}", options, "CUBIN"))

    def serves(self, arch: int) -> bool:
        """Whether it compiles for an architecture, as it says and in fact."""
        try:
            return arch in self.archs() and bool(self.compile('extern "C" __global__ void nothing() {}', arch, {}))
        except CompileError as error:
            log.info("%s does not compile: %s", self.path, error)
            return False


def _folders() -> Iterator[Path]:
    """Where wheels put it: NVIDIA's own packages, and torch's (on Windows)."""
    for package, patterns in (("nvidia", ("*/lib", "*/bin", "*/bin/x86_64")), ("torch", ("lib",))):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for pattern in patterns:
                yield from sorted(Path(root).glob(pattern))


def candidates() -> list[str]:
    """Files and names that may be NVRTC, in the order in which they are tried."""
    pattern = "nvrtc64_*.dll" if sys.platform == "win32" else "libnvrtc.so*"
    found = [str(path) for folder in _folders() for path in sorted(folder.glob(pattern)) if "alt" not in path.name]
    names = ["nvrtc64_120_0.dll"] if sys.platform == "win32" else ["libnvrtc.so.12", "libnvrtc.so"]
    return [*found, *names]


@functools.cache
def find(arch: int) -> Nvrtc | None:
    """An NVRTC on this machine that compiles for sm_<arch>, or None."""
    return next((library for library in loaded(Nvrtc, candidates()) if library.serves(arch)), None)
