"""AMD's code objects: which of those that ship a card takes, what is compiled for it, by the real HIPRTC where it is
installed; and where the libraries are found."""

from __future__ import annotations

import ctypes
import json
import lzma
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fused.code_objects import code_object
from attn_support.fused.device import UncheckedKernels, always_faster, fresh_card, hip_card, route_of
from attn_support.fused.emulation import GXX
from attn_support.fused.hip import OVERRIDDEN, RADEON_VII, RX_5700, RX_6800, HipCompiler, HipStandIn, plain_launch

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.amd_code import arch_of
from pascal_attn_core.fused.code.source import Variant, digest
from pascal_attn_core.fused.gpu import hip_libraries, hiprtc
from pascal_attn_core.fused.gpu.hip import HipDriver, HipRuntime
from pascal_attn_core.fused.gpu.runtime import CompileError
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime

needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-in for the runtime")
on_linux = pytest.mark.skipif(sys.platform == "win32", reason="what Linux calls its libraries")
VARIANT = Variant("forward", 64, "float32", arch="gfx906")
CODE = code_object(VARIANT)


# A card, and the architecture whose code it runs.
CARDS = [
    (RX_5700, "gfx1010"),
    (RX_6800, "gfx1030"),
    (replace(RX_6800, arch="gfx1031"), "gfx1030"),
    (replace(RX_6800, true_arch="gfx1034"), "gfx1030"),  # an RX 6400 with the override
    (replace(RX_6800, arch="gfx1151"), "gfx1102"),
    (OVERRIDDEN, "gfx1010"),  # an RX 5700 with the override
    (replace(OVERRIDDEN, true_arch="unknown"), "gfx1010"),  # and a system that does not say what it is
]


def _name(value: object) -> str | None:
    return f"{value.arch}-is-{value.known_arch}" if isinstance(value, DeviceInfo) else None


@needs_compiler
@pytest.mark.parametrize(
    ("info", "made_for"), [*CARDS, *((replace(RX_5700, arch=arch), arch) for arch in ("gfx1013", "gfx1201"))], ids=_name
)
def test_the_code_is_for_what_the_card_is_and_named_as_it_is_taken_for(info: DeviceInfo, made_for: str) -> None:
    """The stand-in refuses a code object of another name, and one with dot products on a card that has none."""
    with hip_card(info) as kernels:
        assert route_of(*[torch.randn(1, 32, 256, 64).half()] * 3, window=(9, 0)) == "fused"
        launch = kernels.queued[0]
        compiler = kernels.gpu.find_compiler()
        (code,) = kernels.driver.variants
    assert compiler.archs == [made_for]
    assert arch_of(code) == info.arch
    assert (launch.variant.geometry.pairs > 0) == (made_for not in ("gfx1010", "gfx1013"))


@needs_compiler
def test_what_has_been_compiled_once_comes_from_the_disk(tmp_path: Path) -> None:
    compiler = HipCompiler()

    def kernels(info: DeviceInfo) -> Kernels:
        gpu = HipRuntime(lambda: HipStandIn(info), lambda: compiler)
        return Kernels(Runtime("cuda:0", info), gpu=gpu, shipped=lambda *_: None, folder=lambda: tmp_path)

    def code(info: DeviceInfo) -> bytes:
        made = kernels(info)
        return made.machine_code(replace(VARIANT, arch=made.arch))

    assert code(RADEON_VII) == code(RADEON_VII) == CODE
    assert len(compiler.compiled) == 1
    assert kernels(RADEON_VII).existing_code(VARIANT)[1] == "disk cache"
    assert kernels(RX_6800).existing_code(replace(VARIANT, arch="gfx1030")) == (None, "HIPRTC 6.3")
    assert arch_of(code(RX_5700)) == "gfx1010"
    assert arch_of(code(OVERRIDDEN)) == "gfx1030"
    assert len(compiler.compiled) == 3


