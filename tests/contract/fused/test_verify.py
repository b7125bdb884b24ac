"""The check at a kernel's first use: right kernels pass it, wrong ones do not."""

from __future__ import annotations

import random

import pytest
import torch
from attn_support.fused.emulation import emulate
from attn_support.randomness import seeds, times

from pascal_attn_core.fused.code.source import Variant, all_variants, source
from pascal_attn_core.fused.trust import verify

VARIANTS = (
    Variant("forward", 64, "float32"),
    Variant("forward", 128, "float16", "bool"),
    Variant("forward", 160, "float32", "float", True),
    Variant("split", 80, "bfloat16", "float"),
    Variant("grad_query", 40, "float32", "float"),
    Variant("grad_key_value", 64, "float16", "bool"),
    Variant("grad_all", 128, "float16"),
    Variant("int8", 64, "float32"),
)
# One number or sign of the source made wrong.
WRONG = {
    "forward": ("sum > 0.f ? 1.f / sum : 0.f, p.dim_v", "sum > 0.f ? 1.1f / sum : 0.f, p.dim_v"),
    "split": ("out = fmaf(p.part_out", "out = fmaf(-p.part_out"),
    "grad_query": ("S[i][j] *= dP[i][j] - delta[i]", "S[i][j] *= dP[i][j] + delta[i]"),
    "grad_all": ("atomicAdd(row + c * 32, own[", "atomicAdd(row + c * 32, -own["),
    "grad_key_value": ("S[i][j] * (dP[i][j] - delta)", "S[i][j] * dP[i][j]"),
    "int8": ("row_sum[i] *= fade;", ""),
}


def _drawn(count: int) -> list[Variant]:
    """Some of all variants that a call can ask for, half of them gradients on tensor cores."""
    draw, of_tensor_cores = (
        random.Random(seeds(1)[0]),
        [v for v in all_variants() if v.is_gradient and v.on_tensor_cores],
    )
    return [*draw.sample(list(all_variants()), count), *draw.sample(of_tensor_cores, count)]


@pytest.mark.parametrize("place", range(2 * times(4)))
def test_a_kernel_drawn_at_random_is_right(place: int) -> None:
    variant = _drawn(times(4))[place]
    assert verify.largest_error(variant, torch.device("cpu"), emulate) <= verify.tolerance(variant) / 4, variant.name


def test_the_call_of_the_check_has_more_than_one_tile_of_queries_and_of_keys() -> None:
    for variant in {(variant.kind, variant.geometry): variant for variant in all_variants()}.values():
        call = verify.sample_call(variant, torch.device("cpu"))
        rows, cols = call.seq_len_q, call.seq_len_kv
        if variant.is_gradient and variant.gradients.stop == 3:  # the rows of its tiles are keys
            rows, cols = cols, rows
        assert cols > variant.geometry.cols, variant.name
        assert rows > variant.geometry.rows or variant.is_small, variant.name


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_right_kernel_passes_the_first_check_and_a_wrong_one_does_not(variant: Variant) -> None:
    tolerance = verify.tolerance(variant)
    error = verify.largest_error(variant, torch.device("cpu"), emulate)
    assert error <= tolerance / 4
    right, wrong = WRONG[variant.kind]
    text = source(variant.kind)
    assert right in text
    mutated = {variant.kind: text.replace(right, wrong)}
    error = verify.largest_error(variant, torch.device("cpu"), lambda some: emulate(some, mutated=mutated))
    assert error > tolerance
