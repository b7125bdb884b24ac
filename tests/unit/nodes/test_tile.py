"""Pascal Tile Size without ComfyUI: the plan in words, the measurement, the file."""

from __future__ import annotations

import json
import logging
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import StubHost, node_module, stub_host  # noqa: F401

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import check_call
from pascal_attn_core.device import DeviceInfo
from pascal_attn_core.tiled.plan import plan_call

tile, timing, store_module, node = (
    node_module(n) for n in ("tiles.choice", "tiles.measure", "tiles.store", "tile_size")
)
GTX_1080_TI = DeviceInfo("cuda", "NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61")
CARD = tile.Card(GTX_1080_TI, 10 << 30, 11 << 30)
CPU = tile.Card(DeviceInfo("cpu", "CPU"), 8 << 30, 16 << 30)


def shape(tokens: int = 4096, heads: int = 24, dtype: torch.dtype = torch.float32, budget_mib: int = 0) -> Any:
    return tile.Shape(tokens, heads, 64, dtype, budget_mib)


# ---- from the card ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_number_is_what_the_tiled_route_would_choose(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 128, 2, 64, dtype=dtype).transpose(1, 2)
    call = check_call(query, query, query)
    small = shape(128, 2, dtype)
    for card in (CARD, CPU):
        assert astuple(tile.plan_for(card, small)) == astuple(plan_call(call, card.info, AttentionConfig()))
    assert tile.plan_for(CARD, shape(dtype=dtype)).kv_block in range(1024, 4096)


def test_the_sentence_holds_the_numbers() -> None:
    plan = tile.plan_for(CARD, shape())
    text = tile.sentence(CARD, shape(), plan)
    for part in (
        "NVIDIA GeForce GTX 1080 Ti with 2.75 MiB of L2 cache and 10.0 of 11.0 GiB free",
        "for 4096 tokens, 24 heads of 64 in float32",
        f"takes {plan.kv_block} keys per tile",
        "64 x 64.",
    ):
        assert part in text
    assert "\n" not in text


def test_a_card_that_is_nearly_full_gets_smaller_tiles() -> None:
    full = tile.Card(GTX_1080_TI, 16 << 20, 11 << 30)
    plan = tile.plan_for(full, shape())
    assert plan.extra_bytes <= 8 << 20
    assert plan.kv_block < tile.plan_for(CARD, shape()).kv_block


def test_a_cache_that_is_not_known_is_said_to_be() -> None:
    card = tile.Card(DeviceInfo("xpu", "Arc"), 0, 0)
    assert card.text() == "Arc with L2 cache of unknown size"


def test_what_is_remembered_has_a_readable_key() -> None:
    key = shape(dtype=torch.float16).key(GTX_1080_TI.name)
    assert key == "NVIDIA GeForce GTX 1080 Ti | float16 | D 64 | 4096 tokens | 24 heads"
    assert shape(budget_mib=32).key("X").endswith("| 32 MiB")


# ---- the measurement ----


