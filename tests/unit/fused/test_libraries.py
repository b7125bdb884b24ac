"""Which files of wheels and drivers are taken for runtimes and compilers, by their names on Linux and Windows."""

from __future__ import annotations

import ctypes
from pathlib import Path
from unittest.mock import Mock

import pytest

from pascal_attn_core.fused.gpu import hip_libraries, nvrtc

# Wheels -> system, folder and libraries: the contents of NVIDIA's (pip download --platform), those that documents of
# AMD's name. NVRTC, or the HIP runtime and HIPRTC, come first, in the order in which they are tried.
NVIDIAS = {
    "nvidia-cuda-nvrtc-cu12 12.6.85, Linux": (
        "linux", "nvidia/cuda_nvrtc/lib", ["libnvrtc.so.12", "libnvrtc-builtins.so.12.6"],
    ),
    "nvidia-cuda-nvrtc-cu12 12.6.85, Windows": (
        "win32", "nvidia/cuda_nvrtc/bin", ["nvrtc64_120_0.dll", "nvrtc64_120_0.alt.dll", "nvrtc-builtins64_126.dll"],
    ),
    "nvidia-cuda-nvrtc 13.0.88, Linux": (
        "linux", "nvidia/cu13/lib", ["libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0"],
    ),
    "nvidia-cuda-nvrtc 13.0.88, Windows": (
        "win32", "nvidia/cu13/bin/x86_64", ["nvrtc64_130_0.dll", "nvrtc64_130_0.alt.dll", "nvrtc-builtins64_130.dll"],
    ),
}  # fmt: skip
# ROCm's own package looks for amdhip64*.dll and hiprtc0*.dll in the folder bin of _rocm_sdk_core and, if it has one, an
# ending of a version (TheRock, rocm_sdk/_dist_info.py).
_ROCM_7 = ["libamdhip64.so.7", "libhiprtc.so.7", "libhiprtc-builtins.so.7"]
AMDS = {
    "rocm-sdk-core 7.14, Windows": (
        "win32", "_rocm_sdk_core/bin", ["amdhip64_7.dll", "hiprtc0714.dll", "hiprtc-builtins0714.dll"],
    ),
    "rocm-sdk-core with a version in its name, Windows": (
        "win32", "_rocm_sdk_core_7_2_0/bin", ["amdhip64_7.dll", "hiprtc0702.dll", "hiprtc-builtins0702.dll"],
    ),
    "torch, Linux": ("linux", "torch/lib", ["libamdhip64.so", "libhiprtc.so", *_ROCM_7[2:], "libamdhip64.txt"]),
    "rocm-sdk-core, Linux": ("linux", "_rocm_sdk_core/lib", _ROCM_7),
    "rocm-sdk-core of a family, Linux": ("linux", "_rocm_sdk_core_gfx103x/lib", _ROCM_7),
}  # fmt: skip


def _installed(monkeypatch: pytest.MonkeyPatch, site: Path, system: str, folder: str, files: list[str]) -> Path:
    """Let those files, and no others, be those of packages that are installed."""
    (site / folder).mkdir(parents=True)
    for name in files:
        (site / folder / name).touch()
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Mock(submodule_search_locations=[str(site / name)]))
    return site / folder


def _opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are opened from here on, none of which can be."""
    opened: list[str] = []

    def none(name: str) -> None:
        opened.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", none)
    return opened


@pytest.mark.parametrize("wheel", NVIDIAS)
def test_nvrtc_is_opened_after_its_builtins(wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _installed(monkeypatch, tmp_path, *NVIDIAS[wheel])
    (library, *_, builtins) = NVIDIAS[wheel][2]
    opened = _opened(monkeypatch)
    assert list(nvrtc.loaded(nvrtc.Nvrtc, nvrtc.candidates())) == []
    assert [Path(name).name for name in opened if Path(name).parent == folder] == [builtins, library]


@pytest.mark.parametrize("wheel", AMDS)
def test_hip_is_found_in_wheels_and_by_name_alone(wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _installed(monkeypatch, tmp_path, *AMDS[wheel])
    runtime, compiler = AMDS[wheel][2][:2]
    monkeypatch.setattr(hip_libraries, "loaded_runtime", lambda: None)
    candidates = hip_libraries.runtime_candidates(), hip_libraries.compiler_candidates()
    assert [names[0] for names in candidates] == [str(folder / runtime), str(folder / compiler)]
    assert not any("builtins" in name or name.endswith(".txt") for names in candidates for name in names)
    (folder / compiler).unlink()
    assert compiler in hip_libraries.compiler_candidates()


def test_torchs_runtime_and_the_compiler_beside_it_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own copy has the same name; the folder in which the program was started is not looked into."""
    folder = _installed(monkeypatch, tmp_path, *AMDS["rocm-sdk-core 7.14, Windows"])
    (tmp_path / "hiprtc0714.dll").touch()
    monkeypatch.chdir(tmp_path)
    loaded = {"amdhip64_7.dll": 0x7FF0}

    def path_of(handle: ctypes.c_void_p, path: ctypes.Array[ctypes.c_wchar], size: int) -> int:
        assert (handle.value, size) == (0x7FF0, len(path))
        path.value = str(folder / "amdhip64_7.dll")
        return len(path.value)

    kernel32 = Mock(GetModuleHandleW=lambda name: loaded.get(name.value), GetModuleFileNameW=path_of)
    monkeypatch.setattr(ctypes, "windll", Mock(kernel32=kernel32), raising=False)
    assert hip_libraries.runtime_candidates() == [str(folder / "amdhip64_7.dll")]
    assert hip_libraries.compiler_candidates()[0] == str(folder / "hiprtc0714.dll")
    loaded.clear()
    assert hip_libraries.loaded_runtime() is None


@pytest.mark.parametrize("name", ["libamdhip64.so", "libamdhip64-2f6c1e77.so.6"])
def test_torchs_runtime_goes_first_on_linux(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    maps, loaded = tmp_path / "maps", f"/home/some one/venv/lib/python3.12/site-packages/torch/lib/{name}"
    other = loaded.replace(name, "libtorch_hip.so")
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 11 {what}\n" for what in (other, loaded, "", "[heap]")))
    assert hip_libraries.loaded_runtime(maps) == loaded
    assert hip_libraries.loaded_runtime(tmp_path / "nothing") is None
    monkeypatch.setattr(hip_libraries, "loaded_runtime", lambda: loaded)
    assert hip_libraries.runtime_candidates() == [loaded]
    assert hip_libraries.compiler_candidates()[-1] == loaded  # which had HIPRTC in it once
