"""AMD cards behind a strict stand-in for the HIP runtime: which calls are taken, what is launched, and what a failing
runtime means for a call."""

from __future__ import annotations

import ctypes
import re
import sys

import pytest
import torch
from attn_support.fused.code_objects import code_object
from attn_support.fused.device import hip_card, route_of
from attn_support.fused.emulation import GXX
from attn_support.fused.hip import RADEON_VII, RX_5700, RX_6800, HipStandIn, plain_launch

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, sdpa
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu.hip import HipRuntime
from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.machine.device import DeviceInfo

needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-in for the runtime")
WINDOW = {"window": (9, 0)}
VARIANT = Variant("forward", 64, "float32", arch="gfx906")
CODE = code_object(VARIANT)


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 60, 16, dtype=dtype) for _ in range(3)]


# ---- the route -------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("info", [RADEON_VII, RX_5700, RX_6800], ids=lambda info: info.arch)
def test_auto_takes_the_kernels_on_cards_for_which_torch_has_none(info: DeviceInfo) -> None:
    with hip_card(info) as kernels:
        inputs = _inputs(torch.float16)
        assert route_of(*inputs, **WINDOW) == "fused"
        assert explain(*inputs, **WINDOW).startswith("route fused")
        launch = kernels.queued[0]
    assert (launch.variant.arch, launch.variant.dtype) == (info.arch, "float16")
    assert launch.params.lq == launch.params.lk == 60


@needs_compiler
def test_tensor_cores_are_nvidias_and_8_bit_attention_needs_dot_products() -> None:
    half, int8 = _inputs(torch.float16), AttentionConfig(route="fused-int8")
    with hip_card(RX_5700):
        for config, words in (
            (int8, "the int8 mode needs dot products of 8-bit integers, which gfx1010 has not"),
            (AttentionConfig(route="fused-tensor"), "the kernel on tensor cores needs an NVIDIA GPU"),
        ):
            with pytest.raises(UnsupportedAttention, match=words):
                sdpa(*half, config=config)
        assert route_of(*half, **WINDOW) == "fused"
    for info in (RADEON_VII, RX_6800):
        with hip_card(info) as kernels:
            assert explain(*half, config=int8).startswith("route fused-int8")
            sdpa(*half, config=int8)
            assert kernels.queued[-1].variant.name == f"int8-64-float16-none-{info.arch}"


# ---- launches --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_what_was_loaded_lives_as_long_as_the_runtime() -> None:
    driver = HipStandIn()
    image = bytes(bytearray(CODE))
    driver.variants = {CODE: VARIANT}
    count = sys.getrefcount(image)
    driver.load(0, image, ("pa_forward",))
    assert sys.getrefcount(image) == count + 1


def test_a_grid_has_fewer_than_two_to_the_32_threads() -> None:
    launch = plain_launch()
    wide = launch._replace(grid=(1 << 25, 1, 1))
    found = parts(wide, 1 << 62)
    assert sum(part.grid[0] for part in found) == 1 << 25
    assert max(part.grid[0] * part.threads for part in found) < 1 << 32


@needs_compiler
def test_more_lds_than_a_block_can_have_is_refused() -> None:
    driver = HipStandIn()
    driver.allow_shared(0, ctypes.c_void_p(1), 65536)
    with pytest.raises(DriverError, match="65540 bytes of shared memory > 65536"):
        driver.allow_shared(0, ctypes.c_void_p(1), 65540)


@needs_compiler
def test_the_runtime_tells_its_version() -> None:
    assert HipStandIn().version == "6.3.42133"
    assert re.match(r"HIP 6\.3\.42133, \S+", HipRuntime(HipStandIn).driver_version())
    silent = HipStandIn()
    silent.faults["hipRuntimeGetVersion"] = 1
    assert HipRuntime(lambda: silent).driver_version() == ""
