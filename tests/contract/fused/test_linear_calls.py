"""Which way a linear layer in 8-bit integers takes on a card that is not here, and what happens where one fails."""

import functools
import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from attn_support.clock import Clock
from attn_support.fused.device import UncheckedKernels, execute, fresh_card
from attn_support.fused.driver import StandIn, fails_once
from attn_support.fused.emulation import CARD, T4, V100, emulate
from attn_support.fused.hip import RADEON_VII
from attn_support.fused.linear import before_activation
from attn_support.fused.modes import MODES
from attn_support.fused.trials import Starter, tried
from attn_support.randomness import some

from pascal_attn_core.fused.code.compilation import DtypeVariant
from pascal_attn_core.fused.code.kinds import INT8_LINEAR
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.linear import LinearCall, run_linear, why_not
from pascal_attn_core.fused.trust.kernels import KernelUnavailable
from pascal_attn_core.int8 import int8_linear
from pascal_attn_core.int8.backends import LinearWays
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, runtime_of, using
from pascal_attn_core.reference.int8_rows import quantize_rows

CPU = torch.device("cpu")
FLOAT16 = DtypeVariant(INT8_LINEAR, "float16")


def _call(rows: int = 5, cols: int = 9, columns: int = 64, *, dtype: torch.dtype = torch.float16) -> LinearCall:
    weight = quantize_rows(torch.randn(cols, columns), 16)
    bias, out = torch.randn(cols), torch.full((rows, cols), float("nan"), dtype=dtype)
    return LinearCall(torch.randn(rows, columns).to(dtype), weight, bias, "none", out)


def _expected(call: LinearCall) -> torch.Tensor:
    return before_activation(call).to(call.out.dtype)


@pytest.mark.parametrize("card", [CARD, V100, T4], ids=lambda card: card.name)
def test_what_ships_is_loaded_checked_once_and_launched(card: DeviceInfo) -> None:
    with fresh_card(StandIn(card, execute)) as kernels:
        assert why_not(CPU, columns=64, rotation=16) == []
        for _ in range(2):
            call = _call()
            run_linear(call)
            assert torch.equal(call.out, _expected(call))
        assert kernels.gpu.find_compiler(0).compiled == []
        functions = [launch.function for launch in kernels.queued]
        assert functions[-4:] == ["pa_linear_quantize", "pa_linear_some"] * 2
        checked = functions[:-4]
        assert set(checked[1::2]) == {"pa_linear", "pa_linear_small", "pa_linear_few", "pa_linear_some"}
        assert len(checked) == 2 * 4 * 4  # each product on two shapes, with and without an activation


def test_other_types_of_x_and_of_the_output_take_a_kernel_of_each() -> None:
    with fresh_card(StandIn(execute=execute)) as kernels:
        call = _call()._replace(out=torch.empty(5, 9))
        run_linear(call)
        assert torch.equal(call.out, _expected(call))
        assert {variant.dtype for variant in kernels._checked} == {"float16", "float32"}


@pytest.mark.parametrize("mode", some((mode for mode in MODES if "saved" not in mode and "hooks" not in mode), 3))
def test_the_first_layer_may_be_run_in_any_mode(mode: str) -> None:
    call = _call()
    with fresh_card(StandIn(execute=execute)) as kernels:
        with MODES[mode]():
            run_linear(call)
        assert kernels._checked == {FLOAT16}
    assert torch.equal(call.out, _expected(call))


def test_no_rows_and_no_columns_are_no_launch() -> None:
    with fresh_card(StandIn(execute=execute), kind=UncheckedKernels) as kernels:
        run_linear(_call(rows=0))
        assert kernels.queued == []


def test_the_first_answers_are_compared_with_the_definition(caplog: pytest.LogCaptureFixture) -> None:
    text = source(INT8_LINEAR)
    right = "__fmul_rn(x_scale, scale)"
    assert text.count(right) == 1
    mutated = {INT8_LINEAR: text.replace(right, "__fmul_rn(x_scale, scale * 1.0000002f)")}  # the last bit
    with fresh_card(StandIn(execute=lambda launch: emulate([launch], mutated=mutated))) as kernels:
        with caplog.at_level(logging.WARNING, logger="pascal_attn"):
            for _ in range(2):
                with pytest.raises(KernelUnavailable, match="int8_linear-float16 differs from the definition by inf"):
                    run_linear(_call())
        assert len(caplog.records) == 1
        (reason,) = why_not(CPU, columns=64)
        assert "differs from the definition" in reason
        assert why_not(CPU, columns=64, dtypes=[torch.float32]) == []
        assert {launch.variant.dtype for launch in kernels.queued} == {"float16"}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (DeviceInfo("cpu"), "the int8 linear kernel needs a CUDA device, got cpu"),
        (RADEON_VII, "the int8 linear kernel needs a CUDA device, got hip"),
        (replace(CARD, capability=(6, 0)), "compute capability 6.1 or newer; compute capability 6.0 has none"),
        (replace(CARD, capability=None), "compute capability 6.1 or newer; an unknown one has none"),
    ],
)
def test_a_device_without_dp4a_is_refused_with_the_reason(info: DeviceInfo, words: str) -> None:
    with using(Runtime("cpu", info)):
        (reason,) = why_not(CPU, columns=64)
        assert words in reason


