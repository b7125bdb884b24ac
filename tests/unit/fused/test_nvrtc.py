"""Which NVRTC is taken, with libraries that behave as NVIDIA's do: built with g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from attn_support import fresh
from attn_support.fused.emulation import GXX

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-ins for NVRTC")
# What is compiled is the word "cubin". It opens its builtins by name, and CUDA 13's has no RUNPATH to find them.
_NVRTC = """
#include <cstring>
#include <dlfcn.h>
static const char* log = "";
extern "C" {
const char* nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE" : "NVRTC_SUCCESS"; }
int nvrtcVersion(int* major, int* minor) { *major = VERSION; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int* archs) { *archs = 75; return 0; }
int nvrtcCreateProgram(void**, const char*, const char*, int, const char**, const char**) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcCompileProgram(void*, int, const char**) {
  if (dlopen(BUILTINS, RTLD_LAZY)) return 0;
  log = "nvrtc: error: failed to open " BUILTINS;
  return 7;
}
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = strlen(log) + 1; return 0; }
int nvrtcGetProgramLog(void*, char* to) { strcpy(to, log); return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = 5; return 0; }
int nvrtcGetCUBIN(void*, char* to) { memcpy(to, "cubin", 5); return 0; }
}
"""
_FIND = """
import sys
from pascal_attn_core.fused.gpu import nvrtc
nvrtc.candidates = lambda: sys.argv[1:]
found = nvrtc.find(75)
print(found and (found.version[0], found.compile("", 75, {}).cubin))
"""


def _built(folder: Path, version: int, *, has_builtins: bool) -> str:
    """The path of such a library in a folder of its own."""
    folder.mkdir()
    name, builtins = f"libnvrtc.so.{version}", f"libnvrtc-builtins.so.{version}.0"
    command = [GXX or "g++", "-x", "c++", "-", "-shared", "-fPIC", "-w"]
    macros = [f"-DVERSION={version}", f'-DBUILTINS="{builtins}"']
    made = {name: (_NVRTC, [*macros, "-ldl"]), builtins: ("", [f"-Wl,-soname,{builtins}"])}
    for file, (text, options) in made.items():
        if file == name or has_builtins:
            arguments = [*command, *options, "-o", str(folder / file)]
            subprocess.run(arguments, input=text.encode(), check=True)
    return str(folder / name)


def test_builtins_beside_the_library_are_found(tmp_path: Path) -> None:
    cuda_13 = _built(tmp_path / "cu13", 13, has_builtins=True)
    assert fresh.run(_FIND, cuda_13) == "(13, b'cubin')"


def test_a_library_that_cannot_compile_is_passed_over_for_one_that_can(tmp_path: Path) -> None:
    broken = _built(tmp_path / "cu13", 13, has_builtins=False)
    cuda_12 = _built(tmp_path / "cuda_nvrtc", 12, has_builtins=True)
    assert fresh.run(_FIND, broken, cuda_12) == "(12, b'cubin')"
    assert fresh.run(_FIND, broken) == "None"