def test_without_a_compiler_the_reason_names_what_brings_it() -> None:
    kernels = Kernels(Runtime("cuda:0", RADEON_VII), gpu=HipRuntime(object, lambda: None), shipped=lambda *_: None)
    with pytest.raises(
        KernelUnavailable, match="not prebuilt, and no HIPRTC for gfx906, which torch's ROCm wheels bring"
    ):
        kernels.machine_code(VARIANT)


def test_a_compiler_that_makes_something_else_is_a_reason() -> None:
    class Other(HipCompiler):
        def compile(self, *given: Any, **options: Any) -> bytes:
            return b"something else"

    kernels = Kernels(
        Runtime("cuda:0", RADEON_VII),
        gpu=HipRuntime(object, Other),
        shipped=lambda *_: None,
        folder=lambda: None,
    )
    with pytest.raises(KernelUnavailable, match="HIPRTC made no code object for gfx906: not a 64-bit ELF file"):
        kernels.machine_code(VARIANT)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packs of one variant for three architectures, as ``tools/amd.py`` writes them."""
    variants = [Variant("split", 32, "float16", padded=True, arch=arch) for arch in ("gfx1010", "gfx1030", "gfx1102")]
    packs = {}
    for variant in variants:
        code = b"another" + code_object(variant)
        packs[prebuilt.amd_pack_name(variant)] = {variant.name: [7, len(code)]}
        (tmp_path / prebuilt.amd_pack_name(variant)).write_bytes(lzma.compress(code))
    digests = {variant.name: digest(variant) for variant in variants}
    (tmp_path / "amd.json").write_text(json.dumps({"clang": "16.0.6", "digests": digests, "packs": packs}))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    prebuilt.manifest.cache_clear()
    prebuilt._unpacked.cache_clear()
    yield
    prebuilt.manifest.cache_clear()
    prebuilt._unpacked.cache_clear()


@needs_compiler
@pytest.mark.parametrize(("info", "made_for"), CARDS, ids=_name)
def test_which_shipped_code_a_card_takes(shipped: None, info: DeviceInfo, made_for: str) -> None:
    with fresh_card(HipStandIn(info), always_faster, kind=UncheckedKernels) as kernels:
        assert route_of(*[torch.randn(1, 1, 60, 16).half()] * 3, window=(9, 0)) == "fused"
        compiler = kernels.gpu.find_compiler()
        (code,) = kernels.driver.variants
        assert kernels.existing_code(kernels.queued[0].variant)[1] == "shipped"
    assert compiler.compiled == []
    assert f"split-32-padded-float16-none-{made_for}".encode() in code  # as its compiler named it
    assert arch_of(code) == info.arch


def test_what_does_not_ship_for_an_architecture_is_compiled(shipped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant("split", 32, "float16", padded=True, arch="gfx1013")
    assert prebuilt.ships_for("gfx1010")
    assert not prebuilt.ships_for("gfx1013")  # which is like a gfx1010 but for some instructions
    assert prebuilt.find(variant, "gfx1013") is None
    assert prebuilt.variants_for("gfx1013") == prebuilt.variants_for("gfx906") == []
    monkeypatch.setattr(prebuilt, "digest", lambda variant: "of another source")
    assert prebuilt.find(replace(variant, arch="gfx1010"), "gfx1010") is None


LIBRARY = hiprtc.find()
needs_hiprtc = pytest.mark.skipif(LIBRARY is None, reason="needs HIPRTC (Debian: libamdhip64-5)")


def test_a_compiler_that_does_not_tell_its_version_has_torchs() -> None:
    assert hiprtc.version_of((9, 0), "6.3.42133-1b9c17779") == (6, 3)
    assert hiprtc.version_of((7, 1), "6.3.42133") == (7, 1)
    assert hiprtc.version_of((9, 0), None) == (9, 0)


@needs_compiler
@needs_hiprtc
@pytest.mark.parametrize("info", [RADEON_VII, OVERRIDDEN], ids=lambda info: f"{info.arch}-is-{info.known_arch}")
def test_what_the_real_compiler_makes_of_a_kernel_is_loaded_and_takes_our_arguments(info: DeviceInfo) -> None:
    driver = HipStandIn(info)
    gpu = HipRuntime(lambda: driver)
    arch = gpu.arch(info)
    launch = plain_launch(arch, torch.float16)
    code = gpu.compile(launch.variant, arch)
    assert arch_of(code) == info.arch
    driver.variants[code] = launch.variant
    handle = driver.load(0, code, ("pa_forward",))["pa_forward"]
    driver.launch(0, handle, launch.grid, launch.threads, launch.params)  # checks LDS, registers, waves and arguments
    assert not driver.problems


@needs_hiprtc
def test_the_real_compiler_says_what_is_wrong() -> None:
    assert LIBRARY is not None
    with pytest.raises(
        CompileError, match=r"(?s)HIPRTC_ERROR_COMPILATION for gfx906\n.*undeclared identifier 'nothing'"
    ):
        LIBRARY.compile("__global__ void wrong() { nothing; }", "gfx906", {})
    assert hiprtc.load_first(["no-such-library.so"]) is None


@needs_hiprtc
def test_the_real_runtime_has_every_function_that_is_called() -> None:
    """The runtime goes no further than hipInit without a card."""
    runtime = ctypes.CDLL(hip_libraries.runtime_candidates()[0])
    for function in HipStandIn.arguments:
        assert getattr(runtime, function)


# ---- where the libraries lie -----------------------------------------------------------------------------------------


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /home/some one/venv/lib/python3.12/site-packages/torch/lib/libtorch_hip.so
7f02-7f03 r--p 00000000 08:01 12 /home/some one/venv/lib/python3.12/site-packages/torch/lib/libamdhip64.so
7f04-7f05 rw-p 00000000 00:00 0
7f06-7f07 rw-p 00000000 00:00 0 [heap]
"""


