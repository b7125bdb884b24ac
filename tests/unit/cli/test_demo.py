"""The demo runs offline at a small size, tells the truth in its table, and goes on where a run cannot take place."""

import json
import socket

import pytest

from pascal_attn_core.cli import main

pytest.importorskip("diffusers")
pytest.importorskip("matplotlib")

from pascal_attn_core.cli import demo
from pascal_attn_core.cli.demo import models


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run of the whole command without a network: its folder and its results."""
    folder = tmp_path_factory.mktemp("demo")

    def refuse(*args, **kwargs):
        raise AssertionError(f"the demo must not use the network, got {args}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        assert main(["demo", "--quick", "--steps", "1", "--out", str(folder)]) == 0
    return folder, json.loads((folder / "results.json").read_text())


def rows_of(results):
    return [(each["model"]["name"], {row["name"]: row for row in each["results"]}) for each in results["models"]]


def test_both_models_run_with_every_attention_and_a_chart_is_drawn(finished):
    folder, results = finished
    assert sorted(path.name for path in folder.iterdir()) == ["chart.png", "results.json"]
    assert [name for name, _ in rows_of(results)] == ["image", "video"]
    for _, rows in rows_of(results):
        assert list(rows) == [*demo.RUNS]
        assert all(row["seconds"] > 0 and row["extra_bytes"] > 0 and not row["note"] for row in rows.values())
        assert [row["ran"] for row in rows.values()] == ["", "", "tiled", "tiled"]


def test_the_results_of_the_different_attentions_agree(finished):
    for _, rows in rows_of(finished[1]):
        assert rows[demo.STOCK]["error"] == 0
        assert all(0 < row["error"] < 1e-3 for name, row in rows.items() if name != demo.STOCK)


def test_math_attention_shows_its_score_matrices_ours_keeps_below_and_slices_of_feed_forward_layers_too(finished):
    for name, rows in rows_of(finished[1]):
        case = models.CASES[name](quick=True)
        assert rows[demo.MATH]["extra_bytes"] > 2 * 4 * case.num_heads * case.tokens**2
        assert rows[demo.SLICED]["extra_bytes"] <= rows[demo.OURS]["extra_bytes"] < rows[demo.MATH]["extra_bytes"]
