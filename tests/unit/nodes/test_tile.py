"""Pascal Tile Size without ComfyUI: the plan in words, the measurement."""

import math
from dataclasses import astuple
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.clock import Clock
from attn_support.comfy.stub import StubHost, node_module

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.tiled.plan import plan_call

tile = node_module("tile_size")
GTX_1080_TI = DeviceInfo("cuda", "NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61")
NO_MEMORY = torch.OutOfMemoryError("tried to allocate 1 GiB\nand more")


def shape(tokens: int = 4096, heads: int = 24, dtype: str = "float32", budget_mib: int = 0) -> Any:
    return tile.Shape(dtype, tokens, heads, 64, budget_mib)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_number_is_what_the_tiled_route_would_choose(dtype: str) -> None:
    query = torch.zeros(1, 128, 2, 64, dtype=getattr(torch, dtype)).transpose(1, 2)
    call = check_call(query, query, query)
    small = shape(128, 2, dtype)
    for info in (GTX_1080_TI, DeviceInfo("cpu", "CPU")):
        assert astuple(tile.plan_for(info, small, 8 << 30)) == astuple(plan_call(call, info, AttentionConfig()))
    assert tile.plan_for(GTX_1080_TI, shape(dtype=dtype), 8 << 30).kv_block in range(1024, 4096)


def test_a_measurement_times_every_size_and_leaves_the_random_numbers_alone(host: StubHost) -> None:
    before = torch.get_rng_state()
    sizes = tile.measured(shape(512, 1), 512, torch.device("cpu"))
    assert list(sizes) == ["own choice", "256", "512"]
    assert all(ms > 0 for ms in sizes.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_timed_call_fits_its_memory() -> None:
    smaller = tile.smaller(shape(8192), 64 << 20, is_gpu=True)
    assert 1 < smaller.heads < 24
    assert smaller.tokens * smaller.heads * 64 * (4 * 4 + 8) <= 64 << 20
    assert tile.smaller(shape(32768), 1 << 20, is_gpu=True)[1:3] == (1024, 1)
    assert tile.smaller(shape(4096, 2), 64 << 20, is_gpu=True) == shape(4096, 2)


def test_cancel_ends_a_measurement(host: StubHost) -> None:
    host.interrupt, host.at_look = KeyboardInterrupt(), 3
    with pytest.raises(KeyboardInterrupt):
        choose("measure")


def test_without_memory_the_size_comes_from_the_card_with_the_reason(host: StubHost, clock: Mock) -> None:
    clock.side_effect = NO_MEMORY
    size, text = choose("measure")
    assert size == choose("from the card")[0]
    assert text.endswith(", not measured: the card ran out of memory (tried to allocate 1 GiB).")
    clock.side_effect = RuntimeError("no kernel image")
    with pytest.raises(RuntimeError, match="no kernel image"):
        choose("measure")


@pytest.fixture
def host(stub_host: StubHost, monkeypatch: pytest.MonkeyPatch) -> StubHost:
    module = node_module("comfy.host")
    monkeypatch.setattr(module, "free_and_total_bytes", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)
    return stub_host


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The clock of a measurement, whose results a test sets."""
    found = Mock()
    monkeypatch.setattr(tile, "median_times", lambda attempts, device, seconds: found(attempts, device))
    return found


def choose(mode: str, **inputs: Any) -> tuple[int, str]:
    return tile.PascalTileSize().choose(mode, **{"tokens": 512, "heads": 1, "unique_id": "1", **inputs})


@pytest.mark.parametrize(
    ("times", "size", "words"),
    [
        ((10.0, 8.0, 9.0), 256, "256 keys per tile are fastest"),
        ((10.0, 9.8, 10.0), 0, "the tiled route is fastest with its own choice"),
        ((10.0, math.inf, 9.0), 512, "512 keys per tile are fastest"),
    ],
)
def test_the_winner_is_said_on_the_node(host, clock: Mock, times: Any, size: int, words: str) -> None:
    clock.side_effect = Clock(*times)
    found, text = choose("measure")
    assert found == size
    listed = ", ".join(
        f"{name}: {time:g} ms" for name, time in zip(("own choice", "256", "512"), times) if time < math.inf
    )
    assert text.endswith(f" {words}, as measured with 512 tokens, 1 head of 64 in float32 ({listed}).")
    assert host.said[-1] == (f"{size} keys per tile" if size else "0: the patch chooses best by itself")