def test_a_layer_that_the_kernels_cannot_take_is_refused_with_the_reason() -> None:
    with fresh_card(StandIn()):
        for columns in (6, 1 << 18):
            why = f"columns must be a multiple of 4, at most 131072, got {columns}"
            assert why_not(CPU, columns=columns)[0].startswith(why)
        assert why_not(CPU, columns=1024, rotation=1024)[0].endswith("groups of (4, 16, 64, 256), got 1024")
        assert why_not(CPU, columns=64, dtypes=[torch.float64]) == [
            "the int8 linear kernel takes float32, float16 and bfloat16, got torch.float64"
        ]


def test_the_kernels_are_tried_in_a_process_of_their_own_before_the_first_layer(tmp_path: Path) -> None:
    start = Starter()
    with using(tried(start, tmp_path)):
        assert why_not(CPU, columns=64, untried=True) == []
        assert start.jobs == []
        assert why_not(CPU, columns=64) == why_not(CPU, columns=64, dtypes=[torch.float32]) == []
    assert [job.needed for job in start.jobs] == [[["int8_linear", "float16", ""]]]
    with using(tried(start, tmp_path)):  # another process
        assert why_not(CPU, columns=64) == []
    assert len(start.jobs) == 1


_wide = functools.partial(_call, dtype=torch.float32)


def timed_by(clock, folder: Path | None = None):
    runtime = runtime_of(CPU)
    runtime._parts[LinearWays] = LinearWays(runtime, clock=clock, folder=lambda: folder, is_on=True)
    return runtime._parts[LinearWays]


def test_the_kernel_gives_what_int_mm_gives_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _wide()
    expected = int8_linear(call.x, call.weight, call.bias, way="int_mm")
    monkeypatch.setattr(LinearWays, "why_no_int_mm", "torch._int_mm: not here")
    with fresh_card(StandIn(CARD, execute)) as kernels:
        assert runtime_of(CPU).part(LinearWays).chosen(call) == ("kernel", "")
        out = int8_linear(call.x, call.weight, call.bias)
        assert {launch.function for launch in kernels.queued} >= {"pa_linear_quantize", "pa_linear_some"}
    assert torch.equal(out, expected)


def test_where_both_can_the_faster_one_is_taken_and_the_other_has_a_reason(tmp_path: Path) -> None:
    with fresh_card(StandIn(CARD, execute)) as kernels:
        ways = timed_by(Clock(1.0, 2.0), tmp_path)
        call = _wide()
        assert ways.able(call) == ["kernel", "int_mm", "float"]
        assert runtime_of(CPU).part(LinearWays).chosen(call) == ("kernel", "")
        more = _wide(cols=24)
        timed_by(Clock(3.0, 2.0), tmp_path)
        assert runtime_of(CPU).part(LinearWays).chosen(more) == ("int_mm", "kernel took 1.50 times as long as int_mm")
        queued = len(kernels.queued)
        int8_linear(more.x, more.weight)
        assert len(kernels.queued) == queued
        # What was found out is on disk: nothing is timed again.
        again = timed_by(lambda attempts, device: pytest.fail("timed again"), tmp_path)
        assert again.chosen(call).name == "kernel"
        assert again.chosen(more).name == "int_mm"


def test_a_kernel_that_fails_gives_way_and_is_not_tried_again() -> None:
    driver = StandIn(CARD, execute)
    with fresh_card(driver) as kernels:
        timed_by(Clock(1.0, 2.0))
        call = _wide()
        int8_linear(call.x, call.weight)
        driver.faults["cuLaunchKernel"] = fails_once(1)
        out = int8_linear(call.x, call.weight)
        queued = len(kernels.queued)
        name, why = runtime_of(CPU).part(LinearWays).chosen(call)
        assert name == "int_mm"
        assert "invalid argument" in why
        assert torch.equal(int8_linear(call.x, call.weight), out)
        assert len(kernels.queued) == queued


def test_int_mm_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LinearWays(Runtime(CPU)).why_no_int_mm == ""

    words = "_int_mm is only supported on cards of compute capability 7.5"
    monkeypatch.setattr(torch, "_int_mm", Mock(side_effect=RuntimeError(f"{words}\nand more")))
    assert LinearWays(Runtime(CPU)).why_no_int_mm == f"torch._int_mm: {words}"
