"""The machine code for gfx906, instruction by instruction on a CPU, against the definition: the code objects that ship,
and what clang makes of kernels that are compiled at their first use. ``attn_support.amd.machine`` says what it notices.

The parameters are those that the host passes, so that its structures are compared with what the code reads. A few calls
of each kind, every shipped kernel in profile nightly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.amd import machine
from attn_support.amd.code import OBJDUMP, Instruction, MachineKernel, kernels
from attn_support.fused.cases import Emulated, backward, forward
from attn_support.oracle import assert_close, assert_gradients_close, cast, exact, gradients, plain, plain_dtype
from attn_support.profile import times
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import amd as tool  # noqa: E402

from pascal_attn_core.fused import prebuilt  # noqa: E402
from pascal_attn_core.fused.launches import Launch  # noqa: E402
from pascal_attn_core.fused.source import Variant  # noqa: E402
from pascal_attn_core.reference import reference_sdpa  # noqa: E402

pytestmark = pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump-16 to read machine code (Debian: llvm-16)")
needs_clang = pytest.mark.skipif(
    tool.compiler() is None, reason=f"needs clang {tool.CLANG} with the AMDGPU target (Debian: clang-16 lld-16)"
)
ARCH = "gfx906"
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LOWER_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "lower_right", "enable_gqa": True}


def _shipped(variant: Variant) -> bytes:
    code = prebuilt.find(variant, ARCH)
    assert code is not None, f"{variant.name} does not ship"
    return code


@functools.cache
def _shipped_or_compiled(variant: Variant) -> bytes:
    return prebuilt.find(variant, ARCH) or tool.compile_variant(variant)


def _inputs(dtype: torch.dtype, dim: int, queries: int, keys: int, mask: str = "none") -> list[Tensor | None]:
    """Two query heads for one key head."""
    generator = torch.Generator().manual_seed(dim)
    query, key, value = (
        torch.randn((1, heads, n, dim), generator=generator).to(dtype)
        for heads, n in ((2, queries), (1, keys), (1, keys))
    )
    allowed = torch.rand((queries, keys), generator=generator) < 0.6
    allowed[5] = False
    added = torch.randn((queries, keys), generator=generator).masked_fill(~allowed, -torch.inf)
    return [query, key, value, {"none": None, "bool": allowed, "float": added.to(dtype)}[mask]]


def _check(
    inputs: list[Tensor | None],
    options: dict[str, Any],
    code_of: Callable[[Variant], bytes] = _shipped,
    *,
    parts: bool = False,
) -> Emulated:
    result = forward(inputs, options, arch=ARCH, parts=parts, run=machine.execute, code_of=code_of)
    assert result.plan.forward.arch == ARCH
    dtype = result.out.dtype
    oracle, lse = exact(inputs, options)
    similar, similar_lse = plain(inputs, options, plain_dtype(dtype))
    error = (result.out.double() - oracle).norm() / oracle.norm()
    print(f"{result.plan.forward.name}: relative error {error:.1e}")
    assert_close(result.out, oracle, similar, "out", dtype=dtype)
    assert_close(result.lse, lse, similar_lse, "lse", dtype=dtype)
    return result


# ---- what ships ------------------------------------------------------------------------------------------------------

_OFTEN = {(64, "float16"), (64, "float32"), (40, "float16"), (128, "float16")}
_FORWARD = [
    variant
    for variant in prebuilt.amd_variants(ARCH)
    if variant.kind == "forward"
    and (
        times(1) > 1
        or ((variant.head_dim, variant.dtype) in _OFTEN and (variant.mask == "none" or variant.head_dim == 64))
    )
]
_SPLIT = [
    variant
    for variant in prebuilt.amd_variants(ARCH)
    if variant.kind == "split" and (times(1) > 1 or (variant.head_dim == 64 and variant.dtype != "bfloat16"))
]


@pytest.mark.parametrize("variant", _FORWARD, ids=lambda variant: variant.name)
def test_shipped_kernels_give_the_answer_of_the_definition(variant: Variant) -> None:
    rows, cols = variant.geometry.rows, variant.geometry.cols
    inputs = _inputs(getattr(torch, variant.dtype), variant.head_dim, rows // 2 + 5, cols + 9, variant.mask)
    result = _check(inputs, LOWER_RIGHT if variant.mask == "none" else {"enable_gqa": True})
    assert result.plan.forward == variant


@pytest.mark.parametrize("variant", _SPLIT, ids=lambda variant: variant.name)
def test_shipped_kernels_join_the_parts_of_the_keys(variant: Variant) -> None:
    inputs = _inputs(getattr(torch, variant.dtype), variant.head_dim, 6, 5 * variant.geometry.cols + 3, variant.mask)
    result = _check(inputs, LOWER_RIGHT if variant.mask == "none" else {"enable_gqa": True}, parts=True)
    assert result.plan.forward == variant
    assert result.plan.splits > 1


# ---- what is compiled at its first use -------------------------------------------------------------------------------


@needs_clang
@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    [
        (FLOAT16, 60, "float"),
        (FLOAT32, 36, "none"),
        *([(FLOAT32, 60, "float"), (FLOAT16, 100, "bool"), (BFLOAT16, 60, "float")] if times(1) > 1 else []),
    ],
)
def test_columns_that_do_not_exist_and_added_masks(dtype: torch.dtype, dim: int, mask: str) -> None:
    _check(_inputs(dtype, dim, 37, 75, mask), {"enable_gqa": True}, _shipped_or_compiled)


@needs_clang
@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    [
        (FLOAT16, 64, "none"),
        (FLOAT32, 60, "float"),
        *(
            [(FLOAT32, 64, "none"), (FLOAT16, 128, "bool"), (FLOAT16, 60, "float"), (BFLOAT16, 64, "none")]
            if times(1) > 1
            else []
        ),
    ],
)
def test_gradients_are_those_of_the_definition(dtype: torch.dtype, dim: int, mask: str) -> None:
    inputs = _inputs(dtype, dim, 37, 70, mask)
    options = LOWER_RIGHT if mask == "none" else {"enable_gqa": True}
    result = _check(inputs, options, _shipped_or_compiled)
    assert {v.arch for v in result.plan.gradients} == {ARCH}
    wide, narrow = ([cast(t, d) for t in inputs] for d in (torch.float64, plain_dtype(dtype, as_torch=True)))
    for some in (wide, narrow):
        some[:3] = [t.requires_grad_() for t in some[:3] if t is not None]
    oracle, lse = reference_sdpa(*wide, **options)  # type: ignore[arg-type]
    similar = reference_sdpa(*narrow, **options)[0]  # type: ignore[arg-type]
    grad_out = torch.randn(oracle.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    answers = [
        gradients(out, some[:3], grad_out.to(out.dtype))  # type: ignore[arg-type]
        for out, some in ((oracle, wide), (similar, narrow))
    ]
    own = backward(result, grad_out, run=machine.execute, code_of=_shipped_or_compiled)
    errors = [f"{(mine.double() - true).norm() / true.norm():.1e}" for mine, true in zip(own, answers[0])]
    print(f"{result.plan.gradients[0].name}: relative errors {', '.join(errors)}")
    assert_gradients_close(own, *answers, lse.detach(), dtype)


# ---- what the machine notices ----------------------------------------------------------------------------------------

NOTHING = Instruction("s_nop", (), {}, 0, "s_nop")


def _mutated(change: Callable[[Instruction], Instruction | None]) -> Callable[..., int]:
    """Executes launches with some instructions changed."""

    def run(launches: Iterable[Launch]) -> int:
        return sum(machine.run(launch, _changed(launch, change)) for launch in launches)

    return run


def _changed(launch: Launch, change: Callable[[Instruction], Instruction | None]) -> MachineKernel:
    kernel = kernels(_shipped(launch.variant))[launch.function]
    return replace(kernel, instructions=tuple(change(i) or i for i in kernel.instructions))


def _outcome(run: Callable[..., int]) -> str:
    """Of a call: "right", "wrong", or the kind of error that an instruction met."""
    inputs = _inputs(FLOAT16, 64, 37, 75)
    try:
        out = forward(inputs, LOWER_RIGHT, arch=ARCH, run=run).out.double()
    except AssertionError as error:
        return type(error.__cause__).__name__
    oracle = exact(inputs, LOWER_RIGHT)[0]
    return "right" if (out - oracle).norm() / oracle.norm() < 1e-3 else "wrong"


def test_unchanged_code_is_right_where_changed_code_is_not() -> None:
    assert _outcome(_mutated(lambda i: None)) == "right"


@pytest.mark.parametrize("counter", ["vmcnt", "lgkmcnt"])
def test_what_was_not_waited_for_is_not_there(counter: str) -> None:
    def dont_wait(i: Instruction) -> Instruction | None:
        return NOTHING if i.name == "s_waitcnt" and counter in i.options else None

    # lgkmcnt: the parameters are not there, and addresses are made of them.
    assert _outcome(_mutated(dont_wait)) == {"vmcnt": "wrong", "lgkmcnt": "OutsideOfMemory"}[counter]


def test_waves_that_do_not_meet_give_another_answer() -> None:
    assert _outcome(_mutated(lambda i: NOTHING if i.name == "s_barrier" else None)) == "wrong"


def test_memory_ends_with_its_tensors() -> None:
    def without_the_last_key(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        query, key, *rest = launch.keep
        return machine.execute([launch._replace(keep=(query, key[:, :, :-1], *rest))], _shipped)

    assert _outcome(without_the_last_key) == "OutsideOfMemory"


@pytest.mark.parametrize(
    ("one", "other"), [("q", "k"), ("v", "o"), ("qh", "qs"), ("lq", "lk"), ("low", "high"), ("scale", "scale_log2")]
)
def test_fields_at_other_places_are_noticed(one: str, other: str) -> None:
    """As if the host's structure had two of them in another order than the code."""

    def swapped(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        fields = {name: getattr(launch.params, name) for name, _ in launch.params._fields_}
        params = type(launch.params)(**fields | {one: fields[other], other: fields[one]})
        return machine.execute([launch._replace(params=params)], _shipped)

    assert _outcome(swapped) != "right"
