"""One reversible change to a host."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from pascal_attn_core import Patch
from pascal_attn_core.ffn import FfnReport
from pascal_attn_core.int8 import Int8Report
from pascal_attn_core.patching.patch import ON, AnyReport, PatchGroup, PatchReport, State
from pascal_attn_core.vae import VaeReport

REPORTS = [PatchReport([State("blocks.0", ON)]), FfnReport([]), Int8Report([], 0.05, "host"), VaeReport([])]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_is_printed_as_its_text(report: AnyReport) -> None:
    assert str(report) == report.text()


def test_a_patch_is_active_until_it_is_removed_once_and_forgetting_it_does_not_remove_it() -> None:
    undone = []
    Patch("forgotten", lambda: undone.append(1))
    assert undone == []
    patch = Patch("change", lambda: undone.append(1), sites=3)
    assert patch.active
    assert repr(patch) == "Patch('change', sites=3, active)"
    patch.remove()
    patch.remove()
    assert undone == [1]
    assert not patch.active
    assert repr(patch) == "Patch('change', sites=3, removed)"


def test_with_removes_it_even_after_an_error() -> None:
    patch = Patch("change", lambda: None)
    with pytest.raises(KeyError), patch:
        {}["missing"]
    assert not patch.active


def test_applying_and_removing_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pascal_attn"):
        Patch("change", lambda: ["one place was left as it is"], sites=2).remove()
    assert [record.getMessage() for record in caplog.records] == [
        "change: applied at 2 places",
        "change: one place was left as it is",
        "change: removed",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]


def test_many_threads_remove_it_once() -> None:
    undone = []
    patch = Patch("change", lambda: undone.append(1))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: patch.remove(), range(16)))
    assert undone == [1]


def test_a_group_that_fails_half_way_undoes_itself_backwards() -> None:
    undone = []

    def change() -> None:
        with PatchGroup("change") as group:
            for site in (1, 2):
                group.add(lambda site=site: undone.append(site))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert undone == [2, 1]


def test_a_finished_group_is_one_patch() -> None:
    undone = []
    with PatchGroup("change") as group:
        for site in (1, 2, 3):
            group.add(lambda site=site: undone.append(site) or [f"left {site}"])
    patch = group.patch()
    assert patch.sites == 3
    assert undone == []
    patch.remove()
    assert undone == [3, 2, 1]
