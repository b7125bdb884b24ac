"""The route that shares a call out: faults on the other device, memory at home, interrupts, threads, timings,
reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.several.lanes import ModelLanes
from torch import Tensor

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.config import RouteUnavailable
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.observe.progress import between_blocks
from pascal_attn_core.routes import choose
from pascal_attn_core.routes import several as several_module
from pascal_attn_core.routes.share_timing import ShareTimings
from pascal_attn_core.routes.tiled import TiledRoute
from pascal_attn_core.runtime import Runtime, runtime_of, using
from pascal_attn_core.several import helpers as helpers_module
from pascal_attn_core.several.helpers import Helpers
from pascal_attn_core.tiled.plan import plan_call

ALONE = AttentionConfig(route="tiled", q_block=64, kv_block=64)
SHARED = replace(ALONE, devices=("cpu", "cpu"), share_from_tokens=1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def runtime() -> Iterator[Runtime]:
    with using(Runtime("cpu")) as found:
        yield found


@pytest.fixture
def inputs() -> list[Tensor]:
    return [torch.randn(2, 8, 100, 16).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)]


def _use(lanes: ModelLanes) -> None:
    runtime_of(CPU).part(Helpers).of(CPU)._lanes = lanes


def _run(inputs: list[Tensor], config: AttentionConfig = SHARED) -> tuple[Tensor, Any]:
    with record() as report:
        out = sdpa(*inputs, config=config)
    (stats,) = report.calls.values()
    return out, stats


def _failing(at: int, error: Callable[[], BaseException]) -> Callable[[str, int], None]:
    def fail(name: str, number: int) -> None:
        if number == at:
            raise error()

    return fail


ERRORS = {
    "lost": lambda: RuntimeError("CUDA error: unspecified launch failure"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "refused": lambda: RouteUnavailable("no kernel for this card"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_fails_there_is_computed_at_home(
    kind: str, inputs: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """At every copy, allocation, computation and wait: the same bits, one line in the log, inputs untouched."""
    expected, kept = sdpa(*inputs, config=ALONE), [t.clone() for t in inputs]
    probe = ModelLanes()
    _use(probe)
    _run(inputs)
    assert probe.count > 40
    for at in range(1, probe.count + 1):
        caplog.clear()
        with using(Runtime("cpu")), caplog.at_level(logging.WARNING, logger="pascal_attn"):
            _use(ModelLanes(fail=_failing(at, ERRORS[kind])))
            out, stats = _run(inputs)
            assert torch.equal(out, expected)
            assert len(stats.remarks) == len(caplog.records) == 1
            after = choose(check_call(*inputs), SHARED)
            assert (after.route == "several") == (kind == "memory")
            again, stats = _run(inputs)
            assert torch.equal(again, expected)
            assert len(caplog.records) == 1
    assert all(map(torch.equal, inputs, kept))


def test_out_of_memory_holds_for_a_moment(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    _use(ModelLanes(fail=_failing(5, ERRORS["memory"])))
    _, stats = _run(inputs)
    assert list(stats.remarks) == ["cpu ran out of memory: its part was computed on cpu"]
    assert stats.devices["cpu"].units == stats.devices["cpu"].of == 8
    _, stats = _run(inputs)
    assert list(stats.remarks) == ["cpu ran out of memory a moment ago"]
    monkeypatch.setattr(helpers_module, "PAUSE_SECONDS", 0.0)
    runtime_of(CPU).part(Helpers).of(CPU)._paused_until = 0.0
    _, stats = _run(inputs)
    assert stats.remarks == {}
    assert stats.devices["cpu #2"].units == 4


def test_a_lost_device_is_named_by_explain_and_never_asked_again(inputs: list[Tensor]) -> None:
    lanes = ModelLanes(fail=_failing(9, ERRORS["lost"]))
    _use(lanes)
    _run(inputs)
    asked = lanes.count
    choice = choose(check_call(*inputs), SHARED)
    assert choice.route == "tiled"
    assert choice.why.endswith(
        "on one device: cpu failed in an earlier call (RuntimeError: CUDA error: unspecified launch failure)"
    )
    _run(inputs)
    assert lanes.count == asked


def test_a_lost_device_leaves_the_others_working(inputs: list[Tensor]) -> None:
    config = replace(SHARED, devices=("cpu", "cpu", "cpu"))
    runtime_of(CPU).part(Helpers).of(CPU, 0).lost = "cpu failed in an earlier call"
    out, stats = _run(inputs, config)
    assert {name: share.units for name, share in stats.devices.items()} == {"cpu": 4, "cpu #3": 4}
    assert stats.remarks == {}
    assert torch.equal(out, sdpa(*inputs, config=ALONE))


def test_gradients_survive_a_fault_too(inputs: list[Tensor]) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(sdpa(*leaves, config=ALONE).sum(), leaves)
    out = sdpa(*leaves, config=SHARED)
    for at in range(1, 60, 7):
        runtime_of(CPU).part(Helpers).of(CPU).lost = ""
        _use(ModelLanes(fail=_failing(at, ERRORS["lost"])))
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves, retain_graph=True), expected))


def test_no_memory_at_home_for_the_parts_is_no_error(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is computed as a whole, which needs less."""
    expected = sdpa(*inputs, config=ALONE)
    real, home = TiledRoute.forward, threading.current_thread()

    def forward(self: Any, call: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is home and call.num_heads < 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, call, *args, **options)

    monkeypatch.setattr(TiledRoute, "forward", forward)
    out, stats = _run(inputs)
    assert torch.equal(out, expected)
    assert list(stats.remarks) == ["cpu has too little memory for the parts: computed undivided"]


