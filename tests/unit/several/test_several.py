"""The route that shares a call out: faults on the other device, memory, interrupts, threads, timings, streams."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.clock import Clock
from torch import Tensor

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.config import RouteUnavailable
from pascal_attn_core.machine.runtime import Runtime, runtime_of, using
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.observe.progress import between_blocks
from pascal_attn_core.routes import choose, several
from pascal_attn_core.routes.run import run as run_call
from pascal_attn_core.routes.several import Helper, Helpers, Inputs, Speed, Speeds, divided
from pascal_attn_core.routes.tiled import TiledRoute
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


def _helper() -> Helper:
    return runtime_of(CPU).part(Helpers)[CPU, 0]


def _run(inputs: list[Tensor], config: AttentionConfig = SHARED) -> tuple[Tensor, Any]:
    with record() as report:
        out = sdpa(*inputs, config=config)
    (stats,) = report.calls.values()
    return out, stats


class Faulty(Helper):
    """Raises at a point of a part: before it begins, behind the copies there, behind the computation, at the end."""

    POINTS = 4

    def __init__(self, at: int, error: Exception):
        super().__init__(CPU, CPU)
        self.at, self.error, self.count = at, error, 0

    def _point(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise self.error

    def follow_caller(self) -> None:
        self._point()

    def run(self, inputs: Any, out: Any, compute: Any, *modes: bool) -> None:
        def computed(tensors: Any) -> Any:
            self._point()
            result = compute(tensors)
            self._point()
            return result

        super().run(inputs, out, computed, *modes)
        self._point()

    def install(self) -> None:
        runtime_of(CPU).part(Helpers)[CPU, 0] = self


ERRORS: dict[str, tuple[Exception, str]] = {
    "lost": (RuntimeError("CUDA error: unspecified launch failure\nmore"), "failed (RuntimeError: CUDA error: "),
    "memory": (RuntimeError("CUDA error: out of memory"), "ran out of memory"),
    "refused": (RouteUnavailable("no kernel for this card"), "failed (RouteUnavailable: no kernel for this "),
}


@pytest.mark.parametrize("at", range(1, Faulty.POINTS + 1))
@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_fails_there_is_computed_at_home(kind: str, at: int, inputs, caplog) -> None:
    expected, kept = sdpa(*inputs, config=ALONE), [t.clone() for t in inputs]
    error, words = ERRORS[kind]
    helper = Faulty(at, error)
    helper.install()
    for _ in range(2):
        out, stats = _run(inputs)
        assert torch.equal(out, expected)
        assert len(caplog.records) == 1
        if stats.remarks:
            ((remark, _),) = stats.remarks.items()
            assert remark.startswith(f"cpu {words}")
            assert remark.endswith(": the call was computed on cpu")
            assert stats.devices == {"cpu": 8, "cpu #2": 0}
    choice = choose(check_call(*inputs), SHARED)
    assert choice.route == "tiled"
    assert choice.why.partition("on one device: ")[2].startswith(f"cpu {words}")
    assert choice.why.endswith(" a moment ago")
    assert all(map(torch.equal, inputs, kept))
    helper._until = 0.0
    out, stats = _run(inputs)
    assert torch.equal(out, expected)
    assert stats.devices == {"cpu": 4, "cpu #2": 4}


def test_no_memory_at_home_for_the_parts_is_no_error(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is computed as a whole, which needs less."""
    expected = sdpa(*inputs, config=ALONE)
    real, home = TiledRoute.forward, threading.current_thread()

    def forward(self: Any, call: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is home and call.num_heads < 8:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return real(self, call, *args, **options)

    monkeypatch.setattr(TiledRoute, "forward", forward)
    out, stats = _run(inputs)
    assert torch.equal(out, expected)
    (remark,) = stats.remarks
    assert remark.startswith("cpu could not compute its part (RuntimeError: ")
    assert not _helper().why_not()


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_ends_the_call_and_nothing_runs_on(inputs: list[Tensor], at: int) -> None:
    checkpoint = Mock(side_effect=[*[None] * (at - 1), KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt), between_blocks(checkpoint):
        sdpa(*inputs, config=SHARED)
    assert not [thread for thread in threading.enumerate() if "other device" in thread.name]
    out, stats = _run(inputs)
    assert stats.remarks == {}
    assert torch.equal(out, sdpa(*inputs, config=ALONE))


def test_an_interrupt_waits_for_the_other_device(inputs: list[Tensor]) -> None:
    """Nothing may read or write the caller's tensors any more."""
    over = threading.Event()

    class Slow(Helper):
        def run(self, *args: Any, **options: Any) -> None:
            super().run(*args, **options)
            over.set()

    runtime_of(CPU).part(Helpers)[CPU, 0] = Slow(CPU, CPU)
    with pytest.raises(KeyboardInterrupt), between_blocks(Mock(side_effect=KeyboardInterrupt)):
        sdpa(*inputs, config=SHARED)
    assert over.is_set()


def test_a_device_with_calls_of_its_own_is_left_alone(inputs: list[Tensor]) -> None:
    choice = choose(check_call(*inputs), SHARED)
    _helper().leave_alone("cpu computes attention of its own")
    with record() as report:
        out, *_ = run_call(check_call(*inputs), SHARED, with_lse=False, choice=choice)  # as the nodes' engine does
    (stats,) = report.calls.values()
    assert list(stats.remarks) == ["cpu computes attention of its own"]
    assert torch.equal(out, sdpa(*inputs, config=ALONE))


def test_a_budget_that_does_not_suffice_is_an_error_as_on_one_device(inputs: list[Tensor]) -> None:
    config = replace(SHARED, q_block=4096, kv_block=4096, budget_mib=1 / 16)
    long = [torch.randn(1, 2, 5000, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="budget_mib must be at least") as alone:
        sdpa(*long, config=replace(config, devices=()))
    with pytest.raises(ValueError, match="budget_mib must be at least") as shared:
        sdpa(*long, config=config)
    assert str(alone.value) == str(shared.value)


@pytest.mark.parametrize("is_tokens_first", [True, False])
def test_memory_at_home_is_the_plan_and_the_parts_exactly(is_tokens_first: bool) -> None:
    """The memory is the output, the part that home computes (which is copied into it), and the route's own plan."""
    inputs = [torch.randn(2, 8, 700, 32) for _ in range(3)]
    if is_tokens_first:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    sdpa(*inputs, config=SHARED)
    with PeakMemory("cpu") as alone:
        sdpa(*inputs, config=ALONE)
    with PeakMemory("cpu") as together:
        out = sdpa(*inputs, config=SHARED)
    plan = plan_call(check_call(*inputs), runtime_of(CPU).info, ALONE)
    assert alone.peak_bytes <= out.nbytes + plan.extra_bytes
    assert together.peak_bytes - alone.peak_bytes == out.nbytes // 2


@pytest.fixture
def timed(tmp_path: Path) -> Callable[[Any], Any]:
    def make(clock: Any) -> Any:
        part = {Speeds: lambda runtime: Speeds(runtime, clock=clock, folder=lambda: tmp_path, is_on=True)}
        return using(Runtime("cpu", parts=part))

    return make


@pytest.mark.parametrize(
    ("times", "there"), [((10.0, 10.1, 0.1), 4), ((10.0, 30.1, 0.1), 2), ((30.0, 10.1, 0.1), 6), ((10.0, 12.0, 2.0), 2)]
)
def test_shares_follow_the_timing_which_is_taken_once(inputs, timed, times: tuple[float, ...], there: int) -> None:
    clock = Clock(*times)
    with timed(clock):
        for _ in range(2):
            out, stats = _run(inputs)
            assert stats.devices["cpu #2"] == there
            assert torch.equal(out, sdpa(*inputs, config=ALONE))
        why = choose(check_call(*inputs), SHARED).why
    assert f"of 8 key/value heads {8 - there} on cpu, {there} on cpu #2 (timed: 0." in why
    with timed(clock):  # another process
        _run(inputs)
    assert clock.runs == 1


@pytest.mark.parametrize("times", [(1.0, 40.0, 0.1), (1.0, 40.0, 39.0)])
def test_a_slow_device_or_slow_copies_keep_the_call_at_home(inputs, timed, times: tuple[float, ...]) -> None:
    with timed(Clock(*times)):
        choice = choose(check_call(*inputs), SHARED)
    assert choice.route == "tiled"
    assert "of the time of cpu alone" in choice.why


@pytest.mark.parametrize("heads", [2, 5, 24, 40])
@pytest.mark.parametrize("speed", [Speed(1.0, 1.0, 0.0), Speed(1.0, 0.4, 0.2), Speed(1.0, 3.0, 9.0)])
def test_the_division_is_the_best_there_is(heads: int, speed: Speed) -> None:
    counts, ratio = divided(heads, 2.0, 0.5, (speed,))
    away = 2.0 * speed.away + 0.5 * speed.copies
    best = min(max((heads - there) * 2.0, there * away) for there in range(heads))
    assert sum(counts) == heads
    assert ratio == pytest.approx(best / (heads * 2.0))


def test_a_device_that_fails_while_it_is_timed_is_left_alone(inputs: list[Tensor], timed: Callable[[Any], Any]) -> None:
    with timed(Mock(side_effect=RuntimeError("CUDA error: device-side assert"))):
        out, _ = _run(inputs)
        assert torch.equal(out, sdpa(*inputs, config=ALONE))
        why = choose(check_call(*inputs), SHARED).why
        assert why.endswith("cpu failed (RuntimeError: CUDA error: device-side assert) a moment ago")


HOME, AWAY = torch.device("cuda", 0), torch.device("cuda", 1)
_copy = torch.Tensor.copy_


@dataclass(eq=False)
class Copied:
    """A copy: in which stream, what is over when it begins, and the storages it touches."""

    stream: FakeStream
    before: set[Copied]
    reads: int
    writes: int


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: torch.device):
        self.cuda, self.device = cuda, torch.device(device)
        self.done: set[Copied] = set()  # over when the next thing in it begins

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        self.cuda.host |= self.done


@dataclass
class FakeCuda:
    """This class stands in place of ``torch.cuda``."""

    places: dict[int, torch.device] = field(default_factory=dict)  # of what empty_like made; all others are at home
    copies: list[Copied] = field(default_factory=list)
    host: set[Copied] = field(default_factory=set)  # those that the host knows to be over
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current = {device: FakeStream(self, device) for device in (HOME, AWAY)}
        self._device = HOME

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, device)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current[device]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device
        yield
        self._device = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current[stream.device] = self._current[stream.device], stream
        with self.device(stream.device):
            yield
        self._current[stream.device] = before

    def place(self, tensor: Tensor) -> torch.device:
        return self.places.get(tensor.untyped_storage().data_ptr(), HOME)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``target.copy_(source)``."""
        to, of = self.place(target), self.place(source)
        stream = self._current[of]
        stream.done |= self._current[to].done
        read, written = (tensor.untyped_storage().data_ptr() for tensor in (source, target))
        copied = Copied(stream, stream.done | self.host, read, written)
        self.copies.append(copied)
        stream.done = stream.done | {copied}
        self._current[to].done |= stream.done
        return _copy(target, source)

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """``torch.empty_like``: tensors of other devices lie on the CPU."""
        made = torch.empty_like(tensor)
        self.places[made.untyped_storage().data_ptr()] = device
        self.kept.append(made)  # no address is given out twice
        return made


DEVICES = pytest.mark.parametrize("away", [AWAY, HOME])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    names = vars(torch) | {"cuda": fake, "empty_like": fake.empty_like}
    monkeypatch.setattr(several, "torch", SimpleNamespace(**names))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source, **options: fake.copy(target, source, **options))
    return fake


def _part(cuda: FakeCuda, away: torch.device) -> tuple[Tensor, Tensor]:
    """Work of the caller, a part that is begun behind it, and more work of the caller beside it."""
    source, target = torch.randn(8, 12)[:, :6], torch.zeros(8, 12)[:, :6]
    cuda.copy(target, torch.ones(8, 6))

    def compute(tensors: Inputs) -> Tensor:
        assert tensors[1] is None
        made = cuda.empty_like(tensors[0], away)
        cuda.copy(made, tensors[0])  # stands for a kernel: it reads one and writes the other, in the current stream
        made += 1
        return made

    helper = Helper(HOME, away)
    with ThreadPoolExecutor(1) as pool:
        errand = helper.start(pool, [source, None], target, compute)
    errand.result()
    return source + 1, target


@DEVICES
def test_everything_that_touches_the_same_memory_is_ordered(cuda: FakeCuda, away: torch.device) -> None:
    expected, target = _part(cuda, away)
    assert torch.equal(target, expected)
    conflicts = 0
    for first, second in itertools.combinations(cuda.copies, 2):
        if first.writes in (second.reads, second.writes) or first.reads == second.writes:
            conflicts += 1
            assert first in second.before or second in first.before
    assert conflicts == 3
    assert set(cuda.copies[1:]) <= cuda.host  # it was waited for


@DEVICES
def test_what_the_caller_has_begun_comes_first_and_nothing_is_in_its_streams(cuda, away: torch.device) -> None:
    callers = {cuda.current_stream(device) for device in (HOME, AWAY)}
    _part(cuda, away)
    begun, *own = cuda.copies
    assert all(begun in copied.before for copied in own)
    assert not {copied.stream for copied in own} & callers
    assert {cuda.current_stream(device) for device in (HOME, AWAY)} == callers


def test_a_device_that_is_lost_while_it_is_waited_for_is_an_error(cuda: FakeCuda, monkeypatch: Any) -> None:
    helper, waited = Helper(HOME, AWAY), Mock()
    monkeypatch.setattr(helper.streams[1], "synchronize", Mock(side_effect=RuntimeError("CUDA error: device lost")))
    monkeypatch.setattr(helper.streams[0], "synchronize", waited)
    with pytest.raises(RuntimeError, match="device lost"):
        helper.run([torch.ones(2)], torch.zeros(2), lambda tensors: tensors[0])
    assert waited.called
