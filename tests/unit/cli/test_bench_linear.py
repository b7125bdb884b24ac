"""``pascal-attn bench --linear``: the layers, the figures, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from pascal_attn_core.cli import main
from pascal_attn_core.cli.bench import linear
from pascal_attn_core.cli.bench.contest import BenchSettings
from pascal_attn_core.cli.bench.linear import Layer, race_layer

TINY = Layer("tiny", "a small layer", rows=100, columns=64, outs=48)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LAYERS", (TINY, Layer("narrow", "12 features", rows=3, columns=12, outs=5)))


def test_every_way_is_timed_and_its_error_measured() -> None:
    figures = {f.name: f for f in race_layer(TINY, torch.device("cpu"), BenchSettings(rounds=2))}
    eight_bit = ("int8", "int8 by float", "int8, rotated by 64", "int8 eager")
    assert set(figures) == {"float32", "float16", "bfloat16", *eight_bit}
    assert all(f.seconds and f.ratio and f.flops for f in figures.values())
    assert figures["float32"].ratio == 1.0
    assert figures["float32"].error < 1e-6 < figures["float16"].error < figures["bfloat16"].error < 0.01
    assert 0.004 < figures["int8 by float"].error < figures["int8"].error < 0.02
    assert figures["int8 eager"].error == pytest.approx(figures["int8"].error, rel=0.01)
    assert figures["int8"].ran == "int_mm"
    assert figures["int8 eager"].extra_bytes > 0


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_a_table_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["bench", "--linear", "--shapes", "all", "--rounds", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "tiny: a small layer, 100 x 64 -> 48" in out
    assert "vs float32" in out
    found = json.loads(path.read_text())
    assert [report["layer"]["name"] for report in found["layers"]] == ["tiny", "narrow"]
    assert found["command"].startswith("pascal-attn bench --linear")
    assert {"torch", "python"} <= set(found["versions"])
