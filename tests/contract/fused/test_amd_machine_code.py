"""The machine code for AMD's cards, instruction by instruction on a CPU, against the definition: the code objects that
ship, and what clang makes of kernels that are compiled at their first use. ``attn_support.amd.machine`` says what it
notices.

The parameters are those that the host passes, so that its structures are compared with what the code reads. A few calls
of each kind, every shipped kernel in profile nightly. Waves of 64 lanes (gfx9) and of 32 (gfx10), with products of
pairs (gfx906, gfx1012, gfx1030) and without.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.amd import machine
from attn_support.amd.code import OBJDUMP, Instruction, MachineKernel, kernels
from attn_support.fused.cases import Emulated, backward, forward, poisoned, whole
from attn_support.fused.packed import each_alone, ends_of
from attn_support.oracle import assert_attention, assert_close, assert_gradients, exact, plain_dtype
from attn_support.randomness import times
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import amd as tool  # noqa: E402

from pascal_attn_core.call import check_call, empty_output  # noqa: E402
from pascal_attn_core.fused.code import prebuilt  # noqa: E402
from pascal_attn_core.fused.code.amd_code import arch_of  # noqa: E402
from pascal_attn_core.fused.code.source import Variant  # noqa: E402
from pascal_attn_core.fused.geometry.amd import ARCHS, target  # noqa: E402
from pascal_attn_core.fused.launch import Launch  # noqa: E402
from pascal_attn_core.fused.launch.forward import forward_launches  # noqa: E402
from pascal_attn_core.fused.launch.packed import packed_launches  # noqa: E402
from pascal_attn_core.fused.launch.plan import Packed  # noqa: E402
from pascal_attn_core.fused.launch.tail_rows import TailRows  # noqa: E402

pytestmark = pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump-16 to read machine code (Debian: llvm-16)")
needs_clang = pytest.mark.skipif(
    tool.compiler() is None, reason=f"needs clang {tool.CLANG} with the AMDGPU target (Debian: clang-16 lld-16)"
)
EVERY = times(1) > 1  # profile nightly
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LOWER_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "lower_right", "enable_gqa": True}


def _shipped(variant: Variant) -> bytes:
    code = prebuilt.find_amd(variant)
    assert code is not None, f"{variant.name} does not ship"
    return code


@functools.cache
def _shipped_or_compiled(variant: Variant) -> bytes:
    return prebuilt.find_amd(variant) or tool.compiled(variant)


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
    arch: str,
    code_of: Callable[[Variant], bytes] = _shipped,
    *,
    parts: bool = False,
    watch: machine.Watch | None = None,
) -> Emulated:
    result = forward(inputs, options, arch=arch, parts=parts, run=machine.execute, code_of=code_of, watch=watch)
    assert result.plan.forward.arch == arch
    dtype = result.out.dtype
    assert_attention(result.out, result.lse, inputs, options, dtype)
    return result


# ---- what ships ------------------------------------------------------------------------------------------------------

_OFTEN = {(64, "float16"), (64, "float32"), (40, "float16"), (128, "float16")}
_RARE = {
    "gfx900": ("forward-64-float16-none", "forward-128-float32-bool", "split-64-float16-none"),
    "gfx1010": ("forward-64-float16-none", "forward-80-float32-bool", "split-128-float32-none"),
    "gfx1012": ("forward-64-float16-none",),
}


def _is_taken(variant: Variant) -> bool:
    """Whether each run executes it, and not only those of every night."""
    if EVERY or variant.arch in _RARE:
        return EVERY or variant.name.removesuffix(f"-{variant.arch}") in _RARE[variant.arch]
    if variant.kind in ("split", "ranges"):
        return variant.head_dim == 64 and variant.dtype != "bfloat16"
    return (variant.head_dim, variant.dtype) in _OFTEN and (variant.mask == "none" or variant.head_dim == 64)


_SHIPPED = [variant for arch in ARCHS for variant in prebuilt.amd_variants(arch) if _is_taken(variant)]
_FORWARD = [variant for variant in _SHIPPED if variant.kind == "forward"]
_SPLIT = [variant for variant in _SHIPPED if variant.kind == "split"]
_RANGES = [variant for variant in _SHIPPED if variant.kind == "ranges"]


@pytest.mark.parametrize("variant", _FORWARD, ids=lambda variant: variant.name)
def test_shipped_kernels_give_the_answer_of_the_definition(variant: Variant) -> None:
    rows, cols = variant.geometry.rows, variant.geometry.cols
    inputs = _inputs(getattr(torch, variant.dtype), variant.head_dim, rows // 2 + 5, cols + 9, variant.mask)
    result = _check(inputs, LOWER_RIGHT if variant.mask == "none" else {"enable_gqa": True}, variant.arch)
    assert result.plan.forward == variant


@pytest.mark.parametrize("variant", _SPLIT, ids=lambda variant: variant.name)
def test_shipped_kernels_join_the_parts_of_the_keys(variant: Variant) -> None:
    inputs = _inputs(getattr(torch, variant.dtype), variant.head_dim, 6, 5 * variant.geometry.cols + 3, variant.mask)
    options = LOWER_RIGHT if variant.mask == "none" else {"enable_gqa": True}
    result = _check(inputs, options, variant.arch, parts=True)
    assert result.plan.forward == variant
    assert result.plan.splits > 1


@pytest.mark.parametrize("variant", _RANGES, ids=lambda variant: variant.name)
def test_shipped_kernels_compute_the_last_rows_with_their_keys_in_ranges(variant: Variant) -> None:
    rows, cols = variant.geometry.rows, variant.geometry.cols
    inputs = _inputs(FLOAT16, variant.head_dim, rows + 21, 3 * cols + 9)
    call = check_call(*inputs, enable_gqa=True)  # type: ignore[arg-type]
    plan = whole(call, variant.arch)._replace(tail=TailRows(variant, rows, 2))
    out, lse = empty_output(call).fill_(torch.nan), poisoned((1, 2, rows + 21), FLOAT32)
    machine.execute(forward_launches(call, plan, out, lse), _shipped)
    options = {"enable_gqa": True}
    assert_attention(out, lse, inputs, options, FLOAT16)


@pytest.mark.parametrize(("arch", "dtype"), [("gfx906", FLOAT16), ("gfx1030", FLOAT16), ("gfx1010", FLOAT32)])
def test_shipped_kernels_keep_sequences_apart(arch: str, dtype: torch.dtype) -> None:
    """One without queries, one without keys, and tokens behind the last one, which hold NaN."""
    lengths = [5, 70, 0, 1, 20], [9, 90, 30, 1, 0]
    generator = torch.Generator().manual_seed(8)
    made = []
    for heads, tokens in ((2, lengths[0]), (1, lengths[1]), (1, lengths[1])):
        inner = torch.randn((1, heads, sum(tokens), 64), generator=generator)
        made.append(torch.cat([inner, inner.new_full((1, heads, 3, 64), torch.nan)], dim=2).to(dtype))
    packed = Packed.of(*map(ends_of, lengths), torch.device("cpu"), lower_right=True)
    call = check_call(*made, enable_gqa=True, is_causal=True)
    out, lse = empty_output(call).fill_(torch.nan), poisoned((1, 2, 99), FLOAT32)
    launches = packed_launches(forward_launches(call, whole(call, arch), out, lse), packed)
    machine.execute(launches, _shipped)
    rule = {"is_causal": True, "alignment": "lower_right"}
    oracle, similar = (
        each_alone(*(t.nan_to_num().to(d) for t in made), *lengths, **rule)  # type: ignore[misc]
        for d in (torch.float64, plain_dtype(dtype))
    )
    end = sum(lengths[0])
    assert out[:, :, end:].isnan().all()  # not written
    for own, true, plain_answer, what in zip((out, lse), oracle, similar, ("out", "lse")):
        assert_close(own[:, :, :end], true[:, :, :end], plain_answer[:, :, :end], what, dtype=dtype)


@pytest.mark.parametrize("arch", [*ARCHS, "gfx1031", "gfx1030-no-dot", "gfx906-no-dot"])
def test_cards_execute_dot_products_of_pairs_only_where_they_have_them(arch: str) -> None:
    """The names of all instructions that were executed. The code is read as that of the card that it names."""
    executed: Counter[str] = Counter()
    _check(_inputs(FLOAT16, 64, 69, 73), LOWER_RIGHT, arch, watch=lambda wave, i: executed.update([i.name]))
    assert arch_of(_shipped(Variant("forward", 64, "float16", arch=arch))) == target(arch)
    dots = {name: count for name, count in executed.items() if "dot" in name}
    in_place = {"v_dot2c_f32_f16"}  # gfx1012 and gfx1030 add to the result itself
    expected = {"gfx906": {"v_dot2_f32_f16"}, "gfx1012": in_place, "gfx1030": in_place, "gfx1031": in_place}
    assert dots.keys() == expected.get(arch, set())
    products = dots or {name: executed[name] for name in ("v_fma_f32", "v_fmac_f32", "v_mac_f32")}
    assert sum(products.values()) > 10_000


# ---- what is compiled at its first use -------------------------------------------------------------------------------


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT16, 60, "float"),
        ("gfx906", FLOAT32, 36, "none"),
        ("gfx1030", FLOAT16, 60, "float"),
        ("gfx1010", FLOAT32, 36, "none"),
        *(
            (arch, dtype, dim, mask)
            for arch in ARCHS
            for dtype, dim, mask in ((FLOAT32, 60, "float"), (FLOAT16, 100, "bool"), (BFLOAT16, 60, "float"))
            if EVERY
        ),
    ],
)
def test_columns_that_do_not_exist_and_added_masks(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    _check(_inputs(dtype, dim, 37, 75, mask), {"enable_gqa": True}, arch, _shipped_or_compiled)


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask", "parts"),
    [
        ("gfx906", FLOAT16, 64, "none", False),
        ("gfx906", FLOAT32, 64, "none", True),
        ("gfx1030", FLOAT16, 64, "bool", False),
        ("gfx1010", FLOAT32, 60, "none", True),
        *((arch, FLOAT16, 128, "float", parts) for arch in ARCHS for parts in (False, True) if EVERY),
    ],
)
def test_scores_with_a_cap_and_rows_with_a_sink(
    arch: str, dtype: torch.dtype, dim: int, mask: str, parts: bool
) -> None:
    inputs = _inputs(dtype, dim, 6 if parts else 37, 330 if parts else 75, mask)
    options = {**LOWER_RIGHT, "softcap": 3.0, "sinks": torch.tensor([0.5, 40.0])}
    result = _check(inputs, options, arch, _shipped_or_compiled, parts=parts)
    assert result.plan.forward.kind == ("capped_split" if parts else "capped")


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT16, 64, "none"),
        ("gfx906", FLOAT32, 60, "float"),
        ("gfx1030", FLOAT16, 64, "none"),
        ("gfx1010", FLOAT32, 60, "float"),
        *(
            (arch, dtype, dim, mask)
            for arch in ARCHS
            for dtype, dim, mask in (
                (FLOAT32, 64, "none"),
                (FLOAT16, 128, "bool"),
                (FLOAT16, 60, "float"),
                (BFLOAT16, 64, "none"),
            )
            if EVERY
        ),
    ],
)
def test_gradients_are_those_of_the_definition(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    inputs = _inputs(dtype, dim, 37, 70, mask)
    options = LOWER_RIGHT if mask == "none" else {"enable_gqa": True}
    result = _check(inputs, options, arch, _shipped_or_compiled)
    assert {v.arch for v in result.plan.gradients} == {arch}
    own = functools.partial(backward, result, run=machine.execute, code_of=_shipped_or_compiled)
    assert_gradients(own, inputs, options, dtype)


# ---- what the machine notices ----------------------------------------------------------------------------------------

NOTHING = Instruction("s_nop", (), {}, 0, "s_nop")
both = pytest.mark.parametrize("arch", ["gfx906", "gfx1030"])


def _mutated(change: Callable[[Instruction], Instruction | None]) -> Callable[..., int]:
    """Executes launches with some instructions changed."""

    def run(launches: Iterable[Launch]) -> int:
        return sum(machine.run(launch, _changed(launch, change)) for launch in launches)

    return run


def _changed(launch: Launch, change: Callable[[Instruction], Instruction | None]) -> MachineKernel:
    kernel = kernels(_shipped(launch.variant))[launch.function]
    return replace(kernel, instructions=tuple(change(i) or i for i in kernel.instructions))


def _outcome(run: Callable[..., int], arch: str) -> str:
    """The result of a call: "right", "wrong", or the kind of error that an instruction met."""
    inputs = _inputs(FLOAT16, 64, 37, 75)
    try:
        out = forward(inputs, LOWER_RIGHT, arch=arch, run=run).out.double()
    except AssertionError as error:
        return type(error.__cause__).__name__
    oracle = exact(inputs, LOWER_RIGHT)[0]
    return "right" if (out - oracle).norm() / oracle.norm() < 1e-3 else "wrong"


@both
def test_unchanged_code_is_right_where_changed_code_is_not(arch: str) -> None:
    assert _outcome(_mutated(lambda i: None), arch) == "right"


@both
@pytest.mark.parametrize("counter", ["vmcnt", "lgkmcnt"])
def test_what_was_not_waited_for_is_not_there(counter: str, arch: str) -> None:
    def dont_wait(i: Instruction) -> Instruction | None:
        kept = {name: most for name, most in i.options.items() if name != counter}
        return i._replace(options=kept) if i.name == "s_waitcnt" else None

    # lgkmcnt: the parameters are not there, and addresses are made of them.
    assert _outcome(_mutated(dont_wait), arch) == {"vmcnt": "wrong", "lgkmcnt": "OutsideOfMemory"}[counter]


@both
def test_waves_that_do_not_meet_give_another_answer(arch: str) -> None:
    assert _outcome(_mutated(lambda i: NOTHING if i.name == "s_barrier" else None), arch) == "wrong"


@both
def test_memory_ends_with_its_tensors(arch: str) -> None:
    def without_the_last_key(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        query, key, *rest = launch.keep
        return machine.execute([launch._replace(keep=(query, key[:, :, :-1], *rest))], _shipped)

    assert _outcome(without_the_last_key, arch) == "OutsideOfMemory"


@both
@pytest.mark.parametrize(
    ("one", "other"), [("q", "k"), ("v", "o"), ("qh", "qs"), ("lq", "lk"), ("low", "high"), ("scale", "scale_log2")]
)
def test_fields_at_other_places_are_noticed(one: str, other: str, arch: str) -> None:
    """As if the host's structure had two of them in another order than the code."""

    def swapped(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        fields = {name: getattr(launch.params, name) for name, _ in launch.params._fields_}
        params = type(launch.params)(**fields | {one: fields[other], other: fields[one]})
        return machine.execute([launch._replace(params=params)], _shipped)

    assert _outcome(swapped, arch) != "right"
