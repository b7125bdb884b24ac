"""Where the HIP runtime and HIPRTC lie: with torch's ROCm wheels in ``torch/lib``, with those of TheRock in a package
``_rocm_sdk_core``, else in the system's ROCm.

The runtime must be the copy that torch has loaded: another one would know none of torch's streams and memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ...config import variables

RUNTIME, COMPILER = "amdhip64", "hiprtc"
_MAPS = Path("/proc/self/maps")
_SYSTEM = (Path("/opt/rocm/lib"), Path("/usr/lib/x86_64-linux-gnu"))
_MAJORS = (7, 6, 5)
_LONGEST_PATH = 32767  # of Windows, in characters


def loaded_runtime(maps: Path = _MAPS) -> str | None:
    """The file of the HIP runtime that this process has loaded already, or None."""
    if sys.platform == "win32":
        return _loaded_dll()
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    # address, permissions, offset, device, inode, and the path, which may hold spaces
    paths = [parts[5] for line in lines if len(parts := line.split(None, 5)) == 6]
    # Tools that repair wheels put a hash into the names of libraries.
    names = ((os.path.basename(path), path) for path in paths)
    return next((path for name, path in names if name.startswith(f"lib{RUNTIME}") and ".so" in name), None)


def _loaded_dll() -> str | None:
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009  it exists on Windows only
    kernel32.GetModuleHandleW.restype = ctypes.c_void_p
    for name in _dll_names(RUNTIME):
        if handle := kernel32.GetModuleHandleW(ctypes.c_wchar_p(name)):
            path = ctypes.create_unicode_buffer(_LONGEST_PATH)
            kernel32.GetModuleFileNameW(ctypes.c_void_p(handle), path, _LONGEST_PATH)
            return path.value or name
    return None


def _dll_names(what: str) -> list[str]:
    if what == RUNTIME:
        return [*(f"{what}_{major}.dll" for major in _MAJORS), f"{what}.dll"]
    return [f"{what}{major:02}{minor:02}.dll" for major in _MAJORS for minor in range(19, -1, -1)]


def runtime_candidates() -> list[str]:
    """Files and names that may be the HIP runtime, in the order in which they are tried: only what is loaded, if
    anything is."""
    loaded = loaded_runtime()
    return [loaded] if loaded is not None else _candidates(RUNTIME)


def compiler_candidates() -> list[str]:
    """Files and names that may be HIPRTC: what lies beside the loaded runtime goes first, and the runtime itself, which
    held HIPRTC before ROCm 6, comes last."""
    loaded = loaded_runtime()
    beside = [] if loaded is None else _files(Path(loaded).parent, COMPILER)
    return list(dict.fromkeys([*beside, *_candidates(COMPILER), *runtime_candidates()]))


def _candidates(what: str) -> list[str]:
    found = [path for folder in _folders() for path in _files(folder, what)]
    if sys.platform == "win32":
        return [*found, *_dll_names(what)]
    return [*found, f"lib{what}.so", *(f"lib{what}.so.{major}" for major in _MAJORS)]


def _files(folder: Path, what: str) -> list[str]:
    """The libraries of that name in a folder, the newest first."""
    if sys.platform == "win32":
        shape = re.compile(rf"{what}(_?\d+)?\.dll", re.IGNORECASE)  # not hiprtc-builtins
    else:
        shape = re.compile(rf"lib{what}\.so(\.\d+)*")
    try:
        names = sorted((name for name in os.listdir(folder) if shape.fullmatch(name)), reverse=True)
    except OSError:
        return []
    # One library has several names: that which its users ask for goes first.
    return [str(folder / name) for name in sorted(names, key=lambda name: name.count("."))]


def _folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("torch")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root) / "lib"
    for entry in dict.fromkeys(sys.path):  # the package's name may end with the family of cards that it is for
        for package in sorted(Path(entry or ".").glob("_rocm_sdk_core*")):
            yield from (package / "bin", package / "lib")
    if sys.platform == "win32":
        yield from (Path(value) / "bin" for name, value in variables("HIP_PATH").items() if name == "HIP_PATH")
    else:
        yield from _SYSTEM
