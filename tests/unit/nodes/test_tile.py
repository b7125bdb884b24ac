"""Pascal Tile Size without ComfyUI: the plan in words, the measurement, the file."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.clock import Clock
from attn_support.comfy.stub import StubHost, node_module

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.routes.timing_table import median_times
from pascal_attn_core.tiled.plan import plan_call

tile = node_module("tile_size")
GTX_1080_TI = DeviceInfo("cuda", "NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61")
CARD = tile.Card(GTX_1080_TI, 10 << 30, 11 << 30)
NO_MEMORY = torch.OutOfMemoryError("tried to allocate 1 GiB\nand more")
CPU = tile.Card(DeviceInfo("cpu", "CPU"), 8 << 30, 16 << 30)


def shape(tokens: int = 4096, heads: int = 24, dtype: str = "float32", budget_mib: int = 0) -> Any:
    return tile.Shape(dtype, tokens, heads, 64, budget_mib)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_number_is_what_the_tiled_route_would_choose(dtype: str) -> None:
    query = torch.zeros(1, 128, 2, 64, dtype=getattr(torch, dtype)).transpose(1, 2)
    call = check_call(query, query, query)
    small = shape(128, 2, dtype)
    for card in (CARD, CPU):
        assert astuple(tile.plan_for(card, small)) == astuple(plan_call(call, card.info, AttentionConfig()))
    assert tile.plan_for(CARD, shape(dtype=dtype)).kv_block in range(1024, 4096)


def test_a_card_that_is_nearly_full_gets_smaller_tiles() -> None:
    full = tile.Card(GTX_1080_TI, 16 << 20, 11 << 30)
    plan = tile.plan_for(full, shape())
    assert plan.extra_bytes <= 8 << 20
    assert plan.kv_block < tile.plan_for(CARD, shape()).kv_block


def test_a_measurement_times_every_size_and_leaves_the_random_numbers_alone(host: StubHost) -> None:
    before = torch.get_rng_state()
    with timed_by(median_times):
        sizes = tile.runtime_of(torch.device("cpu")).part(tile.TileSizes).of(shape(512, 1), 512)
    assert list(sizes) == ["own choice", "256", "512"]
    assert all(ms > 0 for ms in sizes.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_timed_call_fits_half_of_the_free_memory() -> None:
    free = tile.Card(GTX_1080_TI, 256 << 20, 11 << 30)
    smaller = tile.within_limits(free, shape(32768))
    assert smaller.heads < 24
    assert smaller.tokens * smaller.heads * 64 * (4 * 4 + 8) <= (128 << 20) - (64 << 20)
    with pytest.raises(tile.CannotMeasure, match="only 64 MiB are free"):
        tile.within_limits(tile.Card(GTX_1080_TI, 64 << 20, 11 << 30), shape(32768))


def test_cancel_ends_a_measurement(host: StubHost) -> None:
    host.interrupt, host.at_look = KeyboardInterrupt(), 3
    with pytest.raises(KeyboardInterrupt):
        choose("measure")


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        (Clock(1.0, math.inf, 1.0), "the call takes too long to be timed in 4 seconds"),
        (Mock(side_effect=NO_MEMORY), "the card ran out of memory: tried to allocate 1 GiB"),
    ],
)
def test_what_cannot_be_measured_comes_from_the_card_with_the_reason(host, tmp_path, clock: Any, words: str) -> None:
    with timed_by(clock):
        size, text = choose("measure")
        assert size == choose("from the card")[0]
    assert text.endswith(f" It could not be measured: {words}.")
    assert list(tmp_path.iterdir()) == []


def test_the_sentence_says_what_was_timed_instead(host: StubHost) -> None:
    with timed_by(Clock(*[10.0] * 9)):
        assert "as measured with 4096 tokens, 1 head of 64 in float32 (" in choose("measure", tokens=4096, heads=24)[1]


@pytest.fixture
def host(stub_host: StubHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StubHost:
    module = node_module("comfy.host")
    monkeypatch.setattr(module, "free_and_total_bytes", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)
    monkeypatch.setattr(module, "user_directory", lambda: str(tmp_path))
    return stub_host


def choose(mode: str, **inputs: Any) -> tuple[int, str]:
    return tile.PascalTileSize().choose(mode, **{"tokens": 512, "heads": 1, "unique_id": "1", **inputs})


@contextmanager
def timed_by(clock: Any) -> Iterator[Any]:
    """A new process, in which sizes take these times."""
    core = sys.modules[tile.runtime_of.__module__]  # the copy of the core that the pack brings
    made = core.Runtime("cpu", parts={tile.TileSizes: lambda runtime: tile.TileSizes(runtime, clock=clock)})
    with core.using(made):
        yield clock


def test_the_winner_is_remembered_and_said_on_the_node(host: StubHost, tmp_path: Path) -> None:
    with timed_by(Clock(10.0, 8.0, 9.0)) as clock:
        for _ in range(2):
            size, text = choose("measure")
            assert size == 256
            assert "256 keys per tile are fastest, as measured (own choice: 10.0 ms, 256: 8.0 ms, 512: 9.0 ms)" in text
            assert host.said[-1] == "256 keys per tile"
        assert clock.runs == 1
        choose("measure again")
        assert clock.runs == 2
    (file,) = tmp_path.iterdir()
    (row,) = json.loads(file.read_text())["milliseconds"]
    assert row["times"] == {"own choice": 10.0, "256": 8.0, "512": 9.0}
    with timed_by(Clock(1.0, 9.0, 9.0)) as clock:
        assert choose("measure")[0] == 256
        assert choose("measure", budget_mib=2)[0] == choose("measure again")[0] == 0
        clock.times = (10.0, 9.8, 10.0)  # it must be clearly faster than the route's own choice
        size, text = choose("measure again")
        assert size == 0
        assert "fastest with its own choice" in text
    assert clock.runs == 3


@pytest.mark.parametrize("wrong", ['"x": 8.0', '"-1": 8.0', '"65537": 8.0', '"256": null', '"256": -8.0'])
def test_an_entry_that_makes_no_sense_is_measured_again(host: StubHost, tmp_path: Path, wrong: str) -> None:
    with timed_by(Clock(10.0, 8.0, 9.0)):
        choose("measure")
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"256": 8.0', wrong))
    with timed_by(Clock(10.0, 9.0, 8.0)):
        assert choose("measure")[0] == 512
