"""`pascal-attn bench` at tiny sizes: who runs, what is measured, what is left out and said so; ``--linear``."""

import dataclasses
import json
import math
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support import fresh

from pascal_attn_core import cli
from pascal_attn_core.cli.bench import candidates, length, linear, shapes
from pascal_attn_core.cli.bench.contest import BenchSettings
from pascal_attn_core.cli.bench.linear import Layer, race_layer
from pascal_attn_core.cli.bench.shapes import Shape
from pascal_attn_core.config import AttentionConfig, UnsupportedAttention

TINY = {
    "plain": Shape("plain", "a tiny call", 1, 2, 2, 48, 40, 16),
    "grouped": Shape("grouped", "grouped heads", 2, 4, 2, 48, 40, 16),
    "causal": Shape("causal", "causal", 1, 2, 2, 48, 48, 16, is_causal=True),
    "decode": Shape("decode", "one token", 2, 4, 2, 1, 40, 16),
    "bool": Shape("bool", "bool mask", 1, 2, 2, 48, 40, 16, mask="bool"),
    "padding": Shape("padding", "padded", 2, 2, 2, 48, 40, 16, mask="padding"),
    "bias": Shape("bias", "bias", 1, 2, 2, 48, 40, 16, mask="bias"),
    "bf16": Shape("bf16", "bfloat16", 1, 2, 2, 48, 40, 16, dtype="bfloat16"),
}
QUICK = BenchSettings(rounds=2, seconds=0.5, error_rows=7)
CANDIDATES = candidates.all_candidates(AttentionConfig())


