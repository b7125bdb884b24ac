"""The machine code for AMD's cards, instruction by instruction on a CPU, against the definition: the code objects that
ship, and what clang makes of kernels that are compiled at their first use. ``attn_support.amd.machine`` says what it
notices.

The parameters are those that the host passes, so that its structures are compared with what the code reads. A few calls
of each kind, every shipped kernel in profile nightly. Waves of 64 lanes (gfx9) and of 32 (gfx10, gfx11), with products
of pairs (gfx906, gfx1012, gfx1030, gfx1102) and without.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import amd as tool
import pytest
import torch
from attn_support.amd import machine
from attn_support.amd.code import OBJDUMP, Instruction, MachineKernel, instruction, kernels
from attn_support.fused import cases
from attn_support.fused.cases import LOWER_RIGHT, Emulated, forward, poisoned, sized
from attn_support.fused.packed import definitions, ends_of
from attn_support.oracle import assert_close, exact
from attn_support.randomness import some, times
from attn_support.table import Case
from models.amd import registers, sources

from pascal_attn_core.call import check_call, empty_output
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.geometry.amd import ARCHS
from pascal_attn_core.fused.launch import Launch, int8_definition
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.gguf import GgufLinearCall, gguf_linear_launches
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.packed import packed_launches
from pascal_attn_core.fused.launch.plan import Packed, Plan, plan_call
from pascal_attn_core.fused.trust import verify_linear
from pascal_attn_core.reference.gguf_blocks import FORMATS

pytestmark = pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump-16 to read machine code (Debian: llvm-16)")
needs_clang = pytest.mark.skipif(
    tool.compiler() is None, reason=f"needs clang {tool.CLANG} with the AMDGPU target (Debian: clang-16 lld-16)"
)
EVERY = times(1) > 1  # profile nightly
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def _shipped(variant: Compilation) -> bytes:
    code = prebuilt.find(variant)
    assert code is not None, f"{variant.name} does not ship"
    return code


@functools.cache
def _shipped_or_compiled(variant: Variant) -> bytes:
    return prebuilt.find(variant) or tool.compiled(variant)


_case = functools.partial(sized, heads=(2, 1))
_alone = functools.partial(sized, heads=(1, 1))


def _check(
    case: Case,
    arch: str,
    code_of: Callable[[Variant], bytes] = _shipped,
    *,
    parts: bool = False,
    watch: machine.Watch | None = None,
) -> Emulated:
    result = cases.check_forward(case, arch=arch, parts=parts, run=machine.execute, code_of=code_of, watch=watch)
    assert {v.arch for v in (result.plan.forward, *result.plan.gradients)} == {arch}
    return result


_OFTEN = {(64, "float32"), (40, "float16"), (128, "float16")}
_INT8_OFTEN = {(64, "float32", "gfx906"), (128, "float16", "gfx1030")}
_RARE = {
    "gfx900": ("forward-128-float32-bool", "split-64-float16-none"),
    "gfx1010": ("forward-80-float32-bool", "split-128-float32-none"),
    "gfx1012": (),
    "gfx1102": (
        "forward-128-float16-none",
        "forward-64-float32-bool",
        "split-64-float16-none",
        "wmma-64-float16-none",
        "wmma-128-bfloat16-bool",
        "wmma_small-64-bfloat16-none",
    ),
}


def _is_taken(variant: Variant) -> bool:
    """Whether each run executes it, and not only those of every night."""
    if EVERY or variant.arch in _RARE:
        return EVERY or variant.name.removesuffix(f"-{variant.arch}") in _RARE[variant.arch]
    if variant.kind == "int8":
        return (variant.head_dim, variant.dtype, variant.arch) in _INT8_OFTEN
    if variant.kind in ("split", "ranges"):
        return variant.head_dim == 64 and variant.dtype != "bfloat16"
    if (variant.head_dim, variant.dtype) == (64, "float16"):
        return variant.mask == "bool"  # without one they are executed for every architecture, below
    return (variant.head_dim, variant.dtype) in _OFTEN and (variant.mask == "none" or variant.head_dim == 64)


_EVERY_ONE = [variant for arch in ARCHS for variant in prebuilt.amd_variants(arch)]
_SHIPPED = [variant for variant in _EVERY_ONE if isinstance(variant, Variant) and _is_taken(variant)]
_GGUF_OFTEN = {("Q8_0", "gfx906"), ("Q4_K", "gfx1030"), ("Q6_K", "gfx1012")}
_GGUF = [v for v in _EVERY_ONE if isinstance(v, GgufLinearVariant) and (EVERY or (v.format, v.arch) in _GGUF_OFTEN)]


def _of(variant: Variant, queries: int, keys: int) -> Case:
    """A call for a variant that ships."""
    mask = {"none": "none", "bool": "bool some rows empty"}[variant.mask]
    rule = LOWER_RIGHT if mask == "none" else {}
    return _alone(getattr(torch, variant.dtype), variant.head_dim, queries, keys, mask, **rule)


@pytest.mark.parametrize(
    "variant", some((v for v in _SHIPPED if v.kind != "int8"), 8), ids=lambda variant: variant.name
)
def test_shipped_kernels_give_the_answer_of_the_definition(variant: Variant) -> None:
    """They compute whole tiles, join the parts of the keys, or compute the last rows with their keys in ranges."""
    rows, cols = variant.geometry.rows, variant.geometry.cols
    if variant.kind == "ranges":
        case = _alone(FLOAT16, variant.head_dim, rows + 21, 3 * cols + 9)
        plan = cases.check_tail(case, variant.arch, 2, run=machine.execute, code_of=_shipped).plan
        assert plan.tail.variant == variant
        return
    parts = variant.is_small
    sizes = (6, 5 * cols + 3) if parts else (rows // 2 + 5, cols + 9)
    if variant.on_tensor_cores:
        how = {"plan": Plan(variant, 2 if parts else 0), "run": machine.execute, "code_of": _shipped}
        cases.check_forward(_of(variant, *sizes), **how)
        return
    plan = _check(_of(variant, *sizes), variant.arch, parts=parts).plan
    assert (plan.forward, plan.splits > 1) == (variant, parts)


@pytest.mark.parametrize("variant", some((v for v in _SHIPPED if v.kind == "int8"), 2), ids=lambda v: v.name)
def test_shipped_8_bit_attention_has_the_bits_of_its_definition(variant: Variant, monkeypatch) -> None:
    """The definition takes the exp2 and log2 of this machine."""
    for name in ("exp2", "log2"):
        wide = getattr(torch, name)
        monkeypatch.setattr(int8_definition, name, lambda x, wide=wide: wide(x.double()).float())
    (query, key, value, _), options = _of(variant, variant.geometry.rows // 2 + 5, variant.geometry.cols + 9).build()
    value = value + 0.5
    value[..., 1::16, :] *= 0.02  # these keep the mean
    call = check_call(query, key + torch.linspace(-3, 3, variant.head_dim).to(key.dtype), value, **options)
    out, lse = empty_output(call).fill_(torch.nan), poisoned(call.out_shape[:-1], FLOAT32)
    plan = plan_call(call, 1, int8=True, arch=variant.arch)
    executed: Counter[str] = Counter()
    machine.execute(int8_launches(call, plan, out, lse), _shipped, lambda wave, i: executed.update([i.name]))
    right = torch.empty_like(out), torch.empty_like(lse)
    int8_definition.compute(call, *right, variant.arch)
    assert plan.forward == variant
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    assert sum(count for name, count in executed.items() if name.startswith("v_dot4")) > 1000


@pytest.mark.parametrize("variant", some(_GGUF, 8), ids=lambda variant: variant.name)
def test_shipped_products_with_gguf_weights_have_the_bits_of_their_definition(variant: GgufLinearVariant) -> None:
    """The product of many rows, and of few rows by both kernels for them."""
    columns, generator = FORMATS[variant.format].weights * 3, torch.Generator().manual_seed(3)
    for function, rows, dtype in (
        ("pa_gguf_linear", 20, FLOAT32),
        ("pa_gguf_few", 3, FLOAT16),
        ("pa_gguf_some", 5, BFLOAT16),
    ):
        if function not in variant.functions:
            continue
        blocks = verify_linear.sane_blocks(variant.format, 9, columns, generator)
        out = torch.full((rows, 9), torch.nan, dtype=dtype)
        call = GgufLinearCall(torch.randn(rows, columns).to(dtype), blocks, variant.format, torch.randn(9), out)
        machine.execute(gguf_linear_launches(call, variant.rows, function, variant.arch), _shipped)
        assert torch.equal(out, verify_linear.expected_product(call, function).to(dtype))


@pytest.mark.parametrize(("arch", "dtype"), some([("gfx906", FLOAT16), ("gfx1030", FLOAT16)], 2))
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
    launches = packed_launches(forward_launches(call, cases.whole(call, arch), out, lse), packed)
    machine.execute(launches, _shipped)
    finite = [t.nan_to_num() for t in made]
    (_, oracle), (_, similar), _ = definitions(finite, lengths, dtype, **LOWER_RIGHT)
    end = sum(lengths[0])
    assert out[:, :, end:].isnan().all()  # not written
    for own, true, plain_answer, what in zip((out, lse), oracle, similar, ("out", "lse")):
        assert_close(own[:, :, :end], true[:, :, :end], plain_answer[:, :, :end], what, dtype=dtype)


def _unready(instructions: Iterable[Instruction]) -> list[str]:
    """The instructions that read the result of an exponential, logarithm or reciprocal too soon for gfx11: behind up to
    five instructions of vectors, and one of those, and no wait (LLVM, GCNHazardRecognizer, VALUTransUseHazard). Up to
    the next branch."""
    found, recent = [], []
    for i in instructions:
        if "branch" in i.name or i.name == "s_waitcnt_depctr":
            recent = []
        if not i.name.startswith("v_"):
            continue
        parts = i.both or (i,)
        read = {register for part in parts for source in sources(part) for register in registers(source)}
        found += [i.text for written, _, _ in recent if written in read]
        is_slow = bool(re.match(r"v_(exp|log|rcp)", i.name))
        recent = [
            (r, between + 1, slow + is_slow) for r, between, slow in recent if between < 5 and slow + is_slow <= 1
        ]
        if is_slow:
            recent += [(register, 0, 0) for register in registers(i.operands[0])]
    return found


def test_no_instruction_of_gfx11_reads_an_exponential_too_soon() -> None:
    """The compiler waits before its own instructions, not before those that the source writes in assembly."""
    for variant in _EVERY_ONE if EVERY else some([v for v in _EVERY_ONE if v.arch == "gfx1102"], 24):
        if variant.arch == "gfx1102":
            for kernel in kernels(_shipped(variant)).values():
                assert _unready(kernel.instructions) == [], (variant.name, kernel.name)
    lines = ("v_exp_f32 v1, v2", "v_mov_b32 v4, v5", "v_add_f32 v3, v1, v1")
    read = [instruction(*line.split(" ", 1), 0) for line in lines]
    assert _unready(read) == ["v_add_f32 v3, v1, v1"]
    assert _unready([*read[:2], instruction("s_waitcnt_depctr", "0xfff", 0), read[2]]) == []


FLOAT, BOOL = "-inf some rows empty", "bool some rows empty"


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [
        ("gfx906", FLOAT16, 60, FLOAT),
        *((a, *c) for a in ARCHS for c in ((FLOAT32, 60, FLOAT), (FLOAT16, 100, BOOL), (BFLOAT16, 60, FLOAT)) if EVERY),
    ],
)
def test_columns_that_do_not_exist_and_added_masks(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    _check(_case(dtype, dim, 37, 75, mask), arch, _shipped_or_compiled)


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask", "parts"),
    [
        ("gfx1030", FLOAT16, 64, BOOL, False),
        *((arch, FLOAT16, 128, FLOAT, parts) for arch in ARCHS for parts in (False, True) if EVERY),
    ],
)
def test_scores_with_a_cap_and_rows_with_a_sink(
    arch: str, dtype: torch.dtype, dim: int, mask: str, parts: bool
) -> None:
    sizes, sinks = (6, 330) if parts else (37, 75), torch.tensor([0.5, 40.0])
    case = _case(dtype, dim, *sizes, mask, **LOWER_RIGHT, softcap=3.0, sinks=sinks)
    result = _check(case, arch, _shipped_or_compiled, parts=parts)
    assert result.plan.forward.kind == ("capped_split" if parts else "capped")


_GRADIENTS = (FLOAT32, 64, "none"), (FLOAT16, 128, BOOL), (FLOAT16, 60, FLOAT), (BFLOAT16, 64, "none")


@needs_clang
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "mask"),
    [("gfx1030", FLOAT16, 64, "none"), *((arch, *case) for arch in ARCHS for case in _GRADIENTS if EVERY)],
)
def test_gradients_are_those_of_the_definition(arch: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    case = _case(dtype, dim, 37, 70, mask, **LOWER_RIGHT if mask == "none" else {})
    result = _check(case, arch, _shipped_or_compiled)
    cases.check_gradients(result, case, run=machine.execute, code_of=_shipped_or_compiled)


def _with(change: Callable[[MachineKernel], MachineKernel]) -> Callable[..., int]:
    """Executes a launch with its kernel changed."""

    def run(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        return machine.run(launch, change(kernels(_shipped(launch.variant))[launch.function]))

    return run


def _with_code(change: Callable[[Instruction], Instruction]) -> Callable[..., int]:
    return _with(lambda kernel: replace(kernel, instructions=tuple(map(change, kernel.instructions))))


def _without_waiting(counter: str) -> Callable[..., int]:
    return _with_code(lambda i: i._replace(options={n: most for n, most in i.options.items() if n != counter}))


def _without_the_last_key(launches: Iterable[Launch]) -> int:
    (launch,) = launches
    query, key, *rest = launch.keep
    return machine.execute([launch._replace(keep=(query, key[:, :, :-1], *rest))], _shipped)


def _with_fields_swapped(one: str, other: str) -> Callable[..., int]:
    """As if the host's structure had two of them in another order than the code."""

    def run(launches: Iterable[Launch]) -> int:
        (launch,) = launches
        fields = {name: getattr(launch.params, name) for name, _ in launch.params._fields_}
        params = type(launch.params)(**fields | {one: fields[other], other: fields[one]})
        return machine.execute([launch._replace(params=params)], _shipped)

    return run


