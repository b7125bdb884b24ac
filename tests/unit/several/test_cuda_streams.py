"""A part on another CUDA device, on streams and events that only write down what waits for what."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attn_support.several.cuda import AWAY, HOME, FakeCuda, FakeTorch
from torch import Tensor

from pascal_attn_core.routes import several
from pascal_attn_core.routes.several import Helper, Tensors

DEVICES = pytest.mark.parametrize("away", [AWAY, HOME])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(several, "torch", FakeTorch(fake))
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda target, source, non_blocking=False: fake.copy(target, source, non_blocking)
    )
    return fake


def _part(cuda: FakeCuda, away: torch.device) -> tuple[Tensor, Tensor]:
    """Work of the caller, a part that is begun behind it, and more work of the caller beside it."""
    source, target, fake = torch.randn(8, 12)[:, :6], torch.zeros(8, 12)[:, :6], FakeTorch(cuda)
    cuda.copy(target, torch.ones(8, 6))

    def compute(tensors: Tensors) -> Tensors:
        assert tensors[1] is None
        made = fake.empty_like(tensors[0], away)
        cuda.copy(made, tensors[0])  # stands for a kernel: it reads one and writes the other, in the current stream
        made += 1
        return [made]

    helper = Helper(HOME, away)
    with ThreadPoolExecutor(1) as pool:
        errand = helper.start(pool, [source, None], [target, None], compute)
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
def test_what_the_caller_has_begun_comes_first_and_nothing_is_in_its_streams(
    cuda: FakeCuda, away: torch.device
) -> None:
    callers = {cuda.current_stream(device) for device in (HOME, AWAY)}
    _part(cuda, away)
    begun, *own = cuda.copies
    assert all(begun in copied.before for copied in own)
    assert not {copied.stream for copied in own} & callers
    assert {cuda.current_stream(device) for device in (HOME, AWAY)} == callers


def test_a_device_that_is_lost_while_it_is_waited_for_is_an_error(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, waited = Helper(HOME, AWAY), []

    def lost() -> None:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(helper.streams[1], "synchronize", lost)
    monkeypatch.setattr(helper.streams[0], "synchronize", lambda: waited.append(HOME))
    with pytest.raises(RuntimeError, match="device lost"):
        helper.run([torch.ones(2)], [torch.zeros(2)], lambda tensors: tensors)
    assert waited == [HOME]
