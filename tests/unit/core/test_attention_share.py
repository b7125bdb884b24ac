"""tools/attention_share.py counts the multiplications that a formula gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.attention_share import Step, count


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
    assert step == Step(
        attention=2 * 2 * tokens * tokens * (4 + 4), linear=2 * tokens * 8 * 24, convolution=2 * tokens * 64
    )


def test_the_gain_is_amdahls() -> None:
    assert Step(2, 1, 1).share == 0.5
    assert Step(3, 0, 0).gain() == pytest.approx(1.5)
    assert Step(2, 1, 1).gain() == pytest.approx(1.2)
    assert Step(2, 1, 1).gain(2, 4) == pytest.approx(4 / 2.25)
