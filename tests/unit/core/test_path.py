"""tools/path.py counts what it says, and the way of a call stays short."""

from __future__ import annotations

from itertools import groupby

import torch

from pascal_attn_core import LazyMask
from tools.house import figures
from tools.path import Step, calls, way_of


def test_the_way_of_a_call_is_every_function_of_this_package() -> None:
    mask = LazyMask((1, 1, 4, 4), lambda b, h, q, k: q >= k, device="cpu")
    way = way_of(lambda: [mask.dim(), torch.zeros(2).sum(), mask.dim()])
    assert way.steps == [Step("pascal_attn_core/mask_rules/lazy.py", way.steps[0].function)] * 2
    assert way.steps[0].function.endswith("dim")


def test_a_short_call_takes_at_most_14_functions() -> None:
    with torch.no_grad():
        assert len(way_of(calls()["short"]).steps) <= 14


def test_one_tile_takes_at_most_8_files_and_33_moves() -> None:
    with torch.no_grad():
        way = way_of(calls()["one tile"])
    assert way.files[0] == "pascal_attn_core/attention.py"
    assert way.files[-1] == "pascal_attn_core/tiled/softmax.py"
    assert len(way.files) <= 8
    assert way.moves <= 33


def test_the_way_to_the_first_product_returns_to_no_file_more_than_twice() -> None:
    with torch.no_grad():
        steps = way_of(calls()["one tile"]).steps
    product = next(i for i, step in enumerate(steps) if step.function.endswith("product"))
    stays = [file for file, _ in groupby(step.file for step in steps[: product + 1])]
    assert max(stays.count(file) - 1 for file in stays) <= 2


def test_the_house_counts_what_is_too_long_and_what_is_no_sentence() -> None:
    names = ", ".join("abcdefghi")
    text = f'def f({names}):\n    """Of the launch."""\n' + "    f()\n" * 40 + f"    f({names})\n"
    counts = figures({"nodes/a.py": text, "tools/b.py": '"""Number of blocks in the launch."""\n'})
    assert {title: (count["product"], count["tools"]) for title, count in counts.items()} == {
        "Python files": (1, 1),
        "lines of Python": (43, 1),
        "functions above 40 lines": (1, 0),
        "functions with more than 8 parameters": (1, 0),
        "calls with more than 8 positional values": (1, 0),
        "docstrings that are fragments": (1, 0),
    }
