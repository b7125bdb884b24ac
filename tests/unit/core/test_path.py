"""tools/path.py counts what it says, and the way of a call stays short; tools/attention_share.py counts products."""

from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pascal_attn_core import LazyMask
from tools.attention_share import Step as Products
from tools.attention_share import count
from tools.house import figures
from tools.path import Step, calls, way_of


def test_the_way_of_a_call_is_every_function_of_this_package() -> None:
    mask = LazyMask((1, 1, 4, 4), lambda b, h, q, k: q >= k, device="cpu")
    way = way_of(lambda: [mask.dim(), torch.zeros(2).sum(), mask.dim()])
    assert way.steps == [Step("pascal_attn_core/call/lazy_mask.py", way.steps[0].function)] * 2
    assert way.steps[0].function.endswith("dim")


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(8, 24, bias=False), nn.Conv1d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, dim=1)
        out = F.scaled_dot_product_attention(query, key=key, value=value).transpose(1, 2).flatten(2)
        return self.mix(out.transpose(1, 2))


def test_attention_linear_layers_and_convolutions_are_told_apart() -> None:
    tokens = 10
    step = count(Block, lambda model: model(torch.empty(1, tokens, 8)))
    assert step == Products(
        attention=2 * 2 * tokens * tokens * (4 + 4), linear=2 * tokens * 8 * 24, convolution=2 * tokens * 64
    )


def test_the_gain_is_amdahls() -> None:
    assert Products(2, 1, 1).share == 0.5
    assert Products(3, 0, 0).gain() == pytest.approx(1.5)
    assert Products(2, 1, 1).gain() == pytest.approx(1.2)
    assert Products(2, 1, 1).gain(2, 4) == pytest.approx(4 / 2.25)