# ---- interrupts and threads ------------------------------------------------------------------------------------------


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_ends_the_call_and_nothing_runs_on(inputs: list[Tensor], at: int) -> None:
    looks = 0

    def checkpoint(done: int, total: int) -> None:
        nonlocal looks
        looks += 1
        if looks == at:
            raise Cancelled

    with pytest.raises(Cancelled), between_blocks(checkpoint):
        sdpa(*inputs, config=SHARED)
    assert not [thread for thread in threading.enumerate() if thread.name == "pascal_attn second device"]
    out, stats = _run(inputs)
    assert stats.remarks == {}
    assert torch.equal(out, sdpa(*inputs, config=ALONE))


def test_an_interrupt_comes_through_while_the_other_device_is_waited_for(inputs: list[Tensor]) -> None:
    go_on, home = threading.Event(), threading.current_thread()

    def slow(name: str, number: int) -> None:
        if name == "run":
            go_on.wait(10)

    _use(ModelLanes(fail=slow))

    def checkpoint(done: int, total: int) -> None:
        if done == total == 1 and threading.current_thread() is home:
            go_on.set()
            raise Cancelled

    with pytest.raises(Cancelled), between_blocks(checkpoint):
        sdpa(*inputs, config=SHARED)


def test_calls_of_several_threads_do_not_mix(inputs: list[Tensor]) -> None:
    expected = sdpa(*inputs, config=ALONE)
    outs: list[Tensor] = []
    with record() as report:
        threads = [
            threading.Thread(target=lambda: outs.extend(sdpa(*inputs, config=SHARED) for _ in range(5)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outs) == 20
    assert all(torch.equal(out, expected) for out in outs)
    (stats,) = report.calls.values()
    assert set(stats.remarks) <= {"cpu computes a part of another thread's call"}


def test_a_device_with_calls_of_its_own_is_left_alone(inputs: list[Tensor]) -> None:
    config = replace(SHARED, devices=("cpu", "cpu"))
    runtime_of(CPU).part(Helpers).of(CPU).is_busy()
    out, stats = _run(inputs, config)
    (remark,) = stats.remarks
    assert remark == "cpu computes attention of its own, as in ComfyUI's work split over several cards"
    assert torch.equal(out, sdpa(*inputs, config=ALONE))


def test_a_call_seen_there_makes_it_busy(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with using(Runtime(first, info=runtime_of(CPU).info)) as runtime:
        helper = runtime.part(Helpers).of(other)
        several_module.seen_on(first, [first, other])
        several_module.seen_on(CPU, [first, other])
        assert helper.take() == ""
        helper.give_back()
        several_module.seen_on(other, [first, other])
        assert helper.take() == "cuda:1 computes attention of its own, as in ComfyUI's work split over several cards"


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cuda:7", "cpu"), ("cuda:0", "cuda:1")])
def test_devices_that_are_not_there_change_nothing(inputs: list[Tensor], devices: tuple[str, str]) -> None:
    config = replace(SHARED, devices=devices)
    assert torch.equal(sdpa(*inputs, config=config), sdpa(*inputs, config=ALONE))


def test_a_budget_that_does_not_suffice_is_an_error_as_on_one_device(inputs: list[Tensor]) -> None:
    config = replace(SHARED, q_block=4096, kv_block=4096, budget_mib=1 / 16)
    long = [torch.randn(1, 2, 5000, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="budget_mib must be at least") as alone:
        sdpa(*long, config=replace(config, devices=()))
    with pytest.raises(ValueError, match="budget_mib must be at least") as shared:
        sdpa(*long, config=config)
    assert str(alone.value) == str(shared.value)


def test_a_forked_process_stays_on_one_device(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_module, "_process", -1)
    assert choose(check_call(*inputs), SHARED).why.endswith("on one device: this process was forked")


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tokens_first", [True, False])
def test_memory_at_home_is_the_plan_and_the_parts_exactly(is_tokens_first: bool) -> None:
    """Of this thread: the output, the part that home computes (which is copied into it), and the route's own plan."""
    inputs = [torch.randn(2, 8, 1500, 32) for _ in range(3)]
    if is_tokens_first:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    sdpa(*inputs, config=SHARED)
    with PeakMemory("cpu") as alone:
        sdpa(*inputs, config=ALONE)
    with PeakMemory("cpu") as together:
        out = sdpa(*inputs, config=SHARED)
    out_bytes = out.numel() * out.element_size()
    call = check_call(*inputs)
    plan = plan_call(call, runtime_of(CPU).info, ALONE)
    assert alone.peak_bytes <= out_bytes + plan.extra_bytes
    assert together.peak_bytes - alone.peak_bytes == out_bytes // 2
    assert together.peak_bytes <= out_bytes + out_bytes // 2 + plan.extra_bytes


# ---- timings ---------------------------------------------------------------------------------------------------------


class Clock:
    """Gives the same milliseconds again and again: home, away, copies there and back, start."""

    def __init__(self, *times: float):
        self.times, self.runs = list(times), 0

    def __call__(self, attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
        self.runs += 1
        for attempt in attempts:
            attempt()
        return [*self.times, self.times[0]][: len(attempts)]


@pytest.fixture
def timed(tmp_path: Path) -> Callable[[Clock], Any]:
    def make(clock: Clock) -> Any:
        part = {ShareTimings: lambda runtime: ShareTimings(runtime, clock=clock, folder=lambda: tmp_path, is_on=True)}
        return using(Runtime("cpu", parts=part))

    return make


@pytest.mark.parametrize(
    ("times", "there"),
    [((10.0, 10.0, 0.1, 0.1, 0.0), 4), ((10.0, 30.0, 0.1, 0.1, 0.0), 2), ((30.0, 10.0, 0.1, 0.1, 0.0), 6)],
)
def test_shares_follow_the_timing_which_is_taken_once(
    inputs: list[Tensor], timed: Callable[[Clock], Any], times: tuple[float, ...], there: int
) -> None:
    clock = Clock(*times)
    with timed(clock):
        for _ in range(2):
            out, stats = _run(inputs)
            assert stats.devices["cpu #2"].units == there
            assert torch.equal(out, sdpa(*inputs, config=ALONE))
        why = choose(check_call(*inputs), SHARED).why
    assert f"of 8 key/value heads {8 - there} on cpu, {there} on cpu #2 (timed: 0." in why
    with timed(clock):  # another process
        _run(inputs)
    assert clock.runs == 1


@pytest.mark.parametrize("times", [(1.0, 40.0, 0.1, 0.1, 0.0), (1.0, 1.0, 500.0, 0.1, 0.0), (1.0, 1.0, 0.1, 0.1, 90.0)])
def test_a_slow_device_slow_copies_or_a_slow_start_keep_the_call_at_home(
    inputs: list[Tensor], timed: Callable[[Clock], Any], times: tuple[float, ...]
) -> None:
    with timed(Clock(*times)):
        choice = choose(check_call(*inputs), SHARED)
    assert choice.route == "tiled"
    assert "of the time of cpu alone" in choice.why


def test_what_cannot_be_timed_now_stays_at_home(inputs: list[Tensor], timed: Callable[[Clock], Any]) -> None:
    clock = Clock(1.0, 1.0, 0.1, 0.1, 0.0)
    with timed(clock):
        choice = choose(check_call(*inputs), SHARED, may_time=False)
        assert choice.why.endswith("on one device: the devices were not timed, and cannot be now")
        _run(inputs)
        assert choose(check_call(*inputs), SHARED, may_time=False).route == "several"
    assert clock.runs == 1


def test_a_device_that_fails_while_it_is_timed_is_lost(inputs: list[Tensor], timed: Callable[[Clock], Any]) -> None:
    def broken(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
        raise RuntimeError("CUDA error: device-side assert")

    with timed(broken):  # type: ignore[arg-type]
        out, _ = _run(inputs)
        assert torch.equal(out, sdpa(*inputs, config=ALONE))
        assert "cpu failed in an earlier call" in choose(check_call(*inputs), SHARED).why


def test_gradients_are_timed_as_a_kind_of_their_own(inputs: list[Tensor], timed: Callable[[Clock], Any]) -> None:
    clock = Clock(10.0, 10.0, 0.1, 0.1, 0.0)
    with timed(clock):
        leaves = [t.detach().requires_grad_() for t in inputs]
        grads = torch.autograd.grad(sdpa(*leaves, config=SHARED).sum(), leaves)
        assert clock.runs == 1
        _run(inputs)
        assert clock.runs == 2
    assert all(map(torch.equal, grads, torch.autograd.grad(sdpa(*leaves, config=ALONE).sum(), leaves)))


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_the_report_shows_shares_copies_and_what_went_wrong(inputs: list[Tensor]) -> None:
    with record() as report:
        sdpa(*inputs, config=SHARED)
        runtime_of(CPU).part(Helpers).of(CPU).is_busy()
        sdpa(*inputs, config=SHARED)
    text = report.text()
    assert "2 attention calls: 2 several" in text
    assert "shared: cpu 50%, cpu #2 50% (" in text
    assert "ms of copies" in text
    assert "1 x cpu computes attention of its own" in text
