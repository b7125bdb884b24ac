"""The gradient kernels on tensor cores, emulated on a CPU, against the definition in float64: the table's calls, the
shipped tiles, and the kernels with a barrier left out."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import Emulated, of_kernel
from attn_support.fused.cases import backward as run_backward
from attn_support.fused.emulation import GXX, Deadlock, LeftOut, blocks_and_passes, build, each_left_out, emulate
from attn_support.oracle import assert_gradients, cast
from attn_support.randomness import seeds, times
from attn_support.table import GRADIENT_TABLE, LAYOUTS, MASKS, Case
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.code.source import Variant, all_variants, source
from pascal_attn_core.fused.geometry.gradient import gradient_head_dims
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.plan import Plan, gradient_variants, variants_of
from pascal_attn_core.fused.launch.select import tensor_reasons
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.fused.trust.verify import largest_error, tolerance
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
GENERATIONS = {"Turing": (7, 5), "Volta": (7, 0)}
TURING = GENERATIONS["Turing"]
Capability = tuple[int, int]
Numbers = list[Tensor | None]


def _halves(case: Case) -> Case | None:
    """The case in float16, if the kernels take its gradients."""
    if case.dtype in (torch.bfloat16, torch.float64):
        return None
    case = replace(case, dtype=torch.float16)
    call = _call(*case.build())
    if tensor_reasons(call, TURING) or not gradient_variants(call, TURING)[0].on_tensor_cores:
        return None
    return case


@pytest.fixture(params=GENERATIONS)
def capability(request: pytest.FixtureRequest) -> Capability:
    return GENERATIONS[request.param]


def _call(inputs: Numbers, options: dict[str, Any]) -> AttentionCall:
    leaves = [t.detach().requires_grad_() if t is not None and i < 3 else t for i, t in enumerate(inputs)]
    return check_call(*leaves, **options)  # type: ignore[arg-type]


TAKEN = [taken for case in GRADIENT_TABLE if (taken := _halves(case)) is not None]


def _saved(call: AttentionCall, inputs: Numbers, options: dict[str, Any], capability: Capability) -> Emulated:
    """The results that a forward pass saves, rounded as it rounds."""
    with torch.no_grad():
        out, lse = reference_sdpa(*(cast(t, torch.float64) for t in inputs), **options)
        log_sum = None
        if call.has_bias:
            log_sum = _log_sum(inputs, options, lse)
    plan = Plan(variants_of(call).forward, 0, gradient_variants(call, capability))
    return Emulated(call, plan, out.to(call.query.dtype), lse.float(), log_sum)


def _log_sum(inputs: Numbers, options: dict[str, Any], lse: Tensor) -> Tensor:
    """lse without the row's maximum, whose probability a unit matrix as value shows."""
    query, key, _, mask = (cast(t, torch.float64) for t in inputs)
    assert query is not None
    assert key is not None
    assert mask is not None
    unit = torch.eye(key.shape[-2], dtype=torch.float64).expand(*key.shape[:-1], key.shape[-2])
    probs, _ = reference_sdpa(query, key, unit, mask, **options)
    return -probs.max(dim=-1).values.log().float().where(lse.isfinite(), torch.zeros(()))


def _check(
    inputs: Numbers, options: dict[str, Any], capability: Capability, with_lse: bool = False
) -> tuple[Variant, ...]:
    call = _call(inputs, options)
    result = _saved(call, inputs, options, capability)
    own = functools.partial(run_backward, result)
    assert_gradients(own, inputs, options, torch.float16, with_lse=with_lse)
    return result.plan.gradients


@pytest.mark.parametrize("case", TAKEN[::3], ids=lambda case: case.name)
def test_gradients_are_those_of_the_definition(case: Case, capability: Capability) -> None:
    inputs, options = case.build()
    _check(inputs, options, capability, with_lse="causal" in case.name)


# ---- shipped tiles ---------------------------------------------------------------------------------------------------


