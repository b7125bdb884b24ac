"""Every barrier, counter and shuffle of the kernels on tensor cores is needed, and the emulation notices its loss."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from attn_support.fused.emulation import GXX, Deadlock, LeftOut, each_left_out, emulate

from pascal_attn_core.call import check_call, empty_output
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
# With counters; with a barrier for each tile and Q in several rounds; with words of a mask that lanes exchange.
TURING = [
    Variant("tensor", 64, "float16"),
    Variant("tensor", 128, "float16", padded=True),
    Variant("tensor", 128, "float16", "bool"),
    Variant("tensor", 64, "float16", "float"),
]
VOLTA = [Variant("volta", 64, "float16"), Variant("volta", 128, "float16", "bool")]
VARIANTS = {"tensor": TURING, "volta": VOLTA}
_WAITS = re.compile(r"__syncthreads\(\);|WAIT_FOR\([01], tiles\);|SIGNAL\([01], tiles[^;]*;")
# And what each gives where it does not take place.
_SHUFFLES = {
    "__shfl_sync(FULL_WARP, m.word[w], row_in_warp(t, r))": "m.word[w]",
    "x += __shfl_xor_sync(FULL_WARP, x, 1 << bit)": "x += x",
    "fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1 << bit))": "x",
    "__shfl_xor_sync(FULL_WARP, lower ? pairs[2 * m][0] : pairs[2 * m + 1][0], 2)": "mine",
    "__shfl_xor_sync(FULL_WARP, P.x[m][n][x], 4)": "P.x[m][n][x]",
}
WRONG = 1e-2


@functools.cache
def _sample(variant: Variant) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(variant.head_dim)
    query, key, value = (torch.randn(1, 1, n, variant.head_dim, generator=generator) for n in (140, 400, 400))
    key *= (torch.linspace(-3, 3, 400).abs() + 0.1)[:, None]  # the first tiles weigh as much as the last
    mask = torch.rand(140, 400, generator=generator) < 0.5 if variant.mask != "none" else None
    if variant.mask == "float":
        mask = torch.zeros(140, 400).masked_fill(~mask, -torch.inf)
    query, key, value = query.half(), key.half(), value.half()
    oracle = reference_sdpa(query.double(), key.double(), value.double(), mask)[0]
    return query, key, value, mask, oracle  # type: ignore[return-value]


def _error(variant: Variant, text: str | LeftOut | None, seed: int) -> float:
    query, key, value, mask, oracle = _sample(variant)
    call = check_call(query, key, value, mask)
    out = empty_output(call).fill_(float("nan"))
    mutated = None if text is None else {variant.kind: text}
    try:
        emulate(forward_launches(call, Plan(variant), out), seed=seed, mutated=mutated)
    except Deadlock:
        return float("inf")
    return (out.double() - oracle).abs().max().nan_to_num(nan=torch.inf).item()


def _worst(generation: str, text: str | LeftOut | None) -> float:
    """The largest error, or the first that leaves no doubt; several times, since warps run as chance has it."""
    worst = 0.0
    for seed in (1, 2, 3):
        for variant in VARIANTS[generation]:
            worst = max(worst, _error(variant, text, seed))
            if worst > WRONG:
                return worst
    return worst


@pytest.mark.parametrize("generation", VARIANTS)
def test_the_kernels_are_right_however_their_warps_run(generation: str) -> None:
    assert _worst(generation, None) < 3e-3


@pytest.mark.parametrize("generation", VARIANTS)
def test_a_kernel_without_any_one_barrier_or_counter_is_wrong(generation: str) -> None:
    text = source(generation)
    mutants = list(each_left_out(text, _WAITS.finditer(text)))
    assert len(mutants) == 9
    for mutant, line in mutants:
        if generation == "volta" and ("(0, tiles" in line or "(1, tiles" in line or "round > 0" in line):
            continue  # its kernels have no counters, and one round of Q
        assert _worst(generation, mutant) > WRONG, line


@pytest.mark.parametrize("generation", VARIANTS)
def test_a_kernel_without_any_one_shuffle_is_wrong(generation: str) -> None:
    text = source(generation)
    places = [words for words in _SHUFFLES if words in text]
    assert len(places) == text.count("__shfl") == (3 if generation == "tensor" else 5)
    for words in places:
        assert _worst(generation, text.replace(words, _SHUFFLES[words])) > WRONG, words


def test_the_variants_have_counters_and_barriers() -> None:
    assert [variant.geometry.counters for variant in TURING] == [True, False, False, True]  # type: ignore[union-attr]
    assert all(variant.macros()["PA_QREG"] > 8 for variant in TURING[1:3])  # type: ignore[operator]
