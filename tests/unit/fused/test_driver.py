"""A failing driver leaves the call to another route or ends it."""

import logging
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused.device import CardKernels, always_faster, execute, fresh_card
from attn_support.fused.driver import StandIn, cubin
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import HipStandIn
from torch.utils.checkpoint import checkpoint

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, record, sdpa
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.fused.trust import kernels as fused_kernels
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime
from pascal_attn_core.reference import reference_sdpa

FUSED = AttentionConfig(route="fused")
VARIANT = Variant("forward", 64, "float32")
CUBIN = cubin(VARIANT, 61)


@pytest.fixture
def time() -> Mock:
    """Seconds that pass when they are told to."""
    return Mock(now=0.0)


@pytest.fixture
def card(time: Mock) -> Iterator[CardKernels]:
    """A card on which no kernel has ever run."""
    with fresh_card(StandIn(execute=execute), clock=lambda: time.now) as kernels:
        yield kernels


def _inputs(*, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 60, 16).requires_grad_(requires_grad) for _ in range(3)]


WINDOW = {"window": (9, 0)}  # of which torch has no kernel: auto takes ours
REFUSALS = [  # and whether it is the first call; images are loaded once
    *(("cuLaunchKernel", code, is_first) for code in (701, 1) for is_first in (True, False)),
    ("cuModuleLoadData", 209, True),
    ("cuModuleGetFunction", 500, True),
]


def _route(inputs: list[torch.Tensor]) -> str:
    """By which route a call is answered, as it should be."""
    with record() as report:
        out = sdpa(*inputs, **WINDOW)
    torch.testing.assert_close(out, reference_sdpa(*inputs, **WINDOW)[0], atol=1e-5, rtol=1e-5)
    (route,) = report.routes()
    return route


def _check_gradients(out: torch.Tensor, leaves: list[torch.Tensor], bias: torch.Tensor | None = None) -> None:
    expected = reference_sdpa(*leaves, bias, **WINDOW)[0]
    torch.testing.assert_close(
        *(torch.autograd.grad(each.square().sum(), leaves) for each in (out, expected)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("function", "code", "is_first"), REFUSALS)
def test_what_the_driver_refuses_goes_to_the_next_route_with_one_warning(
    card: CardKernels, caplog: pytest.LogCaptureFixture, function: str, code: int, is_first: bool
) -> None:
    inputs = _inputs()
    if not is_first:
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
    leaves, asked = _inputs(requires_grad=True), card.driver.asked
    second = asked["cuLaunchKernel"] + 2
    card.driver.faults["cuLaunchKernel"] = lambda: 701 if asked["cuLaunchKernel"] == second else 0
    _check_gradients(sdpa(*leaves, **WINDOW), leaves)
    assert "cuLaunchKernel" in card._refused[Variant("grad_all", 32, "float32", padded=True)][0]
    assert _route(_inputs()) == "fused"


@pytest.mark.parametrize("mask", [None, "float"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_pass_that_is_refused_is_made_by_tiles(card: CardKernels, compiled: bool, mask: str | None) -> None:
    leaves = _inputs(requires_grad=True)
    bias = None if mask is None else torch.randn(60, 60)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return sdpa(*tensors, bias, **WINDOW)

    out = (torch.compile(attend, backend="aot_eager") if compiled else attend)(*leaves)
    assert len(card._checked) == 2
    card.driver.faults["cuLaunchKernel"] = 701
    _check_gradients(out, leaves, bias)
    card.driver.faults["cuLaunchKernel"] = 700
    with pytest.raises(DriverError, match="can no longer use the GPU"):
        _route(_inputs())


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuLaunchKernel", "cuDevicePrimaryCtxRetain"])
def test_a_lack_of_memory_passes(card: CardKernels, time: Mock, caplog, function: str) -> None:
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
def test_recomputation_takes_the_route_of_its_forward_pass(card: CardKernels, time: Mock, use_reentrant: bool) -> None:
    leaves = _inputs(requires_grad=True)
    card.driver.faults["cuModuleLoadData"] = 2
    out = checkpoint(lambda *t: sdpa(*t, **WINDOW), *leaves, use_reentrant=use_reentrant)
    card.driver.faults.clear()
    time.now += fused_kernels.MEMORY_PAUSE
    out.square().sum().backward()  # would save other tensors by another route
    assert "forward" not in {variant.kind for variant in card._checked}
    assert _route(_inputs()) == "fused"


@pytest.mark.parametrize(
    ("maker", "function", "code", "is_first"),
    [
        (StandIn, "cuLaunchKernel", 700, True),
        (StandIn, "cuLaunchKernel", 719, False),
        (StandIn, "cuModuleLoadData", 719, True),
        (HipStandIn, "hipModuleLaunchKernel", 719, True),
        (HipStandIn, "hipModuleLoadData", 700, True),
    ],
)
def test_a_lost_device_is_an_error(maker: type[StandIn | HipStandIn], function: str, code: int, is_first: bool) -> None:
    inputs, driver = _inputs(), maker(execute=execute)
    with fresh_card(driver, always_faster) as kernels:
        if not is_first:
            assert _route(inputs) == "fused"
        driver.faults[function] = code
        for _ in range(2):
            words = rf"{function}: .*\((CUDA|HIP) error {code}\); this process can no longer use"
            with pytest.raises(DriverError, match=words):
                sdpa(*inputs, **WINDOW)
        assert not kernels._refused


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandIn()
    driver.variants = {CUBIN: VARIANT}
    kernels = Kernels(Runtime("cuda:0", CARD), gpu=CudaRuntime(lambda: driver), shipped=lambda *_: CUBIN)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels.ensure([VARIANT])
    assert driver.asked["cuModuleLoadData"] == 1
    assert not kernels._checked
    assert not driver.queued


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("no room for the check"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=str,
)
def test_a_check_that_finds_no_memory_is_made_later(card: CardKernels, time: Mock, error: Exception) -> None:
    inputs = _inputs()
    card.driver.execute = Mock(side_effect=error)
    assert _route(inputs) == "math"
    card.driver.execute = execute
    time.now += fused_kernels.MEMORY_PAUSE
    assert _route(inputs) == "fused"
    assert card._checked
