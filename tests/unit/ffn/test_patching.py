"""patch_ffn: modules found, the report, and its own arguments checked."""

from __future__ import annotations

import pytest
import torch
from attn_support.ffn_zoo import mlp
from torch import Tensor, nn

from pascal_attn_core.ffn import patch_ffn


class Two(nn.Module):
    """Two feed-forward modules, one of them in a list, and a head that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(16, 64), mlp(16, 64)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_plain_sequentials_are_found_and_heads_are_not() -> None:
    model = Two().eval()
    with patch_ffn(model) as patch:
        assert [line.name for line in patch.report().lines] == ["blocks.0", "blocks.1"]
        assert patch.num_wrapped == 2
        assert patch.active
    assert patch.num_wrapped == 0
    assert not patch.active
    assert all("forward" not in block.__dict__ for block in model.blocks)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "blocks.[1-9]"}, ["blocks.1"]),
        ({"include": ["blocks.0", "head"]}, ["blocks.0", "head"]),
        ({"include": nn.Linear}, ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"]),
        ({"include": lambda name, module: name == "head"}, ["head"]),
        ({"exclude": "blocks.0"}, ["blocks.1"]),
        ({"include": nn.Sequential, "exclude": "*.1"}, ["blocks.0"]),
    ],
)
def test_include_and_exclude_take_patterns_classes_and_predicates(options: dict, names: list[str]) -> None:
    with patch_ffn(Two(), **options) as patch:
        assert [line.name for line in patch.report().lines] == names


def test_a_report_names_what_happened_in_one_line_each() -> None:
    model = Two().eval()
    with torch.no_grad(), patch_ffn(model, chunk_tokens=64, min_tokens=2) as patch:
        assert "2 waiting" in patch.report().text()
        model(torch.randn(1, 256, 16))
        text = patch.report().text()
    assert text.splitlines() == [
        "2 feed-forward modules: 2 chunked",
        "  blocks.0 and 1 more (Sequential): chunked: 4 slices of 64 tokens (0.1 MiB whole)",
    ]


def test_a_module_used_twice_is_patched_once() -> None:
    model = Two()
    model.blocks[1] = model.blocks[0]
    with patch_ffn(model) as patch:
        assert patch.num_wrapped == 1
    assert "forward" not in model.blocks[0].__dict__


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget_mib": 0}, ValueError),
        ({"budget_mib": "64"}, TypeError),
        ({"chunk_tokens": 1}, ValueError),
        ({"chunk_tokens": 2.5}, TypeError),
        ({"min_tokens": True}, TypeError),
        ({"verify": 1}, TypeError),
        ({"include": 3}, TypeError),
        ({"exclude": [3]}, TypeError),
    ],
)
def test_arguments_that_cannot_be_used_are_named(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        patch_ffn(Two(), **options)
