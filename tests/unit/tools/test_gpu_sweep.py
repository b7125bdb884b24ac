"""The sweep over geometries, with the strict stand-in for the driver in place of the card."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fused.device import CardKernels, emulated_card, execute
from attn_support.fused.driver import fails_once
from attn_support.fused.emulation import CARD, T4
from attn_support.gpu.compiler import AnyGeometry
from attn_support.randomness import some

from pascal_attn_core.fused.code.source import KINDS, Variant
from tools.gpu import told
from tools.gpu.geometries import Candidate, details, shapes, words
from tools.gpu.parts import table
from tools.gpu.sweep import Settings, all_jobs, sweep

CPU = torch.device("cpu")
SMALL = Settings(tokens=40, waves=0, rounds=2, most=1)
FORWARD = Variant("forward", 32, "float32")
OTHER = Variant("split", 32, "float32")


@pytest.fixture
def compiler() -> AnyGeometry:
    return AnyGeometry()


@pytest.fixture
def a_card(compiler: AnyGeometry) -> Callable[..., Any]:
    return partial(emulated_card, kind=CardKernels, find_compiler=lambda arch: compiler)


def _swept(folder: Path, *variants: Variant, settings: Settings = SMALL) -> list[dict[str, Any]]:
    """Return the results that a sweep has told."""
    sweep(CPU, list(variants), settings, folder, 1)
    return [line["result"] for line in told.read(folder).ended.values() if "result" in line]


@pytest.fixture
def card(a_card: Callable[..., Any]) -> Iterator[Any]:
    with a_card(execute) as kernels:
        yield kernels


def test_what_was_measured_is_not_measured_again(card: Any, tmp_path: Path) -> None:
    first = _swept(tmp_path, FORWARD)
    [job] = first
    assert job["shipped"] == words(FORWARD.geometry)
    tried = {lane["name"]: lane for lane in job["candidates"]}
    assert len(tried) == 2
    assert all(lane["error"] < 1e-5 and lane["seconds"] > 0 and lane["registers"] for lane in tried.values())
    assert tried[job["shipped"]]["over_shipped"] == 1.0
    assert told.read(tmp_path).begun == {}
    launched = len(card.queued)
    assert _swept(tmp_path, FORWARD) == first
    assert len(card.queued) == launched
    assert len(table(first)) == 2


def _lost(folder: Path, name: str, *, is_extra: bool) -> None:
    """Something has begun in a process that has ended."""
    teller = told.Teller(folder, "share-1")
    teller.begin(name, 9.0, is_extra=is_extra)
    teller.lose(told.read(folder).begun[name], 1.0, "it has ended its process")


def test_a_candidate_that_has_ended_its_process_is_left_alone(card: Any, tmp_path: Path) -> None:
    _lost(tmp_path, Candidate.of(OTHER, OTHER.geometry).name, is_extra=True)
    [job] = _swept(tmp_path, OTHER)
    assert card.queued == []
    assert job["shipped_note"] == "it has ended its process"
    assert job["best"] is None
    assert told.read(tmp_path).left == 0
    assert [line["test"] for line in told.read(tmp_path).with_outcome("failed")] == [OTHER.name]


def test_a_wrong_candidate_is_not_timed(a_card: Any, tmp_path: Path) -> None:
    with a_card(lambda launch: None):
        [job] = _swept(tmp_path, OTHER)
    [lane] = job["candidates"]
    assert lane["note"] == job["shipped_note"] == "wrong"
    assert "seconds" not in lane


def test_one_that_cannot_be_launched_is_noted_and_a_lost_card_ends_the_process(a_card: Any, tmp_path: Path) -> None:
    with a_card(lambda launch: None) as kernels:
        kernels.driver.faults["cuLaunchKernel"] = fails_once(701)
        assert "too many resources" in _swept(tmp_path, OTHER)[0]["shipped_note"]
        kernels.driver.faults["cuLaunchKernel"] = fails_once(700)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            sweep(CPU, [FORWARD], SMALL, tmp_path, 1)
    assert list(told.read(tmp_path).begun) == [Candidate.of(FORWARD, FORWARD.geometry).name]


def test_geometries_begin_with_the_shipped_one_and_fill_whole_warps() -> None:
    for variant in all_jobs():
        found = shapes(variant)
        assert found[0] == variant.geometry
        assert len(found) == len(set(found)) > 3, variant.name
        assert all(tiles.threads % 32 == 0 and tiles.threads * tiles.blocks <= 2048 for tiles in found)
        assert variant.geometry not in details(variant.geometry, variant.head_dim)
    assert {variant.kind for variant in all_jobs()} == set(KINDS)


_ON_TENSOR_CORES = ["small", "grad_query", "grad_key_value_capped_packed", "packed", "even"]


@pytest.mark.parametrize("kind", ["int8", "capped", *some([f"tensor_{kind}" for kind in _ON_TENSOR_CORES], 6)])
def test_every_kind_of_kernel_is_swept_on_the_cards_that_have_it(a_card: Any, tmp_path: Path, kind: str) -> None:
    variant = Variant(kind, 64, "float16")
    settings = SMALL
    if variant.on_tensor_cores:
        settings = replace(SMALL, tokens=1200 if kind == "tensor_even" else 20, most=2)
        with a_card(execute) as kernels:
            assert _swept(tmp_path, variant, settings=settings) == kernels.queued == []
    with a_card(execute, info=T4 if variant.on_tensor_cores else CARD):
        [job] = _swept(tmp_path, variant, settings=settings)
    lanes = job["candidates"]
    assert (job["shipped"], job["shipped_note"]) == (words(variant.geometry), "")
    assert len({lane["name"] for lane in lanes}) == len(lanes) > settings.most
    assert all(0 < lane["error"] < (0.1 if kind == "int8" else 1e-2) and lane["seconds"] > 0 for lane in lanes)
