"""Pictures of attention, and the tiles that they show."""

from pathlib import Path

import pytest
import torch

from pascal_attn_core import attention_map
from pascal_attn_core.plots import plot_rows, plot_tiles, softmax_states, tile_states

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "rule", [{}, {"is_causal": True}, {"window": (70, 0)}, {"window": (3, 40), "alignment": "lower_right"}], ids=str
)
def test_the_states_are_those_of_every_single_score(rule: dict) -> None:
    states = tile_states(150, 200, **rule, q_block=16, kv_block=24)
    query, key = torch.zeros(1, 1, 150, 4), torch.zeros(1, 1, 200, 4)
    seen = attention_map(query, key, rows=range(150), **rule)[0, 0] > 0
    for i, row in enumerate(states.tolist()):
        for j, state in enumerate(row):
            tile = seen[16 * i : 16 * i + 16, 24 * j : 24 * j + 24]
            assert state == (0 if not tile.any() else 1 if tile.all() else 2), (i, j)


def test_the_pictures_are_written_and_say_what_they_show(tmp_path: Path) -> None:
    query = torch.randn(2, 3, 40, 8)
    weights = attention_map(query, query, rows=[0, 17, -1], is_causal=True)
    figure = weights.plot(tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    heads = [axis for axis in figure.axes if axis.get_ylabel().startswith("head")]
    assert [axis.get_ylabel() for axis in heads] == [f"head {i}\nquery" for i in range(3)]
    assert [label.get_text() for label in heads[0].get_yticklabels()] == ["0", "17", "39"]
    torch.testing.assert_close(torch.as_tensor(heads[1].images[0].get_array().data), weights[0, 1])
    figure = plot_tiles(256, 256, is_causal=True, path=tmp_path / "tiles.png")
    assert (tmp_path / "tiles.png").exists()
    assert figure.axes[0].get_title() == "75% of the tiles are computed"
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == ["skipped: 1", "computed: 1", "partly masked: 2"]


def test_the_states_of_a_softmax_are_those_of_the_keys_seen() -> None:
    scores = 5 * torch.randn(150)
    scores[:20] = scores[60:90] = -torch.inf
    states = softmax_states(scores, kv_block=20)
    assert (states.shape, states[0].tolist()) == ((8, 2), [-torch.inf, 0.0])
    for block, (highest, total) in enumerate(states[1:], start=1):
        seen = scores[: 20 * (block + 1)].double()
        assert highest == seen.max()
        torch.testing.assert_close(total, (seen - seen.max()).exp().sum())
    assert softmax_states(scores[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: softmax_states(torch.zeros(2, 3)), r"scores must be those of one row, \[S\], got \[2, 3\]"),
        (lambda: softmax_states(torch.zeros(3).int()), "scores must be a float tensor, got torch.int32"),
        (lambda: softmax_states([1.0]), "scores must be a float tensor, got list"),
        (lambda: softmax_states(torch.zeros(3), kv_block=0), "kv_block must be at least 1, got 0"),
        (lambda: plot_rows(torch.ones(3)), r"weights must be \[\.\.\., heads, rows, keys\], got \[3\]"),
        (lambda: plot_rows(torch.ones(1, 2, 3), rows=[1, 2, 3]), "rows must hold 2 numbers, one for each row, got 3"),
        (lambda: tile_states(4, 4, q_block=0), "q_block must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_drawn_is_named(draw, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        draw()
