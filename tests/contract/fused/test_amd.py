"""The fused kernels with the tiles of AMD's cards: the same source, emulated with waves of 64 and of 32 lanes, against
the definition. ``test_emulation`` says what the emulation notices.

A part of the table of cases on each card, other parts of it in profile nightly; all head_dims of each card there too.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from attn_support.fused.cases import Emulated, backward, forward, is_split, of_kernel, poisoned, takes
from attn_support.fused.emulation import GXX, Deadlock, LeftOut, each_left_out, emulate
from attn_support.oracle import assert_attention, assert_gradients, exact, gradients, plain
from attn_support.randomness import seeds, times
from attn_support.table import TABLE, Case
from torch import Tensor

from pascal_attn_core.call import check_call, empty_output
from pascal_attn_core.fused.code.source import HEAD_DIMS, source
from pascal_attn_core.fused.geometry.amd import RANGES_HEAD_DIMS, AmdGeometry, wave_size
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, variants_of
from pascal_attn_core.fused.launch.tail_rows import TailRows
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
ARCHS = ("gfx900", "gfx906", "gfx1010", "gfx1030")  # waves of 64 and of 32, each without and with pairs of float16
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LOWER_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "lower_right"}
TAKEN = [case for case in TABLE if takes(case)]


def _check(arch: str, inputs: list[Tensor | None], options: dict[str, Any], dtype: torch.dtype, **how: Any) -> None:
    result = forward(inputs, options, arch=arch, **how)
    assert result.plan.forward.arch == arch
    assert_attention(result.out, result.lse, inputs, options, dtype)


def _drawn(place: int, arch: str, cases: list[Case]) -> Case:
    """Another one at each place, and on each card."""
    return cases[(17 * place + 5 * ARCHS.index(arch) + seeds(1)[0]) % len(cases)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", range(times(6)))
def test_calls_of_the_table_give_the_answer_of_the_definition(place: int, arch: str) -> None:
    case = _drawn(place, arch, TAKEN)
    inputs, options = case.build()
    _check(arch, inputs, options, case.dtype)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("place", range(times(2)))
def test_keys_in_parts_give_the_same_answer(place: int, arch: str) -> None:
    case = _drawn(place, arch, [case for case in TAKEN if not is_split(case)])
    case = replace(case, key=(*case.key[:-2], 300, case.key[-1]), value=(*case.value[:-2], 300, case.value[-1]))
    inputs, options = case.build()
    _check(arch, inputs, options, case.dtype, parts=True)


@pytest.mark.parametrize(
    ("arch", "dim", "ranges"),
    [("gfx906", 64, 3), ("gfx1030", 40, 2), ("gfx900", 128, 5)]
    + [(arch, dim, 4) for arch in ARCHS for dim in RANGES_HEAD_DIMS if times(1) > 1],
)
def test_the_last_rows_are_computed_with_their_keys_in_ranges(arch: str, dim: int, ranges: int) -> None:
    """Every element of the output and of lse is written."""
    generator = torch.Generator().manual_seed(dim)
    inputs: list[Tensor | None] = [
        torch.randn((2, n, heads, dim), generator=generator).half().transpose(1, 2)
        for n, heads in ((310, 4), (390, 2), (390, 2))
    ]
    options = {"enable_gqa": True}
    call = check_call(*inputs, **options)  # type: ignore[arg-type]
    variants = variants_of(call, arch)
    plan = Plan(variants.forward, tail=TailRows(variants.ranges, variants.forward.geometry.rows, ranges))
    out, lse = empty_output(call).fill_(torch.nan), poisoned((2, 4, 310), FLOAT32)
    emulate(forward_launches(call, plan, out, lse))
    assert_attention(out, lse, inputs, options, FLOAT16)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1010"])
def test_scores_may_be_far_below_zero(arch: str) -> None:
    """A row that has seen no key yet begins with the smallest float32, not with zero."""
    query = torch.full((1, 1, 70, 64), 1e3)
    key, value = -query, torch.randn((1, 1, 70, 64), generator=torch.Generator().manual_seed(9))
    out = forward([query, key, value, None], {"is_causal": True, "scale": 0.01}, arch=arch).out
    expected = value.cumsum(2) / torch.arange(1, 71)[:, None]
    assert (out - expected).abs().max() < 1e-5


# Each card once with each dtype, more of them every night.
_WIDTHS = [
    (arch, dtype, dim)
    for d, dim in enumerate((*HEAD_DIMS, 36, 52, 100, 300))
    for a, arch in enumerate(ARCHS)
    for t, dtype in enumerate((FLOAT16, FLOAT32, BFLOAT16))
    if times(1) > 1 or (a + t + d) % 12 == 0 or (arch == "gfx906" and dtype == FLOAT16 and dim in (40, 64, 128, 512))
]


@pytest.mark.parametrize(("arch", "dtype", "dim"), _WIDTHS)
def test_every_head_dim_has_a_kernel(arch: str, dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    inputs: list[Tensor | None] = [
        torch.randn((1, heads, n, dim), generator=generator).to(dtype) for heads, n in ((2, 131), (1, 140), (1, 140))
    ]
    _check(arch, [*inputs, None], {"enable_gqa": True, **LOWER_RIGHT}, dtype)


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT16, 64, "bool"),
        ("gfx906", FLOAT16, 60, "float"),
        ("gfx906", FLOAT32, 128, "bool"),
        ("gfx1030", FLOAT16, 128, "float"),
        ("gfx1010", FLOAT16, 80, "bool"),
    ],
)
def test_masks_and_columns_that_do_not_exist(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((1, 2, n, dim), generator=generator).to(dtype) for n in (70, 300, 300))
    allowed = torch.rand((70, 300), generator=generator) < 0.6
    allowed[5] = False
    allowed[:, 64:192] = False  # tiles that nobody looks at
    added = torch.randn((70, 300), generator=generator).masked_fill(~allowed, -torch.inf)
    _check(arch, [query, key, value, allowed if mask == "bool" else added], {}, dtype)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1030"])
def test_the_last_of_an_odd_number_of_rows_has_zeros_as_the_other_of_its_pair(arch: str) -> None:
    """Nothing behind it in memory is read."""
    generator = torch.Generator().manual_seed(6)
    query, *longer = (torch.randn((1, 1, n, 64), generator=generator).half() for n in (70, 80, 80))
    for tensor in longer:
        tensor[:, :, 75:] = torch.nan
    key, value = (tensor[:, :, :75] for tensor in longer)
    _check(arch, [query, key, value, None], {}, FLOAT16)


@pytest.mark.parametrize("arch", ["gfx906", "gfx1030"])
def test_pairs_of_float16_are_as_exact_as_plain_attention_in_float16(arch: str) -> None:
    """The probabilities are rounded to float16 for their product; their sum, and with it lse, is that of the numbers
    before."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn((1, 1, n, 64), generator=generator).half() for n in (128, 2048, 2048))
    result = forward([query, key, value, None], {}, arch=arch)
    oracle, lse = exact([query, key, value, None], {})
    by_torch = plain([query, key, value, None], {}, FLOAT16)[0]
    error, of_plain = ((out.double() - oracle).norm() / oracle.norm() for out in (result.out, by_torch))
    print(f"\n{arch}, 2,048 keys, float16: relative error {error:.1e}, plain attention {of_plain:.1e}")
    assert error < min(4e-4, of_plain)
    assert (result.lse.double() - lse).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT32, 64, None),
        ("gfx906", FLOAT16, 128, "bool"),
        ("gfx906", FLOAT16, 40, None),
        ("gfx1030", FLOAT16, 60, "float"),
        ("gfx1030", FLOAT32, 40, None),
        ("gfx1010", BFLOAT16, 60, "float"),
    ],
)
def test_gradients_are_those_of_the_definition(arch: str, dtype: torch.dtype, dim: int, mask: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = (1, 2, 70, dim), (1, 1, 140, dim), (1, 1, 140, dim)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    allowed = torch.rand((70, 140), generator=generator) < 0.7
    masks = {None: None, "bool": allowed, "float": torch.randn((70, 140), generator=generator).to(dtype)}
    inputs, options = [*tensors, masks[mask]], {"enable_gqa": True, **LOWER_RIGHT}
    result = forward(inputs, options, arch=arch)
    assert {v.arch for v in result.plan.gradients} == {arch}
    assert_gradients(functools.partial(backward, result), inputs, options, dtype)


@pytest.mark.parametrize(("arch", "dim", "factor"), [("gfx906", 64, 1.0), ("gfx1030", 128, 1.0), ("gfx906", 40, 1e-3)])
def test_gradients_of_pairs_are_as_exact_as_those_of_plain_attention_in_float16(
    arch: str, dim: int, factor: float
) -> None:
    """Probabilities of some 1,000 keys and dS are rounded to float16. factor: of the gradient of the output; at the
    smallest what is plain loses most of its bits."""
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn((1, 1, n, dim), generator=generator).half() for n in (70, 1000, 1000)]
    grad_out = (factor * torch.randn((1, 1, 70, dim), generator=generator)).half()
    wide, narrow = ([t.to(d).requires_grad_() for t in tensors] for d in (torch.float64, FLOAT16))
    oracle = gradients(reference_sdpa(*wide)[0], wide, grad_out.double())
    query, key, value = narrow
    probs = torch.softmax(query @ key.transpose(-1, -2) * dim**-0.5, -1)
    plain_ones = gradients(probs @ value, narrow, grad_out)
    result = forward([*tensors, None], {}, arch=arch)
    for variant in result.plan.gradients:
        assert isinstance(variant.geometry, AmdGeometry)
        assert variant.geometry.pairs == 2
    for own, true, by_torch in zip(backward(result, grad_out), oracle, plain_ones):
        error, of_plain = ((g.double() - true).norm() / true.norm() for g in (own, by_torch))
        print(f"\n{arch}, head_dim {dim}, 1,000 keys, {factor:g}: relative error {error:.1e}, plain {of_plain:.1e}")
        assert error < of_plain


