"""The gradient kernels on tensor cores, emulated on a CPU, against the definition in float64."""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, Answers, Emulated, forward, of_kernel, sized, worst_error
from attn_support.fused.cases import backward as run_backward
from attn_support.fused.emulation import LeftOut, blocks_and_passes, build, each_left_out, emulate
from attn_support.oracle import assert_gradients
from attn_support.randomness import some
from attn_support.table import GRADIENT_TABLE, Case
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.geometry.gradient import gradient_head_dims
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.plan import gradient_variants
from pascal_attn_core.fused.launch.select import tensor_reasons
from pascal_attn_core.fused.trust.kernels import parts

GENERATIONS = {"Turing": (7, 5), "Volta": (7, 0)}
TURING = GENERATIONS["Turing"]
Capability = tuple[int, int]
Numbers = list[Tensor | None]


@pytest.fixture(params=GENERATIONS)
def capability(request: pytest.FixtureRequest) -> Capability:
    return GENERATIONS[request.param]


def _call(inputs: Numbers, options: dict[str, Any]) -> AttentionCall:
    leaves = [t.detach().requires_grad_() if t is not None and i < 3 else t for i, t in enumerate(inputs)]
    return check_call(*leaves, **options)  # type: ignore[arg-type]


def _takes(call: AttentionCall) -> bool:
    return not tensor_reasons(call, TURING) and gradient_variants(call, TURING)[0].on_tensor_cores


_WIDE = (torch.bfloat16, torch.float64)
_HALVES = [replace(case, dtype=torch.float16) for case in GRADIENT_TABLE if case.dtype not in _WIDE]
TAKEN = [case for case in _HALVES if _takes(_call(*case.build()))]


def _saved(inputs: Numbers, options: dict[str, Any], capability: Capability) -> Emulated:
    """The results that a forward pass saves, with a plan of gradients on tensor cores."""
    result, call = forward(inputs, options), _call(inputs, options)
    return replace(result, plan=result.plan._replace(gradients=gradient_variants(call, capability)))


def _check(
    inputs: Numbers, options: dict[str, Any], capability: Capability, with_lse: bool = False
) -> tuple[Variant, ...]:
    result = _saved(inputs, options, capability)
    own = functools.partial(run_backward, result)
    assert_gradients(own, inputs, options, torch.float16, with_lse=with_lse)
    return result.plan.gradients


@pytest.mark.parametrize("case", some(TAKEN, 130), ids=lambda case: case.name)
def test_gradients_are_those_of_the_definition(case: Case, capability: Capability) -> None:
    inputs, options = case.build()
    _check(inputs, options, capability, with_lse="causal" in case.name)


_case = functools.partial(sized, torch.float16)
# Tiles of rows have 256 or 128, those of columns 32 or 16.
SHIPPED = [
    _case(64, 70, 300, "none", "tokens_first", **LOWER_RIGHT),
    _case(64, 290, 70, window=(40, 9)),
    _case(64, 66, 270, "bool blocks", "sliced"),
    _case(64, 66, 100, "float [B, H, L, S]", is_causal=True),
    _case(64, 66, 64, "bool some rows empty", window=(30, -1)),
    _case(128, 140, 97, is_causal=True),
    _case(128, 70, 160, "none", "sliced", window=(-1, 3), alignment="lower_right"),
    _case(128, 66, 150, "bool [B, 1, 1, S]"),
    _case(128, 66, 140, "-finfo.max some rows", "tokens_first"),
    _case(96, 66, 140, scale=-0.3),
    _case(80, 66, 140, "bool [B, H, L, S]", **LOWER_RIGHT),
    _case(48, 270, 300, **LOWER_RIGHT),
    _case(40, 70, 300, "float columns first"),
    _case(64, 70, 270, softcap=1.5),
    _case(64, 66, 100, "float [B, H, L, S]", softcap=4.0, **LOWER_RIGHT),
    _case(80, 66, 100, "bool some rows empty", "sliced", softcap=0.7, scale=0.4),
    _case(128, 66, 140, softcap=2.0, scale=-0.1, is_causal=True),
    _case(40, 66, 100, "none", "tokens_first", softcap=2.0, window=(20, 9)),
]


@pytest.mark.parametrize("case", some(SHIPPED, 9), ids=lambda case: case.name)
def test_shipped_tiles_give_the_gradients_of_the_definition(case: Case, capability: Capability) -> None:
    dim = case.query[-1]
    variants = _check(*case.build(), capability, with_lse=dim % 64 == 0)
    there = min(d for d in gradient_head_dims(variants[0].kind) if d >= dim)
    assert {(v.head_dim, v.padded) for v in variants} == {(there, dim != there)}
    assert {"capped" in v.kind for v in variants} == {"softcap" in case.options}


