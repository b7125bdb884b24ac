"""Copies of the size of the inputs take what memory is free, unless a budget is given."""

from typing import Any

import pytest
import torch
from attn_support.oracle import assert_close, exact, plain

from pascal_attn_core import AttentionConfig, explain, sdpa
from pascal_attn_core.machine import room
from pascal_attn_core.machine.device import LARGEST_BUFFER, MIB, DeviceInfo
from pascal_attn_core.machine.room import Room, room_of
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes import torch_kernel

CPU = torch.device("cpu")
GIB = 1 << 30
CARD = DeviceInfo("mps", "Apple M1")


class Free:
    """A device's free memory, and how often it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int | None):
        self.free, self.asked, self.now = free, 0, 100.0
        monkeypatch.setattr(room, "available_bytes", self._answer)
        monkeypatch.setattr(room.time, "monotonic", lambda: self.now)

    def _answer(self, device: torch.device) -> int | None:
        self.asked += 1
        return self.free


def test_a_quarter_of_the_free_memory_asked_once_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Free(monkeypatch, 8 * GIB)
    with using(Runtime(CPU, CARD)):
        assert [room_of(CPU) for _ in range(3)] == [2 * GIB] * 3
        assert free.asked == 1
        free.free, free.now = 4 * GIB, 102.0
        assert room_of(CPU) == GIB
        free.free, free.now = 100 * GIB, 104.0
        assert room_of(CPU) == LARGEST_BUFFER
        for free.free, free.now in ((80 * MIB, 106.0), (None, 108.0)):
            assert room_of(CPU) == 64 * MIB


def test_after_a_lack_of_memory_less_is_taken_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Free(monkeypatch, GIB)
    its = Runtime(CPU, CARD).part(Room)
    assert [its.ran_out(), its.most_bytes()] == [True, 128 * MIB]
    assert [its.ran_out(), its.most_bytes()] == [True, 64 * MIB]
    assert not its.ran_out()
    free.now += 61
    assert its.most_bytes() == 256 * MIB


def _with_gaps(tokens: int = 5000) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 64, tokens).mT for _ in range(3)]


@pytest.mark.parametrize(
    ("free", "budget_mib", "expected"), [(GIB, None, "torch"), (None, None, "tiled"), (GIB, 1.0, "tiled")]
)
def test_a_copy_is_refused_only_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, free: int | None, budget_mib: float | None, expected: str
) -> None:
    monkeypatch.setattr(DeviceInfo, "default_budget_bytes", lambda self, **_: 1 * MIB)
    Free(monkeypatch, free)
    tensors = _with_gaps()
    with using(Runtime(CPU)):
        assert explain(*tensors, config=AttentionConfig(budget_mib=budget_mib)).startswith(f"route {expected}")


def test_a_copy_that_finds_no_memory_leaves_the_call_to_another_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of the first plan, and of each with half of its memory, find none."""
    Free(monkeypatch, GIB)
    monkeypatch.setattr(DeviceInfo, "default_budget_bytes", lambda self, **_: 1 * MIB)
    run_form = torch_kernel.run_form
    tried: list[Any] = []

    def short_of_memory(call: Any, form: Any) -> torch.Tensor:
        tried.append(form)
        if form.copied:
            raise torch.OutOfMemoryError("out of memory")
        return run_form(call, form)

    monkeypatch.setattr(torch_kernel, "run_form", short_of_memory)
    tensors = _with_gaps(1500)
    with using(Runtime(CPU)):
        out = sdpa(*tensors)
    assert len(tried) > 1
    assert_close(out, exact(tensors, {})[0], plain(tensors, {}, torch.float32)[0], "out", dtype=torch.float32)
