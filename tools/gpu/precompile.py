"""``python -m tools.gpu precompile --arch 90``: compiles every kernel for a card that is not there, into the cache
folder of this user or of ``XDG_CACHE_HOME``, where a machine with that card and such an NVRTC finds it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence

import torch

from pascal_attn_core.config import cache_folder
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime

from .card import must_compile, variants_of


def kernels_for(arch: int, library: str | None) -> Kernels:
    """The kernels of a card of an architecture, as they are found on a machine with one.

    Args:
        library: the file of NVRTC, None = what this machine has for the architecture.
    Raises:
        OSError: it cannot be opened.
        ValueError: it does not compile for the architecture.
    """
    compiler = nvrtc.find(arch) if library is None else nvrtc.Nvrtc(library)
    if compiler is None or not compiler.serves(arch):
        raise ValueError(f"NVRTC must compile for sm_{arch}, got {library or 'none that does'}")
    card = Runtime(torch.device("cpu"), DeviceInfo("cuda", f"sm_{arch}", divmod(arch, 10)))
    return Kernels(card, gpu=CudaRuntime(find_compiler=lambda _: compiler))


_kernels: Kernels  # of a process that compiles


def _begin(arch: int, library: str | None) -> None:
    global _kernels
    _kernels = kernels_for(arch, library)


def _compile(variant: Compilation) -> str:
    """ "" or why its machine code is not on disk."""
    try:
        _kernels.machine_code(variant)
    except KernelUnavailable as error:
        return f"{variant.name}: {error}"
    return f"{variant.name}: it could not be stored" if must_compile(_kernels, variant) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """1: one could not be compiled or stored; 2: there is no such NVRTC, or no folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu precompile", description=__doc__)
    parser.add_argument("--arch", type=int, required=True, help="compute capability: 90 for 9.0")
    parser.add_argument("--nvrtc", metavar="FILE", help="of the version that the card's machine has: libnvrtc.so.13")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    try:
        kernels, folder = kernels_for(options.arch, options.nvrtc), cache_folder()
        if folder is None:
            raise ValueError("the cache folder must be this user's own; XDG_CACHE_HOME names another")
    except (OSError, ValueError) as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 2
    todo = [variant for variant in variants_of(kernels) if must_compile(kernels, variant)]
    print(f"{len(todo)} kernels to be compiled into {folder}", flush=True)
    context, failed = multiprocessing.get_context("spawn"), 0
    with context.Pool(options.processes, _begin, (options.arch, options.nvrtc)) as pool:
        for number, problem in enumerate(pool.imap_unordered(_compile, todo), 1):
            failed += bool(problem)
            if problem or number % 50 == 0 or number == len(todo):
                print(problem or f"{number} of {len(todo)}", flush=True)
    return 1 if failed else 0
