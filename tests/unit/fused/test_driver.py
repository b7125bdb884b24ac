"""A failing driver leaves the call to another route or ends it; and the driver's stand-in notices what a real one would
not forgive."""

from __future__ import annotations

import ctypes
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fused.cases import whole
from attn_support.fused.device import CardKernels, execute, fresh_card
from attn_support.fused.driver import Compiler, StandIn, cubin, fails_once
from attn_support.fused.emulation import CARD, GXX
from torch.utils.checkpoint import checkpoint

from pascal_attn_core import AttentionConfig, UnsupportedAttention, config, explain, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.checks import is_out_of_memory
from pascal_attn_core.fused.code import params
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu.cuda import CudaDriver, CudaRuntime
from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.trust import kernels as fused_kernels
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime, runtime_of
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes.timing import Timings

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-in for the driver")
FUSED = AttentionConfig(route="fused")
VARIANT = Variant("forward", 64, "float32")
CUBIN = cubin(VARIANT, 61)


class Time:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def card(time: Time) -> Iterator[CardKernels]:
    """A card on which no kernel has ever run. Its driver's complaints are looked at by the tests."""
    driver = StandIn(execute=execute)
    with fresh_card(driver, clock=time) as kernels:
        yield kernels


def _inputs(*, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 60, 16).requires_grad_(requires_grad) for _ in range(3)]


WINDOW = {"window": (9, 0)}  # of which torch has no kernel: auto takes ours
REFUSALS = [("cuLaunchKernel", 701), ("cuLaunchKernel", 1), ("cuModuleLoadData", 209), ("cuModuleGetFunction", 500)]


def _route(inputs: list[torch.Tensor]) -> str:
    """By which route a call is answered, as it should be."""
    with record() as report:
        out = sdpa(*inputs, **WINDOW)
    torch.testing.assert_close(out, reference_sdpa(*inputs, **WINDOW)[0], atol=1e-5, rtol=1e-5)
    (route,) = report.routes()
    return route


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("function", "code"), REFUSALS)
def test_what_the_driver_refuses_goes_to_the_next_route_with_one_warning(
    card: CardKernels, caplog: pytest.LogCaptureFixture, function: str, code: int, is_first: bool
) -> None:
    inputs = _inputs()
    if not is_first:
        if function != "cuLaunchKernel":
            pytest.skip("is asked for once")
        assert _route(inputs) == "fused"
    card.driver.faults[function] = code
    with caplog.at_level(logging.WARNING, logger="pascal_attn"):
        assert [_route(inputs) for _ in range(3)] == ["math"] * 3
    (warned,) = caplog.records
    assert f"no kernel forward-32-padded-float32-none: {function}: " in warned.getMessage()
    asked = card.driver.asked[function]
    card.driver.faults.clear()  # it is remembered
    assert _route(inputs) == "math"
    with pytest.raises(UnsupportedAttention, match=f"route 'fused' cannot take this call: no kernel .*{function}"):
        sdpa(*inputs, **WINDOW, config=FUSED)
    assert card.driver.asked[function] == asked
    assert sdpa(*(t.half() for t in inputs), **WINDOW, config=FUSED).isfinite().all()  # of that variant only


def test_a_gradient_kernel_that_cannot_be_launched_leaves_training_to_the_next_route(card: CardKernels) -> None:
    leaves = _inputs(requires_grad=True)
    card.driver.faults["cuLaunchKernel"] = lambda: 701 if card.driver.asked["cuLaunchKernel"] == 2 else 0
    out = sdpa(*leaves, **WINDOW)
    actual = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(reference_sdpa(*leaves, **WINDOW)[0].square().sum(), leaves)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-4)
    assert "cuLaunchKernel" in card._failed[Variant("grad_query", 32, "float32", padded=True)]
    assert _route(_inputs()) == "fused"