@on_linux
def test_the_runtime_that_torch_has_loaded_goes_before_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    folder = "/home/some one/venv/lib/python3.12/site-packages/torch/lib"
    assert hip_libraries.loaded_runtime(maps) == f"{folder}/libamdhip64.so"
    maps.write_text(MAPS.replace("libamdhip64.so", "libamdhip64-2f6c1e77.so.6"))
    assert hip_libraries.loaded_runtime(maps) == f"{folder}/libamdhip64-2f6c1e77.so.6"
    assert hip_libraries.loaded_runtime(tmp_path / "nothing") is None
    monkeypatch.setattr(hip_libraries, "loaded_runtime", lambda: f"{folder}/libamdhip64.so")
    assert hip_libraries.runtime_candidates() == [f"{folder}/libamdhip64.so"]
    assert hip_libraries.compiler_candidates()[-1] == f"{folder}/libamdhip64.so"  # which had HIPRTC in it once


@on_linux
@pytest.mark.parametrize(
    ("package", "file", "what"),
    [
        ("torch/lib", "libamdhip64.so", "runtime"),
        ("torch/lib", "libhiprtc.so", "compiler"),
        ("_rocm_sdk_core/lib", "libamdhip64.so.7", "runtime"),
        ("_rocm_sdk_core_gfx103x/lib", "libhiprtc.so.7", "compiler"),
    ],
)
def test_libraries_are_found_where_wheels_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str, what: str
) -> None:
    (tmp_path / package).mkdir(parents=True)
    place = tmp_path / package / file
    for name in (file, "libhiprtc-builtins.so.7", "libamdhip64.txt"):
        (tmp_path / package / name).touch()
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hip_libraries, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(hip_libraries, "loaded_runtime", lambda: None)
    monkeypatch.setattr(
        hip_libraries.importlib.util,
        "find_spec",
        lambda name: types.SimpleNamespace(submodule_search_locations=[str(tmp_path / name)]),
    )
    found = getattr(hip_libraries, f"{what}_candidates")()
    assert found[0] == str(place)
    assert not any("builtins" in name or name.endswith(".txt") for name in found)


def test_a_library_that_is_no_hip_runtime_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "libamdhip64.so").write_bytes(b"not a library")
    with pytest.raises(OSError, match="torch has loaded no HIP runtime"):
        HipDriver([str(tmp_path / "libamdhip64.so"), "libc.so.6"])