NOTHING = Instruction("s_nop", (), {}, 0, "s_nop")
OUTCOMES: dict[str, tuple[Callable[..., int], str]] = {
    "unchanged": (_with_code(lambda i: i), "right"),
    "loads not waited for": (_without_waiting("vmcnt"), "wrong"),
    # The parameters are not there, and addresses are made of them.
    "parameters not waited for": (_without_waiting("lgkmcnt"), "OutsideOfMemory"),
    "no barriers": (_with_code(lambda i: NOTHING if i.name == "s_barrier" else i), "wrong"),
    "a word less of shared memory": (_with(lambda k: replace(k, lds_bytes=k.lds_bytes - 4)), "AssertionError"),
    "a key less": (_without_the_last_key, "OutsideOfMemory"),
    **{
        f"{one} and {other}": (_with_fields_swapped(one, other), "")
        for one, other in (("q", "k"), ("v", "o"), ("qh", "qs"), ("lq", "lk"), ("low", "high"), ("scale", "scale_log2"))
    },
}


@pytest.mark.parametrize(
    ("name", "arch"), some(itertools.product(OUTCOMES, ["gfx906", "gfx1030", "gfx1102", "gfx900"]), 9)
)
def test_changed_code_and_changed_parameters_are_noticed(name: str, arch: str) -> None:
    """The result is right, wrong, or the kind of error that an instruction met."""
    run, expected = OUTCOMES[name]
    inputs, options = _case(FLOAT16, 64, 37, 75, **LOWER_RIGHT).build()
    try:
        out, oracle = forward(inputs, options, arch=arch, run=run).out.double(), exact(inputs, options)[0]
        found = "right" if (out - oracle).norm() / oracle.norm() < 1e-3 else "wrong"
    except AssertionError as error:
        found = type(error.__cause__).__name__
    assert found == expected if expected else found != "right"
