"""Which way a linear layer in 8 bits takes on a card that is not here: this package's kernel, torch._int_mm or expanded
weights, and what happens when one of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attn_support.fused.device import execute, fresh_card
from attn_support.fused.driver import StandIn, fails_once
from attn_support.fused.emulation import CARD
from torch import nn

from pascal_attn_core.fused.linear import LinearCall
from pascal_attn_core.int8 import int8_linear, patch_linear_int8, quantize_rows
from pascal_attn_core.int8.backends import IntMm, LinearTimings, backend_of, backends_of
from pascal_attn_core.machine.runtime import Runtime, runtime_of

CPU = torch.device("cpu")


def call_of(rows: int = 5, columns: int = 64, outs: int = 16, rotation: int = 16) -> LinearCall:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns), quantize_rows(torch.randn(outs, columns), rotation)
    return LinearCall(x, weight, torch.randn(outs), "none", torch.empty(rows, outs))


@pytest.fixture
def no_int_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntMm, "why_not", "torch._int_mm: not here")


def times(*milliseconds: float):
    """A clock that runs everything and then says this."""

    def clock(attempts, device):
        for attempt in attempts:
            attempt()
        return list(milliseconds)

    return clock


def timed_by(clock, folder: Path | None = None):
    runtime = runtime_of(CPU)
    runtime._parts[LinearTimings] = LinearTimings(runtime, clock=clock, folder=lambda: folder, is_on=True)
    return runtime._parts[LinearTimings]


def test_the_kernel_gives_what_int_mm_gives_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of()
    expected = int8_linear(call.x, call.weight, call.bias, way="int_mm")
    monkeypatch.setattr(IntMm, "why_not", "torch._int_mm: not here")
    with fresh_card(StandIn(CARD, execute)) as kernels:
        assert backend_of(call) == ("kernel", "")
        out = int8_linear(call.x, call.weight, call.bias)
        assert {launch.function for launch in kernels.queued} >= {"pa_linear_quantize", "pa_linear_some"}
    assert torch.equal(out, expected)


def test_where_both_can_the_faster_one_is_taken_and_the_other_has_a_reason(tmp_path: Path) -> None:
    with fresh_card(StandIn(CARD, execute)) as kernels:
        timed_by(times(1.0, 2.0), tmp_path)
        call = call_of()
        assert backends_of(call) == ["kernel", "int_mm", "float"]
        assert backend_of(call) == ("kernel", "")
        more = call_of(outs=24)
        timed_by(times(3.0, 2.0), tmp_path)
        assert backend_of(more) == ("int_mm", "the int8 linear kernel took 1.50 times as long as torch._int_mm")
        queued = len(kernels.queued)
        int8_linear(more.x, more.weight)
        assert len(kernels.queued) == queued
        # What was found out is on disk: nothing is timed again.
        again = timed_by(lambda attempts, device: pytest.fail("timed again"), tmp_path)
        assert again.ratio(call) == 0.5
        assert again.ratio(more) == 1.5


def test_a_kernel_that_fails_gives_way_and_is_not_tried_again() -> None:
    driver = StandIn(CARD, execute)
    with fresh_card(driver) as kernels:
        timed_by(times(1.0, 2.0))
        call = call_of()
        int8_linear(call.x, call.weight)
        driver.faults["cuLaunchKernel"] = fails_once(1)
        out = int8_linear(call.x, call.weight)
        queued = len(kernels.queued)
        name, why = backend_of(call)
        assert name == "int_mm"
        assert "invalid argument" in why
        assert torch.equal(int8_linear(call.x, call.weight), out)
        assert len(kernels.queued) == queued


def test_int_mm_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert IntMm(Runtime(CPU)).why_not == ""

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("_int_mm is only supported on cards of compute capability 7.5\nand more")

    monkeypatch.setattr(torch, "_int_mm", broken)
    assert IntMm(Runtime(CPU)).why_not == "torch._int_mm: _int_mm is only supported on cards of compute capability 7.5"


@pytest.mark.usefixtures("no_int_mm")
def test_a_patched_model_runs_on_the_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval().requires_grad_(False)
    x = torch.randn(40, 64)
    expected = model(x)
    with fresh_card(StandIn(CARD, execute)) as kernels:
        with patch_linear_int8(model, include=nn.Linear) as patch:
            out = model(x)
            report = patch.report()
        assert [line.way for line in report.lines] == ["kernel", "kernel"]
        assert "computed by" not in report.text()
        assert {"pa_linear_quantize"} < {launch.function for launch in kernels.queued}
    assert 0 < (out - expected).norm() / expected.norm() < 0.02
    assert torch.equal(model(x), expected)
