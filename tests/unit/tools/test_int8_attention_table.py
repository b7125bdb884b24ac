"""The errors of attention in 8 bits that the documentation promises."""

import inspect
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attn_support.oracle import error_of
from attn_support.randomness import some
from torch import nn

from pascal_attn_core import patch_attention_int8

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import int8_attention_table as tool

LARGEST = {"normal": 0.014, "video": 0.007, "sink": 0.016, "uneven values": 0.016, "flat, 70,000 keys": 0.004}


@pytest.mark.parametrize(("name", "dim"), some([(name, dim) for dim in (64, 128) for name in LARGEST], 10))
def test_errors_stay_within_what_is_promised(name: str, dim: int) -> None:
    found, worst = tool.errors(name, dim)
    assert found["**ours**"] <= LARGEST[name]
    assert found["**ours**"] <= worst < 0.03
    if name == "video":
        assert found["**ours**"] < 0.4 * found["SageAttention"]


SINKS = [
    (sinks, weight, keys, common, dim)
    for sinks in (1, 2, 4)
    for keys in (2048, 70_000)
    for weight in (0.5, 0.9, 0.99)
    for common in (True, False)
    for dim in (64, 128)
]
LIMIT = inspect.signature(patch_attention_int8).parameters["max_error"].default


@pytest.mark.parametrize(("sinks", "weight", "keys", "common", "dim"), some(SINKS, 9))
def test_attention_sinks_cost_no_more_than_in_sageattention(
    sinks: int, weight: float, keys: int, common: bool, dim: int
) -> None:
    """A small error is no loss: SageAttention has values in float16."""
    torch.manual_seed(1)
    inputs = tool.weighed_sink(dim, weight, keys, common, sinks)
    right = tool.exact(inputs)
    ours, theirs = (error_of(compute(inputs), right) for compute in (tool.ours, tool.sage1))
    assert ours <= max(1.5 * theirs, 0.013)
    assert not common or ours <= 1.5 * theirs


def outweighed(dim: int) -> list[torch.Tensor]:
    """One key in 64 has 600 times the weight of each of 31 others, whose values agree: their codes of P are 0."""
    query, key, value = torch.zeros(3, 1, 1024, dim)
    query[..., 0], place = dim**0.5, torch.arange(1024) % 64
    key[..., 0] = torch.where(place == 0, math.log(600), torch.where(place < 32, 0.0, -20.0))
    value[..., 1], value[..., 2] = torch.where(place == 0, 0.0, torch.where(place < 32, 1.0, -1.0)), place == 0
    return [query, key, value]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("before", [0, 2])
@torch.no_grad()
def test_a_layer_with_keys_that_outweigh_their_neighbours_is_exact_from_that_call_on(dim: int, before: int) -> None:
    class Attention(nn.Module):
        def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*qkv)

    model = nn.ModuleDict({"layer": Attention()})
    with patch_attention_int8(model) as patch:
        for _ in range(before):
            model["layer"](*tool.outliers(dim)[:3])
        assert patch.report().count("on") == bool(before)
        inputs = outweighed(dim)
        assert error_of(model["layer"](*inputs), F.scaled_dot_product_attention(*inputs)) < 1e-6
        (line,) = patch.report().lines
    assert (line.state, line.went_back) == ("refused", bool(before))
    assert line.latest > 2 * LIMIT