@pytest.fixture(autouse=True)
def _tiny_shapes(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", tuple(TINY.values()))
    monkeypatch.setattr("pascal_attn_core.cli.oracle._BLOCK_BYTES", 8 * 40 * 4)  # the definition in blocks of rows
    before = torch.get_num_threads(), F.scaled_dot_product_attention
    yield
    assert (torch.get_num_threads(), F.scaled_dot_product_attention) == before


def named(results):
    return {result.name: result for result in results}


def test_the_operations_that_a_call_needs_are_those_of_its_products():
    dense, causal = TINY["grouped"].make(), TINY["causal"].make()
    scores = 2 * 4 * 48 * 40
    assert candidates.needed_operations(dense) == 2 * 2 * scores * 16
    assert candidates.needed_operations(dense, backward=True) == 7 * 2 * scores * 16
    assert candidates.needed_operations(causal) == 2 * 2 * (2 * 48 * 49 // 2) * 16


@pytest.mark.parametrize("name", TINY)
def test_every_candidate_runs_or_says_why_not(name):
    shape = TINY[name]
    results = candidates.race(shape.make(), CANDIDATES, QUICK)
    assert [r.name for r in results] == [c.name for c in CANDIDATES]
    for result in results:
        assert (result.seconds is not None and result.seconds > 0) or result.note, result
        assert (result.flops is None) == (result.seconds is None)
    found = named(results)
    for one in (candidates.BASELINE, "torch-math", "ours-auto", "ours-tiled", "ours-tiled-online"):
        assert found[one].error < (2e-2 if name == "bf16" else 1e-5), found[one]
        assert found[one].extra_bytes >= 0
    assert found[candidates.BASELINE].ratio == 1.0


@pytest.mark.parametrize("name", ["plain", "grouped", "causal", "bool"])
def test_forward_and_backward_together_are_checked_against_float64_gradients(name):
    settings = dataclasses.replace(QUICK, backward=True)
    chosen = candidates.choose_candidates(CANDIDATES, "torch*,ours-tiled")
    found = named(candidates.race(TINY[name].make(), chosen, settings))
    for one in (candidates.BASELINE, "torch-math", "ours-tiled"):
        assert found[one].error < 1e-5, found[one]
        assert found[one].seconds > 0


def test_a_candidate_that_breaks_is_told_in_its_cell_and_stops_nobody():
    broken = {
        "broken": Mock(side_effect=IndexError("list index out of range")),
        "refuses": Mock(side_effect=UnsupportedAttention("tiled", ["too small", "too odd"])),
        "wrong": lambda query, key, value: query[:, :1],
        "nan": lambda query, key, value: torch.full_like(query, math.nan),
    }
    extra = [candidates.Candidate(name, lambda call, attend=attend: attend) for name, attend in broken.items()]
    found = named(candidates.race(TINY["plain"].make(), [*candidates.choose_candidates(CANDIDATES, ""), *extra], QUICK))
    assert found["broken"].note == "IndexError: list index out of range"
    assert found["refuses"].note == "too small; too odd"
    assert found["wrong"].error == found["nan"].error == math.inf
    assert found[candidates.BASELINE].seconds > 0


def test_the_command_prints_tables_and_writes_figures(tmp_path, capsys):
    figures = tmp_path / "run.json"
    command = ["bench", "--device", "cpu", "--shapes", "plain,grouped", "--rounds", "1", "--seconds", "0.1"]
    assert cli.main([*command, "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "plain: a tiny call, B1 H2 48x40 D16 float32" in out
    assert "geometric mean" in out
    document = json.loads(figures.read_text())
    assert document["command"].startswith("pascal-attn bench --device cpu --shapes plain,grouped")
    assert document["versions"]["torch"] == torch.__version__
    assert document["machine"]["threads"] == 1
    assert [report["shape"]["name"] for report in document["shapes"]] == ["plain", "grouped"]
    assert document["geometric_means"][candidates.BASELINE] == {"ratio": 1.0, "shapes": 2}


def test_a_shape_of_ones_own_is_timed_together_with_listed_ones(tmp_path, capsys):
    figures = tmp_path / "run.json"
    command = ["bench", "--device", "cpu", "--rounds", "1", "--seconds", "0.1", "--json", str(figures), "--dtype"]
    command += ["float16", "--causal", "--shape", "B=1,Hq=4,Hkv=2,L=24,S=40,D=8", "--candidates", "auto,tiled"]
    assert cli.main([*command, "--shapes", "bool"]) == 0
    assert "own: given by --shape, B1 H4/2 24x40 D8 float16 causal" in capsys.readouterr().out
    report, listed = json.loads(figures.read_text())["shapes"]
    assert listed["shape"]["name"] == "bool"
    assert report["shape"] == dataclasses.asdict(
        Shape("own", "given by --shape", 1, 4, 2, 24, 40, 8, is_causal=True, dtype="float16")
    )
    results = {result["name"]: result for result in report["results"]}
    for name in (candidates.BASELINE, "ours-auto", "ours-tiled"):
        assert results[name]["seconds"] > 0, results[name]
    assert results["ours-tiled"]["error"] < 1e-2


def test_the_plot_is_a_picture(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(length, "LENGTHS", (1024, 2048))
    assert cli.main(["bench", "--plot", str(tmp_path / "length.png")]) == 0
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")
    assert "2,048" in capsys.readouterr().out


LAYER = Layer("tiny", "a small layer", rows=100, columns=64, outs=48)


def test_every_way_is_timed_and_its_error_measured():
    figures = {f.name: f for f in race_layer(LAYER, torch.device("cpu"), BenchSettings(rounds=2))}
    eight_bit = ("int8", "int8 by float", "int8, rotated by 64", "int8 eager")
    assert set(figures) == {"float32", "float16", "bfloat16", *eight_bit}
    assert all(f.seconds and f.ratio and f.flops for f in figures.values())
    assert figures["float32"].ratio == 1.0
    assert figures["float32"].error < 1e-6 < figures["float16"].error < figures["bfloat16"].error < 0.01
    assert 0.004 < figures["int8 by float"].error < figures["int8"].error < 0.02
    assert figures["int8 eager"].error == pytest.approx(figures["int8"].error, rel=0.01)
    assert figures["int8"].ran == "int_mm"
    assert figures["int8 eager"].extra_bytes > 0


def test_the_command_prints_a_table_of_layers_and_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(linear, "LAYERS", (LAYER, Layer("narrow", "12 features", rows=3, columns=12, outs=5)))
    path = tmp_path / "figures.json"
    assert cli.main(["bench", "--linear", "--shapes", "all", "--rounds", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "tiny: a small layer, 100 x 64 -> 48" in out
    assert "vs float32" in out
    found = json.loads(path.read_text())
    assert [report["layer"]["name"] for report in found["layers"]] == ["tiny", "narrow"]
    assert found["command"].startswith("pascal-attn bench --linear")
    assert {"torch", "python"} <= set(found["versions"])


def test_a_peer_is_imported_where_it_runs_and_leaves_torchs_function_alone() -> None:
    pytest.importorskip("pascal_attn")
    pytest.importorskip("noflash_attention")
    fresh.run(
        """
        import sys
        import torch
        import torch.nn.functional as F
        from pascal_attn_core.cli.bench.candidates import race
        from pascal_attn_core.cli.bench.contest import BenchSettings
        from pascal_attn_core.cli.bench.shapes import Shape
        from tools.peers import installed

        original = F.scaled_dot_product_attention
        found = installed()
        assert len(found) == 6
        assert not {"noflash_attention", "pascal_attn"} & set(sys.modules)
        call = Shape("tiny", "a tiny call", 1, 2, 2, 48, 40, 16, mask="bool").make()
        for backward in (False, True):
            results = race(call, found, BenchSettings(rounds=1, backward=backward))
            right = [result.name for result in results if not result.note and result.error < 1e-5]
            assert len(right) == 6 - 2 * backward, results  # two work in place: no gradients
        assert F.scaled_dot_product_attention is original
        """
    )
