"""Softcap and attention sinks in the kernels on plain cores: emulated, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_support.fused.cases import forward
from attn_support.fused.emulation import GXX
from attn_support.oracle import assert_close, cast, plain_dtype
from torch import Tensor

from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
# One that adds nothing, one like the scores, one larger than all of them, one smaller.
SINKS = torch.tensor([-torch.inf, 0.5, 40.0, -3.0])
BOTH: dict[str, Any] = {"softcap": 3.0, "sinks": SINKS}


def _inputs(dtype: torch.dtype, dim: int, rows: int, keys: int, mask: str) -> list[Tensor | None]:
    """Two query heads for each of two key heads; some rows may look at no key."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = (1, 4, rows, dim), (1, 2, keys, dim), (1, 2, keys, dim)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    allowed = torch.rand(rows, keys, generator=generator) < 0.6
    allowed[min(2, rows - 1)] = False
    masks = {"none": None, "bool": allowed, "float": torch.randn(rows, keys).masked_fill(~allowed, -torch.inf)}
    return [*tensors, masks[mask]]


def check(
    arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any], **call: Any
) -> None:
    inputs = _inputs(dtype, *sizes, mask)
    options = {"enable_gqa": True, "is_causal": True, "alignment": "lower_right", **how}
    result = forward(inputs, options, arch=arch, **call)
    assert result.plan.forward.kind == ("capped_split" if call else "capped")
    answers = []
    for own in (torch.float64, plain_dtype(dtype, as_torch=True)):
        sinks = None if how.get("sinks") is None else how["sinks"].to(own)
        answers.append(reference_sdpa(*[cast(t, own) for t in inputs], **{**options, "sinks": sinks}))  # type: ignore[arg-type]
    (oracle, lse), (similar, similar_lse) = answers
    assert_close(result.out, oracle, similar, "out", dtype=dtype)
    assert_close(result.lse, lse, similar_lse, "lse", dtype=dtype)


CASES = [
    (torch.float32, (64, 70, 200), "none", BOTH),
    (torch.float32, (64, 70, 200), "none", {"softcap": 5.0}),
    (torch.float32, (64, 70, 1200), "none", {"sinks": SINKS}),
    (torch.float32, (64, 70, 200), "bool", BOTH),
    (torch.float32, (60, 70, 130), "float", BOTH),
    (torch.float16, (128, 70, 200), "bool", BOTH),
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
        (torch.float16, (128, 3, 330), "float"),
        (torch.float32, (64, 5, 90), "bool"),
    ],
)
def test_with_the_keys_in_parts_the_sink_is_one_of_them(
    dtype: torch.dtype, sizes: tuple[int, int, int], mask: str
) -> None:
    check("", dtype, sizes, mask, BOTH, parts=True)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1010"])
@pytest.mark.parametrize(("dtype", "sizes", "mask", "how"), [*CASES[::3], CASES[5]])  # and pairs of float16
def test_on_amds_cards_too(
    arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any]
) -> None:
    check(arch, dtype, sizes, mask, how)
    check(arch, dtype, (sizes[0], 3, 330), mask, how, parts=True)
