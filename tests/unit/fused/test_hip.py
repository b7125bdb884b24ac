"""AMD cards behind a strict stand-in for the HIP runtime: which calls and code they take."""

import ctypes
import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused import hip as amd
from attn_support.fused.code_objects import code_object
from attn_support.fused.device import UncheckedKernels, always_faster, fresh_card, hip_card, route_of
from attn_support.randomness import some

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, sdpa
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.amd_code import arch_of
from pascal_attn_core.fused.code.source import Variant, digest
from pascal_attn_core.fused.gpu import hip, hip_libraries
from pascal_attn_core.fused.gpu.hip import HipRuntime
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime

WINDOW = {"window": (9, 0)}
FUSED = AttentionConfig(route="fused")


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 60, 16, dtype=dtype) for _ in range(3)]


def test_matrix_units_are_for_16_bits_from_gfx11_on_and_8_bit_attention_needs_dot_products() -> None:
    half, int8 = _inputs(torch.float16), AttentionConfig(route="fused-int8")
    with hip_card(amd.RX_5700):
        with pytest.raises(UnsupportedAttention, match="needs dot products of 8-bit integers, which gfx1010 has not"):
            sdpa(*half, config=int8)
        assert route_of(*half, **WINDOW) == "fused"
    with hip_card(amd.RX_7600):
        assert [route_of(*_inputs(dtype), **WINDOW) for dtype in (torch.float16, torch.bfloat16, torch.float32)] == [
            "fused-tensor", "fused-tensor", "fused"
        ]  # fmt: skip
    for info in (amd.RADEON_VII, amd.RX_6800):
        with hip_card(info) as kernels:
            assert explain(*half, config=int8).startswith("route fused-int8")
            sdpa(*half, config=int8)
            assert kernels.queued[-1].variant.name == f"int8-64-float16-none-{info.arch}"


# A card, and the architecture whose code it runs.
CARDS = [
    (amd.RX_5700, "gfx1010"),
    (amd.RX_6800, "gfx1030"),
    (replace(amd.RX_6800, arch="gfx1031"), "gfx1030"),
    (replace(amd.RX_6800, true_arch="gfx1034"), "gfx1030"),  # an RX 6400 with the override
    (replace(amd.RX_6800, arch="gfx1151"), "gfx1102"),
    (amd.OVERRIDDEN, "gfx1010"),  # an RX 5700 with the override
    (replace(amd.OVERRIDDEN, true_arch="unknown"), "gfx1010"),  # and a system that does not say what it is
]


def _name(value: object) -> str | None:
    return f"{value.arch}-is-{value.known_arch}" if isinstance(value, DeviceInfo) else None


@pytest.mark.parametrize(
    ("info", "made_for"),
    [(amd.RADEON_VII, "gfx906"), *CARDS, *((replace(amd.RX_5700, arch=arch), arch) for arch in ("gfx1013", "gfx1201"))],
    ids=_name,
)
def test_the_code_is_for_what_the_card_is_and_named_as_it_is_taken_for(info: DeviceInfo, made_for: str) -> None:
    """The stand-in refuses a code object of another name, and one with dot products on a card that has none."""
    with hip_card(info) as kernels:
        inputs = [torch.randn(1, 32, 256, 64).half()] * 3
        assert route_of(*inputs, **WINDOW, config=FUSED) == "fused"
        assert explain(*inputs, **WINDOW).startswith("route fused")
        launch = kernels.queued[0]
        compiler = kernels.gpu.find_compiler()
        (code,) = kernels.driver.variants
    assert compiler.archs == [made_for]
    assert arch_of(code) == info.arch
    assert (launch.variant.dtype, launch.params.lq, launch.params.lk) == ("float16", 256, 256)
    assert (launch.variant.geometry.pairs > 0) == (made_for not in ("gfx1010", "gfx1013"))


@pytest.mark.parametrize(
    ("find_compiler", "reason"),
    [
        (lambda: None, "not prebuilt, and no HIPRTC for gfx906, which torch's ROCm wheels bring"),
        (lambda: Mock(version=(6, 3), compile=lambda *_: b"?"), "no code object for gfx906: not a 64-bit ELF file"),
    ],
)
def test_without_a_compiler_of_code_objects_there_is_a_reason(find_compiler: Any, reason: str) -> None:
    gpu = HipRuntime(object, find_compiler)
    kernels = Kernels(Runtime("cuda:0", amd.RADEON_VII), gpu=gpu, shipped=lambda *_: None, folder=lambda: None)
    with pytest.raises(KernelUnavailable, match=reason):
        kernels.machine_code(Variant("forward", 64, "float32", arch="gfx906"))


def _forget() -> None:
    prebuilt.manifest.cache_clear()
    prebuilt._unpacked.cache_clear()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packs of one variant for three architectures, as ``tools/amd.py`` writes them."""
    variants = [Variant("split", 32, "float16", padded=True, arch=arch) for arch in ("gfx1010", "gfx1030", "gfx1102")]
    packs = {}
    for variant in variants:
        code = b"another" + code_object(variant)
        packs[prebuilt.pack_name(variant)] = {variant.name: [7, len(code)]}
        (tmp_path / prebuilt.pack_name(variant)).write_bytes(lzma.compress(code))
    digests = {variant.name: digest(variant) for variant in variants}
    (tmp_path / "amd.json").write_text(json.dumps({"clang": "16.0.6", "digests": digests, "packs": packs}))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    _forget()
    yield
    _forget()


@pytest.mark.parametrize(("info", "made_for"), CARDS, ids=_name)
def test_which_shipped_code_a_card_takes(shipped: None, info: DeviceInfo, made_for: str) -> None:
    with fresh_card(amd.HipStandIn(info), always_faster, kind=UncheckedKernels) as kernels:
        assert route_of(*[torch.randn(1, 1, 60, 16).half()] * 3, window=(9, 0), config=FUSED) == "fused"
        compiler = kernels.gpu.find_compiler()
        (code,) = kernels.driver.variants
        assert kernels.existing_code(kernels.queued[0].variant)[1] == "shipped"
    assert compiler.compiled == []
    assert f"split-32-padded-float16-none-{made_for}".encode() in code  # as its compiler named it
    assert arch_of(code) == info.arch


LIBRARY = hip.hip_compiler()
needs_hiprtc = pytest.mark.skipif(LIBRARY is None, reason="needs HIPRTC (Debian: libamdhip64-5)")


@needs_hiprtc
@pytest.mark.parametrize("info", some([amd.OVERRIDDEN, amd.RADEON_VII], 2), ids=_name)
def test_what_the_real_compiler_makes_of_a_kernel_is_loaded_and_takes_our_arguments(info: DeviceInfo) -> None:
    driver = amd.HipStandIn(info)
    gpu = HipRuntime(lambda: driver)
    arch = gpu.arch(info)
    launch = amd.plain_launch(arch, torch.float16)
    code = gpu.compile(launch.variant, arch)
    assert arch_of(code) == info.arch
    driver.variants[code] = launch.variant
    handle = driver.load(0, code, ("pa_forward",))["pa_forward"]
    # Checks LDS, registers, waves and arguments.
    driver.launch(0, handle, launch.grid, launch.threads, launch.params, 0)
    assert not driver.problems


@needs_hiprtc
def test_the_real_runtime_has_every_function_that_is_called() -> None:
    """The runtime goes no further than hipInit without a card."""
    runtime = ctypes.CDLL(hip_libraries.runtime_candidates()[0])
    for function in amd.HipStandIn.arguments:
        assert getattr(runtime, function)