def _inputs(dim: int, queries: int, keys: int, mask: str = "none", layout: str = "contiguous") -> Numbers:
    """Two query heads for each of two key heads; value lies otherwise than key."""
    generator = torch.Generator().manual_seed(queries + keys)

    def numbers(heads: int, tokens: int, layout: str) -> Tensor:
        return LAYOUTS[layout](torch.randn((1, heads, tokens, dim), generator=generator).half())

    tensors = numbers(4, queries, layout), numbers(2, keys, layout), numbers(2, keys, "contiguous")
    return [*tensors, MASKS[mask]((1, 4, queries, keys), torch.float16, generator)]


LOWER_RIGHT = {"is_causal": True, "alignment": "lower_right"}
# Tiles of rows have 256 or 128, those of columns 32 or 16.
SHIPPED: list[tuple[int, int, int, str, str, dict[str, Any]]] = [
    (64, 70, 300, "none", "tokens_first", LOWER_RIGHT),
    (64, 290, 70, "none", "contiguous", {"window": (40, 9)}),
    (64, 66, 270, "bool blocks", "sliced", {}),
    (64, 66, 100, "float [B, H, L, S]", "contiguous", {"is_causal": True}),
    (64, 66, 64, "bool some rows empty", "contiguous", {"window": (30, -1)}),
    (128, 140, 97, "none", "contiguous", {"is_causal": True}),
    (128, 70, 160, "none", "sliced", {"window": (-1, 3), "alignment": "lower_right"}),
    (128, 66, 150, "bool [B, 1, 1, S]", "contiguous", {}),
    (128, 66, 140, "-finfo.max some rows", "tokens_first", {}),
    (96, 66, 140, "none", "contiguous", {"scale": -0.3}),
    (80, 66, 140, "bool [B, H, L, S]", "contiguous", LOWER_RIGHT),
    (48, 270, 300, "none", "contiguous", LOWER_RIGHT),
    (40, 70, 300, "float columns first", "contiguous", {}),
    (64, 70, 270, "none", "contiguous", {"softcap": 1.5}),
    (64, 66, 100, "float [B, H, L, S]", "contiguous", {"softcap": 4.0, **LOWER_RIGHT}),
    (80, 66, 100, "bool some rows empty", "sliced", {"softcap": 0.7, "scale": 0.4}),
    (128, 66, 140, "none", "contiguous", {"softcap": 2.0, "scale": -0.1, "is_causal": True}),
    (40, 66, 100, "none", "tokens_first", {"softcap": 2.0, "window": (20, 9)}),
]


@pytest.mark.parametrize("case", SHIPPED, ids=lambda case: " ".join(map(str, case)))
def test_shipped_tiles_give_the_gradients_of_the_definition(case: tuple[Any, ...], capability: Capability) -> None:
    dim, *sizes, rules = case
    variants = _check(_inputs(dim, *sizes), {"enable_gqa": True, **rules}, capability, with_lse=dim % 64 == 0)
    there = min(d for d in gradient_head_dims(variants[0].kind) if d >= dim)
    assert {(v.head_dim, v.padded) for v in variants} == {(there, dim != there)}
    assert {"capped" in v.kind for v in variants} == {"softcap" in rules}


@pytest.mark.parametrize("place", range(times(8)))
def test_a_kernel_is_right_at_its_first_use(place: int) -> None:
    gradients_ = [v for v in all_variants() if v.is_gradient and v.on_tensor_cores]
    variant = random.Random(seeds(1)[0]).sample(gradients_, times(8))[place]
    assert largest_error(variant, torch.device("cpu"), emulate) < tolerance(variant) / 10