def test_float32_sums_move_to_the_output() -> None:
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn((1, 1, n, 64), generator=generator) for n in (70, 1300, 1300))
    key *= (torch.arange(1300) // 512 + 1.0)[:, None]
    for arch in ("gfx906", "gfx1030"):
        _check(arch, [query, key, value, None], {}, FLOAT32)


# ---- without one of its barriers -------------------------------------------------------------------------------------

_BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")
_UNSEEN = "flushed_max is complete"  # the shuffles after it meet the wave too, but order no memory
WRONG = 1e-2
# head_dim, queries, keys: between them they notice every barrier of a kernel.
_SENSITIVE: dict[tuple[str, torch.dtype], tuple[tuple[int, int, int], ...]] = {
    ("forward", FLOAT16): ((64, 130, 330), (40, 130, 330), (512, 70, 330)),
    ("forward", FLOAT32): ((64, 130, 330), (40, 70, 1300), (512, 70, 1300)),
    **dict.fromkeys((("grad_query", FLOAT16), ("grad_query", FLOAT32)), ((64, 70, 200), (40, 70, 330))),
    ("grad_key_value", FLOAT16): ((64, 200, 70), (40, 330, 70)),
    ("grad_key_value", FLOAT32): ((64, 200, 70), (72, 330, 70)),  # at 40 chunks are so small that none overlap
}


def _weights(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)


class _Sample(NamedTuple):
    """A call, and what the forward kernel gives of it where that is not what is looked at."""

    inputs: list[Tensor | None]
    expected: list[Tensor]
    result: Emulated | None


@functools.cache
def _sample(kind: str, arch: str, dtype: torch.dtype, dim: int, rows: int, keys: int) -> _Sample:
    generator = torch.Generator().manual_seed(dim)
    query, key, value = (torch.randn((1, 1, n, dim), generator=generator) for n in (rows, keys, keys))
    key *= torch.linspace(0.1, 4, keys)[:, None]
    inputs: list[Tensor | None] = [*(t.to(dtype) for t in (query, key, value)), None]
    leaves = [t.double().requires_grad_() for t in inputs[:3] if t is not None]
    out = reference_sdpa(*leaves)[0]
    if kind == "forward":
        return _Sample(inputs, [out.detach()], None)
    expected = gradients(out, leaves, _weights(out.detach().to(dtype)).double())
    return _Sample(inputs, of_kernel(kind, expected), forward(inputs, {}, arch=arch))


def _worst(kind: str, arch: str, dtype: torch.dtype, text: LeftOut | None) -> float:
    """The largest error of the calls, as a share of the largest element; infinite for a deadlock
    or a NaN; one that leaves no doubt ends them. ``text``: in place of the source of this kind."""
    mutated, worst = None if text is None else {kind: text}, 0.0
    for sizes in _SENSITIVE[kind, dtype]:
        inputs, expected, result = _sample(kind, arch, dtype, *sizes)
        try:
            if result is None:
                actual = [forward(inputs, {}, arch=arch, mutated=mutated).out]
            else:
                actual = backward(result, _weights(result.out), mutated=mutated, only=kind)
        except Deadlock:
            return float("inf")
        errors = torch.stack([(a - e).abs().max() / e.abs().max() for a, e in zip(actual, expected, strict=True)])
        worst = max(worst, errors.nan_to_num(nan=torch.inf).max().item())
        if worst > WRONG:
            break
    return worst


# Each kind once with each size of waves, once with pairs of float16, and all of them every night.
_MUTATED = [
    ("forward", "gfx906", FLOAT16),
    ("forward", "gfx1030", FLOAT32),
    ("grad_query", "gfx906", FLOAT32),
    ("grad_query", "gfx1030", FLOAT16),
    ("grad_key_value", "gfx906", FLOAT16),
    ("grad_key_value", "gfx1030", FLOAT32),
    *([("forward", "gfx906", FLOAT32), ("forward", "gfx1030", FLOAT16)] if times(1) > 1 else []),
    *([("grad_query", "gfx1030", FLOAT32), ("grad_key_value", "gfx906", FLOAT32)] if times(1) > 1 else []),
    *([("grad_query", "gfx906", FLOAT16), ("grad_key_value", "gfx1030", FLOAT16)] if times(1) > 1 else []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arch", "dtype"), _MUTATED)
def test_a_kernel_without_any_one_barrier_is_wrong(kind: str, arch: str, dtype: torch.dtype) -> None:
    """The emulation has waves of 64 lanes and of 32."""
    text = source(kind)
    assert wave_size(arch) == (64 if arch == "gfx906" else 32)
    assert _worst(kind, arch, dtype, None) < (1e-3 if dtype == FLOAT32 else 5e-3)
    for mutant, line in each_left_out(text, _BARRIER.finditer(text)):
        if _UNSEEN not in line:
            # __syncwarp stands where float32 sums move only.
            is_there = dtype == FLOAT32 or "__syncwarp" not in line
            worst = _worst(kind, arch, dtype, mutant)
            print(f"{kind} {arch} {dtype}: {worst:.1e} without: {line}")
            assert (worst > WRONG) == is_there, line
