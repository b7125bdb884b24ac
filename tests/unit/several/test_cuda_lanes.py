"""The lanes on CUDA, on streams and events that only write down what waits for what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from attn_support.several.cuda import AWAY, HOME, HOST, FakeCuda, FakeTorch
from torch import Tensor

from pascal_attn_core.several import lanes as lanes_module
from pascal_attn_core.several.errand import Errand, Piece
from pascal_attn_core.several.lanes import CudaLanes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(lanes_module, "torch", FakeTorch(fake))
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda target, source, non_blocking=False: fake.copy(target, source, non_blocking)
    )
    return fake


def _errand(cuda: FakeCuda, away: torch.device, *, is_direct: bool, dense: bool) -> tuple[Errand, Tensor, Tensor]:
    source = torch.randn(8, 6) if dense else torch.randn(8, 12)[:, :6]
    target = torch.zeros(8, 6) if dense else torch.zeros(8, 12)[:, :6]
    common = torch.randn(6)

    def compute(shared: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
        made = cuda_torch.empty_like(own[0], away)
        cuda.copy(made, own[0])  # stands for a kernel: it reads one and writes the other, in the current stream
        made += shared[0]
        return [made]

    cuda_torch = FakeTorch(cuda)
    pieces = [Piece([source[i : i + 2]], [target[i : i + 2]], compute) for i in range(0, 8, 2)]
    errand = Errand(CudaLanes(HOME, away, is_direct=is_direct), [common], pieces)
    errand.start()
    errand.join()
    if errand.error is not None:
        raise errand.error
    return errand, source + common, target


CASES = [(AWAY, True), (AWAY, False), (HOME, True), (HOME, False)]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("away", "is_direct"), CASES)
def test_everything_that_touches_the_same_memory_is_ordered(
    cuda: FakeCuda, away: torch.device, is_direct: bool, dense: bool
) -> None:
    errand, expected, target = _errand(cuda, away, is_direct=is_direct, dense=dense)
    assert torch.equal(target, expected)
    assert errand.finished == 4
    assert errand.copy_ms > 0
    assert errand.run_ms == 4.0
    conflicts = 0
    for first, second in itertools.combinations(cuda.copies, 2):
        if first.writes in (second.reads, second.writes) or first.reads == second.writes:
            conflicts += 1
            assert first in second.before or second in first.before
    assert conflicts >= 8


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("away", "is_direct"), CASES)
def test_nothing_is_in_a_stream_of_the_callers(
    cuda: FakeCuda, away: torch.device, is_direct: bool, dense: bool
) -> None:
    callers = {cuda.current_stream(device) for device in (HOME, AWAY)}
    _errand(cuda, away, is_direct=is_direct, dense=dense)
    assert not {copied.stream for copied in cuda.copies} & callers
    assert {cuda.current_stream(device) for device in (HOME, AWAY)} == callers


def test_the_two_links_are_used_from_streams_of_their_own_card(cuda: FakeCuda) -> None:
    _errand(cuda, AWAY, is_direct=False, dense=True)
    kinds = {(copied.source, copied.target): copied.stream for copied in cuda.copies}
    assert set(kinds) == {(HOME, HOST), (HOST, AWAY), (AWAY, AWAY), (AWAY, HOST), (HOST, HOME)}
    assert len(set(kinds.values())) == 5
    assert kinds[HOME, HOST].device == kinds[HOST, HOME].device == HOME
    assert kinds[HOST, AWAY].device == kinds[AWAY, HOST].device == kinds[AWAY, AWAY].device == AWAY


def test_what_the_caller_has_begun_comes_first(cuda: FakeCuda) -> None:
    late = torch.empty(4)
    cuda.copy(late, torch.ones(4))
    (begun,) = cuda.copies
    _errand(cuda, AWAY, is_direct=True, dense=True)
    assert all(begun in copied.before for copied in cuda.copies[1:] if HOME in (copied.source, copied.target))
    assert all(begun in copied.before for copied in cuda.copies[1:])


def test_a_device_that_is_lost_does_not_stop_the_draining(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = CudaLanes(HOME, AWAY, is_direct=True)
    asked = []

    def lost(stream: object) -> None:
        asked.append(stream)
        raise RuntimeError("CUDA error: device lost")

    for stream in lanes._streams.values():
        monkeypatch.setattr(stream, "synchronize", lambda stream=stream: lost(stream))
    lanes.drain()
    assert len(asked) == 5
