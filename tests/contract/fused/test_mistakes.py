"""The emulation notices the loss of a barrier, counter or shuffle; other mistakes are in ``tools/mutants.txt``."""

import functools
import re
from collections.abc import Iterator

import pytest
import torch
from attn_support.fused.cases import Answers, at_once, backward, forward, of_kernel, sized, worst_error
from attn_support.fused.emulation import LeftOut, each_left_out, emulate
from attn_support.oracle import cast, exact, gradients
from attn_support.randomness import some, times
from torch import Tensor

from pascal_attn_core.call import check_call, empty_output
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan
from pascal_attn_core.reference import reference_sdpa

FLOAT32, FLOAT16 = torch.float32, torch.float16
WRONG = 1e-2
Text = str | LeftOut | None  # in place of a kernel's source; None: its own
# The shuffles after it meet the warp too, but order no memory: on a CPU it cannot be missed. The two others are looked
# at in test_grad_all.py.
_UNSEEN = re.compile("flushed_max is complete|its turn has come|its sums are there")
# head_dim, queries, keys: between them they notice every barrier of a kernel.
_SENSITIVE: dict[tuple[str, str, torch.dtype], tuple[tuple[int, int, int], ...]] = {
    ("forward", "NVIDIA", FLOAT32): ((64, 130, 200), (40, 70, 1300), (128, 70, 1024), (512, 70, 1300)),
    ("grad_query", "NVIDIA", FLOAT32): ((64, 70, 200), (72, 70, 330)),
    ("grad_key_value", "NVIDIA", FLOAT32): ((64, 200, 70), (72, 330, 70)),
    ("grad_all", "NVIDIA", FLOAT32): ((64, 130, 70), (40, 130, 70), (128, 140, 70)),
    ("forward", "AMD", FLOAT16): ((64, 130, 330), (40, 130, 330), (512, 70, 330)),
    ("forward", "AMD", FLOAT32): ((64, 130, 330), (40, 70, 1300), (512, 70, 1300)),
    **dict.fromkeys((("grad_query", "AMD", FLOAT16), ("grad_query", "AMD", FLOAT32)), ((64, 70, 200), (40, 70, 330))),
    ("grad_key_value", "AMD", FLOAT16): ((64, 200, 70), (40, 330, 70)),
    ("grad_key_value", "AMD", FLOAT32): ((64, 200, 70), (72, 330, 70)),  # at 40 chunks are so small that none overlap
}
Kernel = tuple[str, str, torch.dtype]  # kind, AMD's arch, dtype


@functools.cache
def _sample(kernel: Kernel, dim: int, queries: int, keys: int):
    """(inputs, options, gradient of the output, what the forward kernel gives where it is not looked at, expected)"""
    kind, arch, dtype = kernel
    is_all = kind == "grad_all"
    inputs, options = sized(dtype, dim, queries, keys, heads=(4, 2) if is_all else (1, 1), is_causal=is_all).build()
    inputs[1] = (inputs[1] * torch.linspace(0.1, 4, keys)[:, None]).to(dtype)
    wide = [cast(t, torch.float64).requires_grad_() for t in inputs[:3]]
    out = reference_sdpa(*wide, **options)[0]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if kind == "forward":
        return inputs, options, grad_out, None, [out.detach()]
    result = forward(inputs, options, arch=arch)
    expected = of_kernel(kind, gradients(out, wide, grad_out.double()))
    return inputs, options, grad_out, at_once(result) if is_all else result, expected


def _run(kernel: Kernel, text: Text, sizes: tuple[int, int, int]) -> Answers:
    kind, arch, _ = kernel
    inputs, options, grad_out, result, expected = _sample(kernel, *sizes)
    if result is None:
        return [forward(inputs, options, arch=arch, mutated={kind: text}).out], expected
    return backward(result, grad_out, mutated={kind: text}, only=kind), expected


def _worst(kernel: Kernel, text: Text) -> float:
    kind, arch, dtype = kernel
    sensitive = _SENSITIVE[kind, "AMD" if arch else "NVIDIA", dtype]
    return worst_error([functools.partial(_run, kernel, text, sizes) for sizes in sensitive], WRONG)


_PLAIN = [(kind, "", FLOAT32) for kind in ("forward", "grad_query", "grad_key_value", "grad_all")]
# Each kind with waves of 64 lanes and of 32, once with pairs of float16: by day one, all of them and more every night.
_AMD = [
    ("forward", "gfx906", FLOAT16),
    ("forward", "gfx1030", FLOAT32),
    ("grad_query", "gfx1030", FLOAT16),
    ("grad_query", "gfx906", FLOAT32),
    ("grad_key_value", "gfx906", FLOAT16),
    ("grad_key_value", "gfx1030", FLOAT32),
]
_OTHERS = [(kind, {"gfx906": "gfx1030"}.get(arch, "gfx906"), dtype) for kind, arch, dtype in _AMD]


