"""Runs the launches of the fused route on a CPU: the very CUDA source, built with g++ behind ``emulator``."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pascal_attn_core.fused.code import params
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.machine.device import DeviceInfo

HERE = Path(__file__).parent / "emulator"
BUILD = Path(tempfile.gettempdir()) / f"pascal-attn-emulation-{os.getuid() if hasattr(os, 'getuid') else 0}"
GXX = shutil.which("g++")
_CPU = Path("/proc/cpuinfo")
# Else each conversion of a half, and each fmaf, is a call into a library.
_OF_PROCESSOR = tuple(f"-m{what}" for what in ("f16c", "fma") if _CPU.exists() and f" {what} " in _CPU.read_text())
# Hundreds of kernels are compiled, and most of them run for a moment: -O1 takes a third longer and runs no faster.
_OF_KERNELS = ("-Og",)
_AROUND = tuple(HERE / f"{name}.cpp" for name in ("fibers", "warp", "races"))
# Without that of C++, which takes a tenth of the time.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc", "-lc")
ADDRESS_SANITIZER = ("-fsanitize=address", "-g1")
# Kernels that tell races.cpp of each access, in place of the sanitizer's own library.
RACES = ("-DPA_RACES", "-nodefaultlibs", "-fno-exceptions", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
# A small card, so that small calls are split as large ones are.
CARD = DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28, l2_bytes=2816 << 10)
# With tensor cores.
T4 = DeviceInfo("cuda", "Tesla T4", capability=(7, 5), num_sms=40, l2_bytes=4096 << 10)
V100 = DeviceInfo("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0), num_sms=80, l2_bytes=6144 << 10)
# The structure of parameters of the kernels whose names match, the first that does.
_PARAMS = {
    "pa_pack.*": "Pack",
    "pa_int8.*": "Int8Attention",
    "pa_linear_quantize": "QuantizeRows",
    "pa_linear.*": "Linear",
    "pa_gguf_round.*": "GgufRound",
    "pa_gguf_(linear|few|some)": "GgufLinear",
    "pa_gguf.*": "GgufExpand",
    "pa_.*even.*": "TensorEven",
    "pa_(tensor|volta)_(grad.*|delta)|pa_gradient_bits": "TensorBackward",
    "pa_(tensor|volta|wmma).*|pa_mask_bits": "TensorForward",
    "pa_(delta_all|grad_all|round_query)": "AllGradients",
    "pa_(delta|grad.*)": "Backward",
    "pa_.*": "Forward",
}


def params_of(kernel: str) -> str:
    """The name of the structure that a kernel takes."""
    return next(name for pattern, name in _PARAMS.items() if re.fullmatch(pattern, kernel))


def structure_of(kernel: str) -> type[params.Params]:
    """The structure that the host fills for a kernel."""
    return params.CappedForward if kernel.startswith("pa_capped") else getattr(params, params_of(kernel))


class Deadlock(RuntimeError):
    """Threads of a block wait at different barriers."""


class Race(RuntimeError):
    """A thread reads what another one has written, or writes over it, and no barrier or fence is between."""


class LeftOut(NamedTuple):
    """A kernel's source without one of its statements: see :func:`each_left_out`."""

    text: str
    place: int


def each_left_out(text: str, statements: Iterable[re.Match[str]]) -> Iterator[tuple[LeftOut, str]]:
    """A source without one of the statements that were found, one after the other, and the line where it stands. All
    are one text, in which numbers name the statements, so that it is compiled once."""
    found, pieces, end = list(statements), [], 0
    for place, match in enumerate(found):
        pieces += [text[end : match.start()], f"EMU_PLACE({place}, {match[0]})"]
        end = match.end()
    numbered = "".join([*pieces, text[end:]])
    for place, match in enumerate(found):
        line = text[text.rfind("\n", 0, match.start()) + 1 : text.index("\n", match.start())]
        yield LeftOut(numbered, place), line.strip()


def _key(*texts: str) -> str:
    """The name of a file of ``BUILD``: made of these texts, the emulator and the machine's kind."""
    return hashlib.sha256("\0".join([*texts, _emulator(), *_OF_PROCESSOR]).encode()).hexdigest()[:24]


@functools.cache
def _emulator() -> str:
    return "".join(path.read_text() for path in [*sorted(HERE.glob("*.h")), HERE / "kernel.cpp", *_AROUND])


