"""tools/path.py counts what it says, and the way of a call stays short; tools/attention_share.py counts products."""

from itertools import groupby

import torch

from tools.path import calls, way_of


def test_a_short_call_takes_at_most_14_functions() -> None:
    with torch.no_grad():
        assert len(way_of(calls()["short"]).steps) <= 14


def test_one_tile_takes_at_most_8_files_and_33_moves_and_returns_to_no_file_more_than_twice() -> None:
    with torch.no_grad():
        way = way_of(calls()["one tile"])
    assert way.files[0] == "pascal_attn_core/attention.py"
    assert way.files[-1] == "pascal_attn_core/tiled/softmax.py"
    assert len(way.files) <= 8
    assert way.moves <= 33
    product = next(i for i, step in enumerate(way.steps) if step.function.endswith("product"))
    stays = [file for file, _ in groupby(step.file for step in way.steps[: product + 1])]
    assert max(stays.count(file) - 1 for file in stays) <= 2