def _example(
    dim: int, queries: int = 70, keys: int = 140, capability: Capability = TURING
) -> tuple[Emulated, Tensor, Numbers]:
    inputs, options = _case(dim, queries, keys).build()
    result = _saved(inputs, options, capability)
    return result, torch.randn(result.out.shape).half(), inputs


@pytest.mark.parametrize("dim", some([128, 64], 2))
def test_gradients_are_the_same_bits_every_time(dim: int, capability: Capability) -> None:
    result, grad_out, _ = _example(dim, capability=capability)
    assert all(map(torch.equal, *(run_backward(result, grad_out, seed=seed) for seed in (1, 2))))


def test_launches_in_parts_give_the_same_bits() -> None:
    def cut(launches: Iterable[Launch], **how: Any) -> int:
        pieces = [part for launch in launches for part in parts(launch, 1)]
        assert {part.params.first_tile for part in pieces if "grad_key_value" in part.function} == {0, 1, 2}
        return emulate(pieces, **how)

    result, grad_out, _ = _example(128, 150, 300)
    assert all(map(torch.equal, run_backward(result, grad_out), run_backward(result, grad_out, run=cut)))


@pytest.mark.parametrize(
    ("capability", "dim"),
    some([(c, d) for c in GENERATIONS.values() for d in gradient_head_dims("volta" if c < TURING else "tensor")], 2),
)
def test_shared_memory_is_read_without_bank_conflicts(capability: Capability, dim: int) -> None:
    result, grad_out, _ = _example(dim, capability=capability)
    libraries = [build(variant) for variant in result.plan.gradients]
    before = [blocks_and_passes(library) for library in libraries]
    run_backward(result, grad_out)
    for library, (blocks, passes) in zip(libraries, before):
        now = blocks_and_passes(library)
        assert now[0] - blocks == now[1] - passes > 0


@pytest.mark.parametrize("dim", some([128, 64], 2))
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
    """The first 32 columns are left in four blocks of queries, and for both heads of two of keys."""
    passed: list[int] = []
    for allowed in (256, 32):
        inputs, options = _case(64, 256, 256).build()
        inputs[3] = torch.zeros(256, 256, dtype=torch.bool)
        inputs[3][:allowed, :allowed] = True
        result = _saved(inputs, options, TURING)
        run_backward(result, torch.ones_like(result.out), run=lambda launches: passed.append(emulate(launches)) or 0)
    of_query, of_keys = (224 // variant.geometry.cols for variant in result.plan.gradients)
    assert passed[0] - passed[1] == of_query * 4 + of_keys * 2 * 2


@pytest.mark.parametrize("dim", some([128, 64], 2))
def test_each_head_skips_the_tiles_that_its_own_mask_forbids(dim: int, capability: Capability) -> None:
    inputs, options = _case(dim, 140, 140).build()
    inputs[3] = mask = torch.ones(1, 4, 140, 140, dtype=torch.bool)
    for head in range(4):
        mask[0, head, :, 32 * head : 32 * head + 40] = False
        mask[0, head, 32 * head : 32 * head + 40] = False
    _check(inputs, options, capability)


WRONG = 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["grad_key_value", "grad_query"], 2))
def test_a_kernel_without_any_one_barrier_is_wrong(name: str, capability: Capability) -> None:
    kind = ("volta_" if capability < TURING else "tensor_") + name
    examples = [_example(*sizes, capability)[:2] for sizes in ((64, 300, 300), (128, 150, 150))]
    right = [of_kernel(kind, run_backward(*example)) for example in examples]

    def run(place: int, seed: int, mutant: LeftOut) -> Answers:
        return run_backward(*examples[place], seed=seed, mutated={kind: mutant}, only=kind), right[place]

    text = source(kind)
    guards = {found: text[: found.start()].rsplit("#if", 1)[-1] for found in re.finditer(r"__syncthreads\(\);", text)}
    # The others are only compiled for masked or packed calls.
    found = [match for match, guard in guards.items() if "KEPT" not in guard or "#endif" in guard]
    assert len(found) >= 5
    for mutant, line in some(each_left_out(text, found), 20):
        runs = [functools.partial(run, place, seed, mutant) for place in (0, 1) for seed in (1, 2, 3)]
        assert worst_error(runs, WRONG) > WRONG, line