def built_once(name: str, arguments: Iterable[str | Path], what: str) -> Path:
    """A file of ``BUILD``, made with g++ unless it is there."""
    built = BUILD / name
    if not built.exists():
        if GXX is None:
            pytest.skip("needs g++ to build the emulation and the stand-ins for drivers")
        BUILD.mkdir(exist_ok=True)
        unfinished = built.with_name(f"{built.stem}-{os.getpid()}-{threading.get_native_id()}{built.suffix}")
        common = GXX, "-std=c++17", "-ffp-contract=off", "-fPIC", "-w", *_OF_PROCESSOR, f"-I{HERE}"
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # it loads torch
        command = [*common, *map(str, arguments), "-o", unfinished]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(f"g++ refused {what}:\n{done.stderr[:4000]}")
        unfinished.replace(built)
    return built


@functools.cache
def _around(wave: str, flags: tuple[str, ...]) -> Path:
    """The part that runs any kernel, as an object file: optimised, since it is compiled once."""
    flags = flags[:2] if flags == RACES else flags
    arguments = ["-O3", f"-DPA_WAVE={wave}", *flags, *_AROUND, "-r", "-nostdlib"]
    return built_once(f"{_key('around', wave, *flags)}.o", arguments, "the emulator")


@functools.cache
def build(variant: Compilation, text: str | None = None, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The variant as a shared library; ``text`` in place of its own source, for mutations."""
    text = source(variant.kind) if text is None else text
    kernels = {name: params_of(name) for name in variant.functions}
    return build_text(text, kernels, {name: str(value) for name, value in variant.macros().items()}, flags)


def build_text(
    text: str, kernels: dict[str, str], macros: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """Any CUDA source as a shared library; ``kernels``: name -> type of its one parameter."""
    named = " ".join(f"X({name},{params})" for name, params in kernels.items())
    defined = [f"-D{name}={value}" for name, value in (macros or {}).items()]
    around = _around((macros or {}).get("PA_WAVE", "32"), flags)
    how = ("-O1", *flags) if flags else _OF_KERNELS
    key = _key(text, named, around.name, *defined, *how)
    library = BUILD / f"{key}.so"
    if not library.exists():
        source_file = BUILD / f"{key}-{os.getpid()}.cu"
        source_file.write_text(text)
        arguments = [*how, "-DPA_CPU_EMU", f"-DKERNELS(X)={named}", f'-DSOURCE_FILE="{source_file}"', *defined,
                     HERE / "kernel.cpp", around, "-shared", *(() if flags else _LIBRARIES)]  # fmt: skip
        try:
            built_once(library.name, arguments, ", ".join(kernels))
        finally:
            source_file.unlink()
    loaded = ctypes.CDLL(str(library))
    loaded.launch.restype = ctypes.c_long
    return loaded


def run(
    library: ctypes.CDLL,
    name: str,
    grid: tuple[int, int, int],
    threads: int,
    params: Any,
    seed: int = 1,
    together: int = 1,
) -> int:
    """One launch; returns how many block barriers were passed. ``together``: blocks that take turns."""
    size = library.params_size(name.encode())
    assert size == ctypes.sizeof(params), f"{name}: {size} bytes of parameters"
    passed: int = library.launch(
        name.encode(), *grid, threads, ctypes.byref(params), ctypes.c_ulonglong(seed), together
    )
    if passed in (-1, -3):
        raise Deadlock(name) if passed == -1 else Race(name)
    assert passed >= 0, f"no kernel {name}"
    return passed


def blocks_and_passes(library: ctypes.CDLL) -> tuple[int, int]:
    """8 x 8 blocks that ldmatrix has read since the library was loaded, and the passes of shared memory for them: as
    many without bank conflicts."""
    counts = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    library.blocks_and_passes(*(ctypes.byref(count) for count in counts))
    return counts[0].value, counts[1].value


def emulate(
    launches: Iterable[Launch],
    seed: int = 1,
    mutated: Mapping[str, str | LeftOut | None] | None = None,
    flags: tuple[str, ...] = (),
) -> int:
    """Run launches one after the other; returns how many block barriers were passed. Blocks that may work on one tile
    of rows take turns, twelve at a time. ``mutated``: other texts for some kinds of kernels; None: their own."""
    barriers = 0
    for launch in launches:
        text, place = (mutated or {}).get(launch.variant.kind), -1
        if isinstance(text, LeftOut):
            text, place = text
        library = build(launch.variant, text, flags)
        library.leave_out(place)
        together = 12 if launch.variant.is_even or launch.function == "pa_grad_all" else 1
        barriers += run(library, launch.function, launch.grid, launch.threads, launch.params, seed, together)
    return barriers
