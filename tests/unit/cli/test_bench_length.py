"""Memory against length: math grows with the square, tiles do not grow."""

from __future__ import annotations

import pytest

from pascal_attn_core.cli import main
from pascal_attn_core.cli.bench import length
from pascal_attn_core.cli.bench.length import memory_by_length


def test_math_grows_with_the_square_of_the_length_and_tiles_do_not_grow() -> None:
    figures = memory_by_length((2048, 4096, 8192))
    assert figures["math"][2] == pytest.approx(16 * figures["math"][0], rel=0.05)
    assert 1 < min(figures["tiled"]) <= max(figures["tiled"]) <= 4
    assert all(taken <= planned for taken, planned in zip(figures["tiled"], figures["planned"]))
    assert figures["tiled"][2] == pytest.approx(figures["tiled"][1], rel=0.01)


def test_the_plot_is_a_picture(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(length, "LENGTHS", (1024, 2048))
    assert main(["bench", "--plot", str(tmp_path / "length.png")]) == 0
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")
    assert "2,048" in capsys.readouterr().out