@pytest.mark.parametrize("mask", [None, "float"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_pass_that_cannot_be_launched_is_made_by_tiles(
    card: CardKernels, compiled: bool, mask: str | None
) -> None:
    leaves = _inputs(requires_grad=True)
    bias = None if mask is None else torch.randn(60, 60)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return sdpa(*tensors, bias, **WINDOW)

    out = (torch.compile(attend, backend="aot_eager") if compiled else attend)(*leaves)
    assert len(card._checked) == 3
    card.driver.faults["cuLaunchKernel"] = 701
    actual = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(reference_sdpa(*leaves, bias, **WINDOW)[0].square().sum(), leaves)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-4)
    card.driver.faults["cuLaunchKernel"] = 700
    with pytest.raises(DriverError, match="can no longer use the GPU"):
        _route(_inputs())


def test_a_launch_that_fails_after_others_of_its_call_is_no_harm(card: CardKernels) -> None:
    inputs = [torch.randn(1, 1, tokens, 16) for tokens in (3, 300, 300)]
    assert _route(inputs) == "fused"  # two launches: the second one joins the parts
    before = card.driver.asked["cuLaunchKernel"]
    card.driver.faults["cuLaunchKernel"] = lambda: 701 if card.driver.asked["cuLaunchKernel"] == before + 2 else 0
    assert _route(inputs) == "math"


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuLaunchKernel", "cuDevicePrimaryCtxRetain"])
def test_a_lack_of_memory_lasts_for_a_moment(
    card: CardKernels, time: Time, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    inputs = _inputs()
    card.driver.faults[function] = 2
    with caplog.at_level(logging.WARNING, logger="pascal_attn"):
        assert _route(inputs) == "math"
        asked = card.driver.asked[function]
        assert _route(inputs) == "math"  # is not tried at every call
        assert card.driver.asked[function] == asked
        time.now += fused_kernels.MEMORY_PAUSE
        assert _route(inputs) == "math"
        assert card.driver.asked[function] > asked
    (warned,) = caplog.records
    assert "no memory for the kernel forward-32-padded-float32-none" in warned.getMessage()
    card.driver.faults.clear()
    assert "fused" not in explain(*inputs, **WINDOW).splitlines()[0]
    time.now += fused_kernels.MEMORY_PAUSE
    assert explain(*inputs, **WINDOW).startswith("route fused")
    assert _route(inputs) == "fused"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_takes_the_route_of_its_forward_pass(card: CardKernels, time: Time, use_reentrant: bool) -> None:
    leaves = _inputs(requires_grad=True)
    card.driver.faults["cuModuleLoadData"] = 2
    out = checkpoint(lambda *t: sdpa(*t, **WINDOW), *leaves, use_reentrant=use_reentrant)
    card.driver.faults.clear()
    time.now += fused_kernels.MEMORY_PAUSE
    out.square().sum().backward()  # would save other tensors by another route
    assert "forward" not in {variant.kind for variant in card._checked}
    assert _route(_inputs()) == "fused"


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("no room for the check"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=str,
)
def test_a_check_that_finds_no_memory_is_made_later(card: CardKernels, time: Time, error: Exception) -> None:
    inputs = _inputs()

    def no_memory(launch: Launch) -> None:
        raise error

    card.driver.execute = no_memory
    assert _route(inputs) == "math"
    card.driver.execute = execute
    time.now += fused_kernels.MEMORY_PAUSE
    assert _route(inputs) == "fused"
    assert card._checked


def test_memory_that_torch_keeps_in_reserve_is_freed_for_a_kernel(
    card: CardKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.driver.faults["cuModuleLoadData"] = 2
    monkeypatch.setattr(torch.cuda, "empty_cache", card.driver.faults.clear)
    assert _route(_inputs()) == "fused"
    assert card.driver.asked["cuModuleLoadData"] == 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("code", [700, 719])
@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuModuleLoadData"])
def test_a_lost_device_is_told_and_blamed_on_no_kernel(
    card: CardKernels, function: str, code: int, is_first: bool
) -> None:
    inputs = _inputs()
    if not is_first:
        if function == "cuModuleLoadData":
            pytest.skip("is asked for once")
        assert _route(inputs) == "fused"
    card.driver.faults[function] = code
    for _ in range(2):
        with pytest.raises(DriverError, match=rf"{function}: .*\(CUDA error {code}\); this process can no longer use"):
            sdpa(*inputs, **WINDOW)
    assert not card._failed


def test_the_number_of_an_error_travels_with_it() -> None:
    driver = StandIn()
    driver.faults["cuDeviceGet"] = fails_once(2)
    with pytest.raises(DriverError, match="cuDeviceGet: out of memory") as caught:
        driver.call("cuDeviceGet", ctypes.byref(ctypes.c_int()), 0)
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.error_code, back.loses_device) == (str(caught.value), 2, False)
    assert is_out_of_memory(back)
    driver.call("cuDeviceGet", ctypes.byref(ctypes.c_int()), 0)


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandIn()
    driver.variants = {CUBIN: VARIANT}
    kernels = Kernels(Runtime("cuda:0", CARD), gpu=CudaRuntime(lambda: driver), shipped=lambda *_: CUBIN)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels.ensure([VARIANT])
    assert driver.asked["cuModuleLoadData"] == 1
    assert not kernels._checked
    assert not driver.queued


# ---- no home folder --------------------------------------------------------------------------------------------------


def test_without_a_home_folder_nothing_is_kept_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    config._tell_once.cache_clear()
    inputs = _inputs()
    card = fresh_card(StandIn(execute=execute), folder=config.cache_folder)
    with caplog.at_level(logging.INFO, logger="pascal_attn"), card as kernels:
        assert kernels.folder() is None
        sdpa(*inputs, config=AttentionConfig(math_limit_mib=0))
        assert runtime_of(torch.device("cpu")).part(Timings).known
        sdpa(*inputs, torch.randn(60, 60), config=FUSED)
    assert [r.getMessage() for r in caplog.records if "on disk" in r.getMessage()] == [
        "nothing is kept on disk: Could not determine home directory."
    ]


# ---- the stand-in itself must notice ---------------------------------------------------------------------------------


def _launch() -> Launch:
    query = torch.randn(1, 1, 70, 64)
    call = check_call(query, query, query)
    (launch,) = forward_launches(call, whole(call), torch.empty_like(query))
    return launch


def _queue(driver: CudaDriver, launch: Launch, handle: Any, index: int = 0) -> None:
    driver.launch(index, handle, launch.grid, launch.threads, launch.params)


class _Shorter(params.Params):
    _fields_ = params.Forward._fields_[:-1]


def _without_a_context(driver: StandIn) -> None:
    driver.call("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), CUBIN)


def _before_init(driver: StandIn) -> None:
    driver._is_ready = False
    driver.load(0, CUBIN, ("pa_forward",))


WRONG: dict[str, tuple[Callable[[StandIn], object], str]] = {
    "before cuInit": (_before_init, "cuCtxPushCurrent_v2 before cuInit|cuDeviceGet before cuInit"),
    "no such device": (lambda driver: driver._context(7), "device 7 of 2"),
    "no context": (_without_a_context, "an image loaded without a current context"),
    "pop": (lambda driver: driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())), "no context to pop"),
    "push": (lambda driver: driver.call("cuCtxPushCurrent_v2", ctypes.c_void_p(77)), "0x4d is no context"),
    "no function": (lambda driver: _queue(driver, _launch(), ctypes.c_void_p(77)), "0x4d is no function"),
    "another card's function": (
        lambda driver: _queue(driver, _launch(), driver.load(1, CUBIN, ("pa_forward",))["pa_forward"]),
        "pa_forward launched in another context than its own",
    ),
    "no grid": (lambda driver: _run(driver, grid=(1, 0, 1)), r"pa_forward: grid \(1, 0, 1\)"),
    "grid too large": (lambda driver: _run(driver, grid=(1, 1, 65536)), r"grid \(1, 1, 65536\)"),
    "too many threads": (lambda driver: _run(driver, threads=2048), "2048 threads, 255 registers x 2048"),
    "registers": (lambda driver: _run(driver, threads=288), "255 registers x 288"),
    "shared memory": (lambda driver: _run(driver, code=cubin(VARIANT, 61, 32, 49153)), "49153 bytes of shared memory"),
    "parameters": (
        lambda driver: _run(driver, code=CUBIN.replace(b"\x58\x01", b"\x50\x01")),
        "344 bytes of parameters, of which the machine code reads 336",
    ),
}


def _run(driver: StandIn, code: bytes = CUBIN, **changes: Any) -> None:
    driver.variants[code] = VARIANT
    handle = driver.load(0, code, ("pa_forward",))["pa_forward"]
    _queue(driver, _launch()._replace(**changes), handle)


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_refused_and_written_down(name: str) -> None:
    driver = StandIn(devices=2)
    driver.variants = {CUBIN: VARIANT}
    act, problem = WRONG[name]
    with pytest.raises(DriverError):
        act(driver)
    assert len(driver.problems) == 1
    assert re.search(problem, driver.problems[0])
    assert not driver.queued


@pytest.mark.parametrize(
    ("image", "capability", "code"),
    [(b"no ELF file", (6, 1), 200), (CUBIN, (6, 0), 209), (CUBIN, (7, 0), 209), (CUBIN, (6, 2), 0)],
)
def test_an_image_must_be_for_the_card(image: bytes, capability: tuple[int, int], code: int) -> None:
    driver = StandIn(replace(CARD, capability=capability))
    driver.variants = {CUBIN: VARIANT}
    if not code:
        assert driver.load(0, image, ("pa_forward",))
        return
    with pytest.raises(DriverError) as caught:
        driver.load(0, image, ("pa_forward",))
    assert caught.value.error_code == code
    assert not driver.problems  # a real driver says so too


def test_a_kernel_that_an_image_lacks_is_not_found() -> None:
    driver = StandIn()
    driver.variants = {CUBIN: VARIANT}
    with pytest.raises(DriverError, match="cuModuleGetFunction: named symbol not found"):
        driver.load(0, CUBIN, ("pa_combine",))


def test_a_context_left_behind_is_noticed() -> None:
    driver = StandIn()
    driver.call("cuCtxPushCurrent_v2", driver._context(0))
    assert driver.left_behind() == ["1 contexts on the stack"]


def test_the_compiler_knows_every_variant_by_its_text_and_macros() -> None:
    compiler = Compiler()
    kernels = Kernels(
        Runtime("cuda:0", CARD),
        gpu=CudaRuntime(find_compiler=lambda arch: compiler),
        shipped=lambda *_: None,
        folder=lambda: None,
    )
    for variant in (VARIANT, Variant("split", 80, "bfloat16", "bool", True), Variant("grad_key_value", 256, "float16")):
        assert variant.name.encode() in kernels.machine_code(variant)
    assert len(compiler.compiled) == 3