def _example(
    dim: int, queries: int = 70, keys: int = 140, capability: Capability = TURING
) -> tuple[Emulated, Tensor, Numbers]:
    inputs, options = _inputs(dim, queries, keys), {"enable_gqa": True}
    result = _saved(_call(inputs, options), inputs, options, capability)
    return result, torch.randn(result.out.shape).half(), inputs


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_are_the_same_bits_every_time(dim: int, capability: Capability) -> None:
    result, grad_out, _ = _example(dim, capability=capability)
    first, second = (run_backward(result, grad_out, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_launches_in_parts_give_the_same_bits() -> None:
    result, grad_out, _ = _example(128, 150, 300)
    query, key, value = whole = [torch.empty_like(t) for t in (result.call.query, result.call.key, result.call.value)]
    launches = backward_launches(
        result.call, result.plan, grad_out, result.out, result.lse, None, None, (query, key, value)
    )
    cut = [part for launch in launches for part in parts(launch, 1)]
    assert {part.params.first_tile for part in cut if part.function == "pa_tensor_grad_key_value"} == {0, 1, 2}
    emulate(launches)
    once = [t.clone() for t in whole]
    for t in whole:
        t.fill_(float("nan"))
    emulate(cut)
    assert all(torch.equal(a, b) for a, b in zip(once, whole))


@pytest.mark.parametrize(
    ("capability", "dim"),
    [(c, dim) for c in GENERATIONS.values() for dim in gradient_head_dims("volta" if c < TURING else "tensor")],
)
def test_shared_memory_is_read_without_bank_conflicts(capability: Capability, dim: int) -> None:
    result, grad_out, _ = _example(dim, capability=capability)
    libraries = [build(variant) for variant in result.plan.gradients]
    before = [blocks_and_passes(library) for library in libraries]
    run_backward(result, grad_out)
    for library, (blocks, passes) in zip(libraries, before):
        now = blocks_and_passes(library)
        assert now[0] - blocks == now[1] - passes > 0


@pytest.mark.parametrize("dim", [64, 128])
def test_the_error_is_that_of_rounding_probabilities_to_halves(dim: int, capability: Capability) -> None:
    """As the left operands of float16 products have to be, in any kernel."""
    result, grad_out, inputs = _example(dim, 140, 300, capability)
    query, key, value = (t.double().repeat_interleave(4 // t.shape[1], 1) for t in inputs[:3] if t is not None)
    wide, scale = grad_out.double(), dim**-0.5

    def by_hand(rounded: Callable[[Tensor], Tensor]) -> list[Tensor]:
        probs = torch.softmax(query @ key.mT * scale, dim=-1)
        scores = probs * (wide @ value.mT - (wide * (probs @ value)).sum(dim=-1, keepdim=True))
        per_head = rounded(scores).mT @ query * scale, rounded(probs).mT @ wide
        return [rounded(scores) @ key * scale, *(g.unflatten(1, (2, 2)).sum(dim=2) for g in per_head)]

    exact_, halves = by_hand(lambda t: t), by_hand(lambda t: t.half().double())
    for actual, oracle, similar in zip(run_backward(result, grad_out), exact_, halves):
        error, allowed = ((t.double() - oracle).norm() / oracle.norm() for t in (actual, similar.half()))
        assert error < 1.3 * allowed


def test_tiles_that_a_mask_forbids_are_skipped() -> None:
    """The tiles of the first 32 columns are left in each of four blocks of queries, and for both heads of two blocks of
    keys: each of the others has a barrier."""
    passed = []
    for allowed in (256, 32):
        inputs = _inputs(64, 256, 256)
        inputs[3] = torch.zeros(256, 256, dtype=torch.bool)
        inputs[3][:allowed, :allowed] = True
        call = _call(inputs, {"enable_gqa": True})
        result = _saved(call, inputs, {"enable_gqa": True}, TURING)
        query, key, value = (torch.empty_like(t) for t in (call.query, call.key, call.value))
        launches = backward_launches(
            call, result.plan, torch.ones_like(result.out), result.out, result.lse, None, None, (query, key, value)
        )
        passed.append(emulate(launches))
    of_query, of_keys = (224 // variant.geometry.cols for variant in result.plan.gradients)
    assert passed[0] - passed[1] == of_query * 4 + of_keys * 2 * 2


@pytest.mark.parametrize("dim", [64, 128])
def test_each_head_skips_the_tiles_that_its_own_mask_forbids(dim: int, capability: Capability) -> None:
    inputs = _inputs(dim, 140, 140)
    inputs[3] = mask = torch.ones(1, 4, 140, 140, dtype=torch.bool)
    for head in range(4):
        mask[0, head, :, 32 * head : 32 * head + 40] = False
        mask[0, head, 32 * head : 32 * head + 40] = False
    _check(inputs, {"enable_gqa": True}, capability)


# ---- the harness must be able to fail --------------------------------------------------------------------------------

_BARRIER = re.compile(r"__syncthreads\(\);")
WRONG = 3e-2


def _error(result: Emulated, grad_out: Tensor, right: list[Tensor], kind: str, text: str | LeftOut | None) -> float:
    """The largest over some orders of the threads, relative; infinite for a deadlock or a NaN. Of the results of this
    kind of kernel."""
    worst = 0.0
    for seed in (1, 2, 3):
        try:
            mutated = None if text is None else {kind: text}
            actual = run_backward(result, grad_out, seed=seed, mutated=mutated, only=kind)
        except Deadlock:
            return float("inf")
        errors = [
            ((a.double() - e).abs().max() / e.abs().max()).nan_to_num(nan=torch.inf)
            for a, e in zip(actual, of_kernel(kind, right), strict=True)
        ]
        worst = max(worst, *(error.item() for error in errors))
        if worst > WRONG:
            break
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grad_query", "grad_key_value"])
def test_a_kernel_without_any_one_barrier_is_wrong(name: str, capability: Capability) -> None:
    kind = ("volta_" if capability < TURING else "tensor_") + name
    examples = []
    for dim, queries, keys in ((64, 300, 300), (128, 150, 150)):
        result, grad_out, _ = _example(dim, queries, keys, capability)
        examples.append((result, grad_out, run_backward(result, grad_out)))
    text = source(kind)
    assert max(_error(*example, kind, None) for example in examples) == 0
    found = [m for m in _BARRIER.finditer(text) if not _of_other_code(text, m.start())]
    assert len(found) >= 5
    for mutant, line in each_left_out(text, found):
        assert any(_error(*example, kind, mutant) > WRONG for example in examples), line


# And what each gives where it does not take place.
_SHUFFLES = {
    "__shfl_xor_sync(FULL_WARP, lower ? pairs[2 * m][0] : pairs[2 * m + 1][0], 2)": "mine",
    "__shfl_xor_sync(FULL_WARP, P.x[m][n][x], 4)": "P.x[m][n][x]",
}


@pytest.mark.parametrize("kind", ["volta_grad_query", "volta_grad_key_value"])
@pytest.mark.parametrize("shuffle", _SHUFFLES)
def test_a_kernel_without_any_one_shuffle_is_wrong(kind: str, shuffle: str) -> None:
    result, grad_out, _ = _example(64, capability=GENERATIONS["Volta"])
    text = source(kind)
    assert text.count(shuffle) == 1
    assert text.count("__shfl_xor_sync(FULL_WARP") == 3  # the third sums delta
    right = run_backward(result, grad_out)
    assert _error(result, grad_out, right, kind, text.replace(shuffle, _SHUFFLES[shuffle])) > WRONG


def _of_other_code(text: str, at: int) -> bool:
    """Whether this place is only compiled for masked or packed calls."""
    return "KEPT" in text[:at].rsplit("#if", 1)[-1] and "#endif" not in text[:at].rsplit("#if", 1)[-1]


def test_a_masked_kernel_without_the_barrier_before_its_place_is_wrong(capability: Capability) -> None:
    inputs, options = _inputs(64, 70, 140, "bool blocks"), {"enable_gqa": True}
    result = _saved(_call(inputs, options), inputs, options, capability)
    grad_out = torch.randn(result.out.shape).half()
    right = run_backward(result, grad_out)
    for kind in [variant.kind for variant in result.plan.gradients]:
        text = source(kind)
        assert text.count("__syncthreads();  // the place is there") == 1
        mutated = text.replace("__syncthreads();  // the place is there", "")
        assert _error(result, grad_out, right, kind, mutated) > WRONG
