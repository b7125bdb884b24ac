"""AMD cards behind a strict stand-in for the HIP runtime: which calls are taken, what is launched, what a failing
runtime means for a call, and that the stand-in notices what a real one would not forgive."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.code_objects import code_object
from attn_support.fused.device import CardKernels, hip_card
from attn_support.fused.emulation import GXX
from attn_support.fused.hip import RADEON_VII, RX_5700, RX_6800, HipCompiler, HipStandIn, plain_launch

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, record, sdpa
from pascal_attn_core.fused.code import params
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu.hip import HipDriver, HipRuntime
from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust.kernels import Kernels, parts
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime

needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-in for the runtime")
FUSED = AttentionConfig(route="fused")
WINDOW = {"window": (9, 0)}
VARIANT = Variant("forward", 64, "float32", arch="gfx906")
CODE = code_object(VARIANT)


@pytest.fixture
def card() -> Iterator[CardKernels]:
    with hip_card() as kernels:
        yield kernels


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 60, 16, dtype=dtype) for _ in range(3)]


def _route(inputs: list[torch.Tensor]) -> str:
    with record() as report:
        sdpa(*inputs, **WINDOW)
    (route,) = report.routes()
    return route


# ---- the route -------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("info", [RADEON_VII, RX_5700, RX_6800], ids=lambda info: info.arch)
def test_auto_takes_the_kernels_on_cards_for_which_torch_has_none(info: DeviceInfo) -> None:
    with hip_card(info) as kernels:
        inputs = _inputs(torch.float16)
        assert _route(inputs) == "fused"
        assert explain(*inputs, **WINDOW).startswith("route fused")
        launch = kernels.queued[0]
    assert (launch.variant.arch, launch.variant.dtype) == (info.arch, "float16")
    assert launch.params.lq == launch.params.lk == 60


@needs_compiler
def test_int8_and_tensor_cores_are_nvidias() -> None:
    with hip_card():
        half = _inputs(torch.float16)
        for name, words in (
            ("fused-int8", "the int8 mode needs an NVIDIA GPU"),
            ("fused-tensor", "the kernel on tensor cores needs an NVIDIA GPU"),
        ):
            with pytest.raises(UnsupportedAttention, match=words):
                sdpa(*half, config=AttentionConfig(route=name))
        assert _route(half) == "fused"


@pytest.mark.parametrize(
    ("info", "open_driver", "reason"),
    [
        (replace(RADEON_VII, arch="gfx1100"), object, "there is no fused kernel for gfx1100"),
        (replace(RADEON_VII, arch=""), object, "there is no fused kernel for an unknown architecture"),
        (
            replace(RX_6800, true_arch="gfx906"),
            object,
            "the card is a gfx906, and HSA_OVERRIDE_GFX_VERSION makes it a gfx1030",
        ),
        (
            replace(RX_6800, true_arch="gfx1103"),
            object,
            "the card is a gfx1103, and HSA_OVERRIDE_GFX_VERSION makes it a gfx1030",
        ),
        (
            RADEON_VII,
            lambda: HipDriver(["no-such-library.so"]),
            "the HIP runtime could not be opened: torch has loaded",
        ),
        (replace(RX_5700, arch="gfx1013"), object, "no prebuilt kernel and no HIPRTC for gfx1013"),
    ],
)
def test_a_machine_that_can_run_no_kernel_has_a_reason(info: DeviceInfo, open_driver: Callable, reason: str) -> None:
    kernels = Kernels(Runtime("cuda:0", info), gpu=HipRuntime(open_driver, lambda: None))
    (found,) = kernels.machine_reasons
    assert found.startswith(reason)
    assert kernels.reasons([VARIANT]) == [found]


@needs_compiler
@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("hipModuleLaunchKernel", 719, r"unspecified launch failure \(HIP error 719\); this process can no longer use"),
        ("hipModuleLoadData", 700, r"illegal memory access was encountered \(HIP error 700\); this process can no"),
    ],
)
def test_a_lost_device_is_told_and_blamed_on_no_kernel(card: CardKernels, function: str, code: int, words: str) -> None:
    card.driver.faults[function] = code
    with pytest.raises(DriverError, match=f"{function}: .*{words}"):
        sdpa(*_inputs(), **WINDOW)
    assert not card._failed


# ---- launches --------------------------------------------------------------------------------------------------------


def _queue(driver: HipStandIn, launch: Launch, handle: Any, index: int = 0) -> None:
    driver.launch(index, handle, launch.grid, launch.threads, launch.params)


def _run(driver: HipStandIn, code: bytes = CODE, **changes: Any) -> None:
    driver.variants[code] = VARIANT
    handle = driver.load(0, code, ("pa_forward",))["pa_forward"]
    _queue(driver, plain_launch()._replace(**changes), handle)


def _before_init(driver: HipStandIn) -> None:
    driver._is_ready = False
    driver.load(0, CODE, ("pa_forward",))


def _one_by_one(driver: HipStandIn) -> None:
    handle, launch = driver.load(0, CODE, ("pa_forward",))["pa_forward"], plain_launch()
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(launch.params))
    driver.call("hipModuleLaunchKernel", handle, *launch.grid, launch.threads, 1, 1, 0, None, pointers, None)


def _left_current(driver: HipStandIn) -> None:
    handle = driver.load(0, CODE, ("pa_forward",))["pa_forward"]
    driver.call("hipSetDevice", 1)
    launch = plain_launch()
    driver.call("hipModuleLaunchKernel", handle, *launch.grid, launch.threads, 1, 1, 0, None, None, None)


class _Longer(params.Forward):
    _fields_ = (("more", ctypes.c_longlong),)


WRONG: dict[str, tuple[Callable[[HipStandIn], object], str]] = {
    "before hipInit": (_before_init, "hipGetDevice before hipInit"),
    "no such device": (lambda driver: driver.load(7, CODE, ("pa_forward",)), "device 7 of 2"),
    "no function": (lambda driver: _queue(driver, plain_launch(), ctypes.c_void_p(77)), "0x4d is no function"),
    "another card's function": (
        lambda driver: _queue(driver, plain_launch(), driver.load(1, CODE, ("pa_forward",))["pa_forward"]),
        "pa_forward of device 1 launched on device 0",
    ),
    "another current device": (_left_current, "pa_forward of device 0 launched on device 1"),
    "no grid": (lambda driver: _run(driver, grid=(1, 0, 1)), r"pa_forward: grid \(1, 0, 1\)"),
    "grid too high": (lambda driver: _run(driver, grid=(1, 1, 65536)), r"grid \(1, 1, 65536\)"),
    "grid too wide": (lambda driver: _run(driver, grid=(1 << 24, 1, 1)), r"grid \(16777216, 1, 1\)"),
    "too many threads": (lambda driver: _run(driver, threads=512), "512 threads"),
    "registers": (lambda driver: _run(driver, code=code_object(VARIANT, 260)), "260 registers, 260 registers x 4"),
    "waves": (lambda driver: _run(driver, code=_with_wave_of_32()), "waves of 32"),
    "LDS": (lambda driver: _run(driver, code=code_object(VARIANT, 64, 65540)), r"65540 \+ 0 bytes of LDS"),
    "one by one": (_one_by_one, "arguments one by one"),
    "a longer buffer": (
        lambda driver: _run(driver, params=_Longer()),
        r"an argument buffer of \d+ bytes, of which the code object reads \d+",
    ),
    "other metadata": (
        lambda driver: _run(driver, code=CODE.replace(b"hsa--gfx906", b"hsa--gfx900")),
        "the header says gfx906 and the metadata amdgcn-amd-amdhsa--gfx900",
    ),
}


def _with_wave_of_32() -> bytes:
    name = b".wavefront_size"
    at = CODE.index(name) + len(name)
    return CODE[:at] + b"\x20" + CODE[at + 1 :]


@needs_compiler
@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_refused_and_written_down(name: str) -> None:
    driver = HipStandIn(devices=2)
    driver.variants = {CODE: VARIANT}
    act, problem = WRONG[name]
    with pytest.raises(DriverError):
        act(driver)
    assert len(driver.problems) == 1
    assert re.search(problem, driver.problems[0])
    assert not driver.queued


@needs_compiler
def test_a_stream_that_nobody_made_is_noticed() -> None:
    driver = HipStandIn(current_stream=77)
    driver.streams.discard(77)
    with pytest.raises(DriverError, match="hipModuleLaunchKernel: invalid argument"):
        _run(driver)
    assert driver.problems == ["pa_forward: stream 0x4d"]


@needs_compiler
@pytest.mark.parametrize(
    ("image", "info", "code"),
    [
        (b"no ELF file", RADEON_VII, 200),
        (CODE[:7] + b"\0" + CODE[8:], RADEON_VII, 200),  # for another system
        (CODE, replace(RADEON_VII, arch="gfx900"), 209),
        (CODE, RX_6800, 209),
        (CODE, RADEON_VII, 0),
    ],
)
def test_an_image_must_be_for_the_card(image: bytes, info: DeviceInfo, code: int) -> None:
    driver = HipStandIn(info)
    driver.variants = {image: VARIANT}
    if not code:
        assert driver.load(0, image, ("pa_forward",))
        with pytest.raises(DriverError, match="hipModuleGetFunction: named symbol not found"):
            driver.load(0, image, ("pa_combine",))
        return
    with pytest.raises(DriverError) as caught:
        driver.load(0, image, ("pa_forward",))
    assert caught.value.error_code == code
    assert not driver.problems  # a real runtime says so too


@needs_compiler
def test_a_launch_goes_to_the_current_stream_with_its_parameters_and_the_device_is_put_back() -> None:
    driver = HipStandIn(devices=2, current_stream=77)
    gpu = HipRuntime(lambda: driver, HipCompiler)

    class Known(Kernels):
        def machine_code(self, variant: Variant, *, compiled: bool = False) -> bytes:
            code = super().machine_code(variant, compiled=compiled)
            driver.variants[code] = variant
            return code

    kernels = Known(Runtime("cuda:1", RADEON_VII), gpu=gpu, shipped=lambda *_: None, folder=lambda: None)
    launch = plain_launch()
    kernels.run([launch])
    (queued,) = driver.queued
    assert (queued.variant, queued.function, queued.grid, queued.threads) == (
        VARIANT,
        "pa_forward",
        launch.grid,
        launch.threads,
    )
    assert bytes(queued.params) == bytes(launch.params)
    assert driver.asked["hipSetDevice"] == 4  # to the second card and back, for loading and for launching
    assert driver.left_behind() == driver.problems == []


@needs_compiler
def test_what_was_loaded_lives_as_long_as_the_runtime() -> None:
    driver = HipStandIn()
    image = bytes(bytearray(CODE))
    driver.variants = {CODE: VARIANT}
    count = sys.getrefcount(image)
    driver.load(0, image, ("pa_forward",))
    assert sys.getrefcount(image) == count + 1


@needs_compiler
def test_each_thread_has_its_own_current_device() -> None:
    driver = HipStandIn(devices=2)
    driver.variants = {CODE: VARIANT}
    driver.call("hipSetDevice", 1)
    found: list[int] = []

    def run() -> None:
        driver.load(1, CODE, ("pa_forward",))
        found.append(driver._device)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0]
    assert driver.left_behind() == ["device 1 as the current one"]
    driver.call("hipSetDevice", 0)


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
