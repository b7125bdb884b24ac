"""The fused kernels with the tiles of AMD's cards, emulated with waves of 64 and of 32 lanes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused import cases
from attn_support.fused.cases import LOWER_RIGHT, Emulated, forward, sized
from attn_support.oracle import assert_attention, exact, gradients, plain
from attn_support.randomness import seeds, some, times
from attn_support.table import TABLE, Case

from pascal_attn_core.fused.code.source import HEAD_DIMS
from pascal_attn_core.fused.geometry.amd import RANGES_HEAD_DIMS, AmdGeometry
from pascal_attn_core.reference import reference_sdpa

ARCHS = ("gfx900", "gfx906", "gfx1010", "gfx1030")  # waves of 64 and of 32, each without and with pairs of float16
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
TAKEN = [case for case in TABLE if cases.takes(case)]


def _check(arch: str, case: Case, **how: Any) -> Emulated:
    result = cases.check_forward(case, arch=arch, **how)
    assert {v.arch for v in (result.plan.forward, *result.plan.gradients)} == {arch}
    return result


def _drawn(place: int, arch: str, table: list[Case]) -> Case:
    """Another one at each place, and on each card."""
    return table[(17 * place + 5 * ARCHS.index(arch) + seeds(1)[0]) % len(table)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", range(times(2)))
def test_calls_of_the_table_give_the_answer_of_the_definition(place: int, arch: str) -> None:
    _check(arch, _drawn(place, arch, TAKEN))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", range(times(2)))
def test_keys_in_parts_give_the_same_answer(place: int, arch: str) -> None:
    case = _drawn(place, arch, [case for case in TAKEN if not cases.is_split(case)])
    case = replace(case, key=(*case.key[:-2], 300, case.key[-1]), value=(*case.value[:-2], 300, case.value[-1]))
    _check(arch, case, parts=True)


@pytest.mark.parametrize(
    ("arch", "dim", "ranges"),
    [("gfx906", 64, 3), ("gfx1030", 40, 2), ("gfx900", 128, 5)]
    + [(arch, dim, 4) for arch in ARCHS for dim in RANGES_HEAD_DIMS if times(1) > 1],
)
def test_the_last_rows_are_computed_with_their_keys_in_ranges(arch: str, dim: int, ranges: int) -> None:
    """Every element of the output and of lse is written."""
    cases.check_tail(sized(FLOAT16, dim, 310, 390, layout="tokens_first", batch=2, heads=(2, 1)), arch, ranges)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1010"])
def test_scores_may_be_far_below_zero(arch: str) -> None:
    """A row that has seen no key yet begins with the smallest float32, not with zero."""
    query = torch.full((1, 1, 70, 64), 1e3)
    key, value = -query, torch.randn(1, 1, 70, 64)
    out = forward([query, key, value, None], {"is_causal": True, "scale": 0.01}, arch=arch).out
    expected = value.cumsum(2) / torch.arange(1, 71)[:, None]
    assert (out - expected).abs().max() < 1e-5


# Each card once with each dtype, more of them every night.
_WIDTHS = [
    (arch, dtype, dim)
    for d, dim in enumerate((*HEAD_DIMS, 36, 52, 100, 300))
    for a, arch in enumerate(ARCHS)
    for t, dtype in enumerate((FLOAT16, FLOAT32, BFLOAT16))
    if times(1) > 1 or (a + t + d) % 18 == 0 or (arch == "gfx906" and dtype == FLOAT16 and dim in (40, 64, 128, 512))
]


@pytest.mark.parametrize(("arch", "dtype", "dim"), some(_WIDTHS, 3))
def test_every_head_dim_has_a_kernel(arch: str, dtype: torch.dtype, dim: int) -> None:
    _check(arch, sized(dtype, dim, 131, 140, heads=(2, 1), **LOWER_RIGHT))


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT16, 64, "bool blocks"),
        ("gfx906", FLOAT16, 60, "-inf some rows empty"),
        ("gfx906", FLOAT32, 128, "bool some rows empty"),
        ("gfx1030", FLOAT16, 128, "float [L, S]"),
        ("gfx1010", FLOAT16, 80, "bool blocks"),
    ],
)
def test_masks_and_columns_that_do_not_exist(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    _check(arch, sized(dtype, dim, 70, 300, mask, heads=(2, 2)))


@pytest.mark.parametrize("arch", ["gfx906", "gfx1030"])
def test_the_last_of_an_odd_number_of_rows_has_zeros_as_the_other_of_its_pair(arch: str) -> None:
    """Nothing behind it in memory is read."""
    query, *longer = (torch.randn(1, 1, n, 64).half() for n in (70, 80, 80))
    for tensor in longer:
        tensor[:, :, 75:] = torch.nan
    inputs = [query, *(tensor[:, :, :75] for tensor in longer), None]
    result = forward(inputs, {}, arch=arch)
    assert_attention(result.out, result.lse, inputs, {}, FLOAT16)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1030"])
def test_pairs_of_float16_are_as_exact_as_plain_attention_in_float16(arch: str) -> None:
    """The probabilities are rounded to float16 for their product, but not for their sum, nor for lse."""
    inputs, _ = sized(FLOAT16, 64, 128, 2048, heads=(1, 1)).build()
    result = forward(inputs, {}, arch=arch)
    oracle, lse = exact(inputs, {})
    by_torch = plain(inputs, {}, FLOAT16)[0]
    error, of_plain = ((out.double() - oracle).norm() / oracle.norm() for out in (result.out, by_torch))
    print(f"\n{arch}, 2,048 keys, float16: relative error {error:.1e}, plain attention {of_plain:.1e}")
    assert error < min(4e-4, of_plain)
    assert (result.lse.double() - lse).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    some(
        [
            ("gfx906", FLOAT16, 128, "bool [L, S]"),
            ("gfx906", FLOAT32, 64, "none"),
            ("gfx1030", FLOAT16, 60, "float [L, S]"),
            ("gfx906", FLOAT16, 40, "none"),
            ("gfx1010", BFLOAT16, 60, "float [L, S]"),
            ("gfx1030", FLOAT32, 40, "none"),
        ],
        3,
    ),
)
def test_gradients_are_those_of_the_definition(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    case = sized(dtype, dim, 70, 140, mask, heads=(2, 1), **LOWER_RIGHT)
    cases.check_gradients(_check(arch, case), case)


@pytest.mark.parametrize(
    ("arch", "dim", "factor"), some([("gfx906", 64, 1.0), ("gfx1030", 128, 1.0), ("gfx906", 40, 1e-3)], 2)
)
def test_gradients_of_pairs_are_as_exact_as_plain_attention_in_float16(arch: str, dim: int, factor: float) -> None:
    """Probabilities of some 1,000 keys and dS are rounded to float16. factor: of the gradient of the output; at the
    smallest what is plain loses most of its bits."""
    *tensors, _ = sized(FLOAT16, dim, 70, 1000, heads=(1, 1)).build()[0]
    grad_out = (factor * torch.randn(1, 1, 70, dim)).half()
    wide, narrow = ([t.to(d).requires_grad_() for t in tensors] for d in (torch.float64, FLOAT16))
    oracle = gradients(reference_sdpa(*wide)[0], wide, grad_out.double())
    query, key, value = narrow
    probs = torch.softmax(query @ key.transpose(-1, -2) * dim**-0.5, -1)
    plain_ones = gradients(probs @ value, narrow, grad_out)
    result = forward([*tensors, None], {}, arch=arch)
    for variant in result.plan.gradients:
        assert isinstance(variant.geometry, AmdGeometry)
        assert variant.geometry.pairs == 2
    for own, true, by_torch in zip(cases.backward(result, grad_out), oracle, plain_ones):
        error, of_plain = ((g.double() - true).norm() / true.norm() for g in (own, by_torch))
        print(f"\n{arch}, head_dim {dim}, 1,000 keys, {factor:g}: relative error {error:.1e}, plain {of_plain:.1e}")
        assert error < of_plain
