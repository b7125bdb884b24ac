"""The errors of attention in 8 bits that the documentation promises."""

import sys
from pathlib import Path

import pytest
import torch
from attn_support.oracle import error_of
from attn_support.randomness import some

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
    (weight, keys, common, dim)
    for keys in (2048, 70_000)
    for weight in (0.5, 0.9, 0.99)
    for common in (True, False)
    for dim in (64, 128)
]


@pytest.mark.parametrize(("weight", "keys", "common", "dim"), some(SINKS, 9))
def test_an_attention_sink_costs_no_more_than_in_sageattention(
    weight: float, keys: int, common: bool, dim: int
) -> None:
    torch.manual_seed(1)
    inputs = tool.weighed_sink(dim, weight, keys, common)
    right = tool.exact(inputs)
    ours, theirs = (error_of(compute(inputs), right) for compute in (tool.ours, tool.sage1))
    assert ours <= max(1.5 * theirs, 0.01)