@pytest.mark.parametrize(
    "kernel",
    [*some(_PLAIN, 2), *(pytest.param(k, marks=pytest.mark.slow) for k in some(_AMD, 6) + _OTHERS * (times(1) > 1))],
    ids=str,
)
def test_a_kernel_without_any_one_barrier_is_wrong(kernel: Kernel) -> None:
    kind, _, dtype = kernel
    text = source(kind)
    mutants = list(each_left_out(text, re.compile(r"__sync(?:threads|warp)\(\);").finditer(text)))
    assert _worst(kernel, mutants[0][0]._replace(place=-1)) < (1e-3 if dtype == FLOAT32 else 5e-3)
    for mutant, line in mutants:
        if not _UNSEEN.search(line):
            # __syncwarp stands where float32 sums move only.
            is_there = dtype == FLOAT32 or "__syncwarp" not in line
            assert (_worst(kernel, mutant) > WRONG) == is_there, line


def test_a_barrier_that_some_threads_miss_is_a_deadlock() -> None:
    text = source("forward").replace("if (more) __syncthreads();", "if (more && t.ty) __syncthreads();")
    assert _worst(("forward", "", FLOAT32), text) == float("inf")


# With counters; with a barrier for each tile and Q in several rounds; with words of a mask that lanes exchange.
TURING = [
    Variant("tensor", 64, "float16"),
    Variant("tensor", 128, "float16", padded=True),
    Variant("tensor", 128, "float16", "bool"),
    Variant("tensor", 64, "float16", "float"),
]
VOLTA = [Variant("volta", 64, "float16"), Variant("volta", 128, "float16", "bool")]
# Of both generations; with Q in one round and in two.
WMMA = [Variant("wmma", 64, "float16", "bool", arch="gfx1102"), Variant("wmma", 128, "float16", arch="gfx1201")]
VARIANTS = {"tensor": TURING, "volta": VOLTA, "wmma": WMMA}
_WAITS = re.compile(r"__syncthreads\(\);|WAIT_FOR\([01], tiles\);|SIGNAL\([01], tiles[^;]*;")
# And what each gives where it does not take place.
_SHUFFLES = {
    "__shfl_sync(FULL_WARP, m.word[w], row_in_warp(t, r))": "m.word[w]",
    "x += __shfl_xor_sync(FULL_WARP, x, 1 << bit)": "x += x",
    "fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1 << bit))": "x",
    "__shfl_xor_sync(FULL_WARP, lower ? pairs[2 * m][0] : pairs[2 * m + 1][0], 2)": "mine",
    "__shfl_xor_sync(FULL_WARP, P.x[m][n][x], 4)": "P.x[m][n][x]",
    "float_to_bits(other_half(bits_to_float(pairs[r][x])))": "pairs[r][x]",
}


@functools.cache
def _tensor_sample(variant: Variant) -> tuple[list[Tensor | None], Tensor]:
    mask = {"none": "none", "bool": "bool [L, S]", "float": "-inf some rows empty"}[variant.mask]
    inputs, _ = sized(FLOAT16, variant.head_dim, 140, 400, mask, heads=(1, 1)).build()
    inputs[1] = (inputs[1] * (torch.linspace(-3, 3, 400).abs() + 0.1)[:, None]).half()  # the ends weigh alike
    return inputs, exact(inputs, {})[0]


def _run_tensor(variant: Variant, text: Text, seed: int) -> Answers:
    inputs, expected = _tensor_sample(variant)
    call = check_call(*inputs)
    out = empty_output(call).fill_(float("nan"))
    emulate(forward_launches(call, Plan(variant), out), seed=seed, mutated={variant.kind: text})
    return [out], [expected]


def _worst_of_generation(generation: str, text: Text) -> float:
    """Several times, since warps run as chance has it."""
    runs = [functools.partial(_run_tensor, v, text, seed) for seed in (1, 2, 3) for v in VARIANTS[generation]]
    return worst_error(runs, WRONG)


def _mistakes(generation: str) -> Iterator[tuple[Text, str]]:
    """The sources with one of these left out, and what it was."""
    text = source(generation)
    waits = list(each_left_out(text, _WAITS.finditer(text)))
    assert len(waits) == 9
    for mutant, line in waits:
        # Only Turing's kernels have counters, and Volta's one round of Q.
        if generation == "tensor" or not re.search(
            r"\([01], tiles|round > 0" if generation == "volta" else r"\([01], t", line
        ):
            yield mutant, line
    places = [words for words in _SHUFFLES if words in text]
    shuffles = [line for line in text.splitlines() if re.search("__shfl|other_half", line) and line[0] == " "]
    assert len(places) == len(shuffles) == {"tensor": 3, "volta": 5, "wmma": 4}[generation]
    for words in some(places, 4):
        yield text.replace(words, _SHUFFLES[words]), words


@pytest.mark.parametrize("generation", some(VARIANTS, 3))
def test_a_kernel_without_any_one_barrier_counter_or_shuffle_is_wrong(generation: str) -> None:
    assert _worst_of_generation(generation, None) < 3e-3
    for mutant, line in _mistakes(generation):
        assert _worst_of_generation(generation, mutant) > WRONG, line