def test_a_measurement_times_every_size_and_leaves_the_random_numbers_alone(stub_host: StubHost) -> None:  # noqa: F811
    before = torch.get_rng_state()
    times, timed = timing.measure(CPU, shape(512, 1), 512, torch.device("cpu"))
    assert list(times) == [0, 256, 512]
    assert all(ms > 0 for ms in times.values())
    assert timed == shape(512, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_timed_call_fits_half_of_the_free_memory() -> None:
    free = tile.Card(GTX_1080_TI, 256 << 20, 11 << 30)
    smaller = timing.within_limits(free, shape(32768))
    assert smaller.heads < 24
    assert smaller.tokens * smaller.heads * 64 * (4 * 4 + 8) <= (128 << 20) - (64 << 20)
    with pytest.raises(timing.CannotMeasure, match="only 64 MiB are free"):
        timing.within_limits(tile.Card(GTX_1080_TI, 64 << 20, 11 << 30), shape(32768))


def test_cancel_ends_a_measurement(stub_host: StubHost) -> None:  # noqa: F811
    stub_host.interrupt, stub_host.at_look = KeyboardInterrupt(), 3
    with pytest.raises(KeyboardInterrupt):
        timing.measure(CPU, shape(512, 1), 512, torch.device("cpu"))


def test_without_time_or_memory_it_says_so(stub_host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(timing, "_SECONDS", -1.0)
    with pytest.raises(timing.CannotMeasure, match="too long"):
        timing.measure(CPU, shape(2048, 1), 512, torch.device("cpu"))

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB\nand more")

    monkeypatch.setattr(timing, "sdpa", full)
    with pytest.raises(timing.CannotMeasure, match=r"ran out of memory: tried to allocate 1 GiB$"):
        timing.measure(CPU, shape(512, 1), 512, torch.device("cpu"))


# ---- the node ----


@pytest.fixture
def host(stub_host: StubHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StubHost:  # noqa: F811
    module = node_module("comfy.host")
    monkeypatch.setattr(module, "free_and_total_bytes", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)
    monkeypatch.setattr(module, "user_directory", lambda: str(tmp_path))
    return stub_host


def choose(mode: str, **inputs: Any) -> tuple[int, str]:
    return node.PascalTileSize().choose(mode, **{"tokens": 512, "heads": 1, "unique_id": "1", **inputs})


def measured(monkeypatch: pytest.MonkeyPatch, times: dict[int, float]) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr(
        node, "measure", lambda card, shape, planned, device: calls.append(1) or timing.Timing(times, shape)
    )
    return calls


def test_the_winner_is_remembered_and_said_on_the_node(
    host: StubHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = measured(monkeypatch, {0: 10.0, 256: 8.0, 512: 9.0})
    for mode in ("measure", "measure"):
        size, text = choose(mode)
        assert size == 256
        assert "256 keys per tile are fastest, as measured on" in text
        assert host.said[-1] == "256 keys per tile"
    assert len(calls) == 1
    choose("measure again")
    assert len(calls) == 2
    (entry,) = json.loads((tmp_path / "pascal_attn_tile_sizes.json").read_text()).values()
    assert entry["milliseconds"] == {"own choice": 10.0, "256": 8.0, "512": 9.0}


def test_a_fixed_size_must_be_clearly_faster_than_the_routes_own_choice(
    host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, {0: 10.0, 256: 9.8})
    size, text = choose("measure")
    assert size == 0
    assert "fastest with its own choice" in text


def test_what_cannot_be_measured_comes_from_the_card(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise timing.CannotMeasure("only 3 MiB are free")

    monkeypatch.setattr(node, "measure", refuse)
    size, text = choose("measure")
    assert size == choose("from the card")[0]
    assert text.endswith("It could not be measured: only 3 MiB are free.")


# ---- the file ----


@pytest.mark.parametrize("content", ["{", "[1]", "\x00\xff"], ids=["cut", "list", "binary"])
def test_a_broken_file_is_set_aside_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sizes.json"
    path.write_bytes(content.encode("latin-1"))
    store = store_module.TileStore(path)
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        assert store.get("key") is None
        assert "cannot be read" in caplog.text
        store.put("key", {"tile_size": 256})
    assert store.get("key") == {"tile_size": 256}
    assert path.with_suffix(".broken").read_bytes() == content.encode("latin-1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sizes.broken", "sizes.json"]


@pytest.mark.parametrize("entry", [{}, {"tile_size": "256"}, {"tile_size": -1}, {"tile_size": True}, 256])
def test_an_entry_that_makes_no_sense_is_not_used(entry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps({"key": entry}))
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        assert store_module.TileStore(path).get("key") is None
    assert "tile_size from 0 to 65536" in caplog.text


def test_what_others_remembered_stays(tmp_path: Path) -> None:
    store = store_module.TileStore(tmp_path / "deep" / "sizes.json")
    store.put("a", {"tile_size": 1})
    store.put("b", {"tile_size": 2})
    assert (store.get("a"), store.get("b")) == ({"tile_size": 1}, {"tile_size": 2})


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = store_module.TileStore(tmp_path / "file" / "sizes.json")
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        store.put("a", {"tile_size": 1})
    assert "cannot be kept" in caplog.text
