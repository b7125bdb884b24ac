"""Softcap and attention sinks in the kernels on plain cores: emulated, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, forward, sized
from attn_support.oracle import assert_attention
from attn_support.randomness import some

# One that adds nothing, one like the scores, one larger than all of them, one smaller.
SINKS = torch.tensor([-torch.inf, 0.5, 40.0, -3.0])
BOTH: dict[str, Any] = {"softcap": 3.0, "sinks": SINKS}


EMPTY = "bool some rows empty"


def check(
    arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any], **call: Any
) -> None:
    inputs, options = sized(dtype, *sizes, mask, **LOWER_RIGHT, **how).build()
    result = forward(inputs, options, arch=arch, **call)
    assert result.plan.forward.kind == ("capped_split" if call else "capped")
    assert_attention(result.out, result.lse, inputs, options, dtype)


CASES = [
    (torch.float32, (64, 70, 200), "none", BOTH),
    (torch.float32, (64, 70, 200), "none", {"softcap": 5.0}),
    (torch.float32, (64, 70, 1200), "none", {"sinks": SINKS}),
    (torch.float32, (64, 70, 200), EMPTY, BOTH),
    (torch.float32, (60, 70, 130), "float [1, H, L, S]", BOTH),
    (torch.float16, (128, 70, 200), EMPTY, BOTH),
    (torch.bfloat16, (40, 70, 200), "none", {"softcap": 20.0, "scale": -0.3}),
]


@pytest.mark.parametrize(("dtype", "sizes", "mask", "how"), CASES)
def test_scores_have_a_cap_and_rows_a_sink(
    dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any]
) -> None:
    check("", dtype, sizes, mask, how)


@pytest.mark.parametrize(
    ("dtype", "sizes", "mask"),
    [
        (torch.float32, (64, 3, 330), "none"),
        (torch.float16, (128, 3, 330), "-inf some rows empty"),
        (torch.float32, (64, 5, 90), EMPTY),
    ],
)
def test_with_the_keys_in_parts_the_sink_is_one_of_them(
    dtype: torch.dtype, sizes: tuple[int, int, int], mask: str
) -> None:
    check("", dtype, sizes, mask, BOTH, parts=True)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1010"])
@pytest.mark.parametrize(("dtype", "sizes", "mask", "how"), some([CASES[5], *CASES[::3]], 2))  # pairs of float16 first
def test_on_amds_cards_too(
    arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any]
) -> None:
    check(arch, dtype, sizes, mask, how)
    check(arch, dtype, (sizes[0], 3, 330), mask, how, parts=True)
