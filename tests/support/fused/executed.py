"""Machine code, executed on a CPU by the interpreter of its maker's instructions: on the call with which a card checks
a kernel before its first use."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from pascal_attn_core.call import AttentionCall
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.reference.checks import gap

from ..amd import machine as amd
from ..nvidia import machine as nvidia
from .memory import far, with_lse
from .modes import deterministic

CPU = torch.device("cpu")
CodeOf = Callable[[Compilation], bytes]


def largest_error(variant: Compilation, code_of: CodeOf, **how: Any) -> float:
    """Return what ``verify.largest_error`` finds; new memory holds NaN. how: options of the interpreter.

    Raises:
        AssertionError: an instruction met an error.
    """
    execute = amd.execute if variant.arch else nvidia.execute
    with deterministic(), torch.no_grad():
        return verify.largest_error(variant, CPU, lambda launches: execute(launches, code_of, **how))


def largest_error_far(variant: Compilation, code_of: CodeOf, **how: Any) -> float:
    """Return that of a larger call where a kernel has no list of blocks or sequences, with strides far beyond 2^31
    bytes, and with five ranges of keys where they are cut; and of lse where a kernel gives it."""
    execute = amd.execute if variant.arch else nvidia.execute
    calls: list[AttentionCall] = []
    lse = torch.empty(0)

    def sample_call(*given: Any, original: Callable[..., AttentionCall] = verify.sample_call) -> AttentionCall:
        call = original(*given)
        calls.append(call if variant.is_even or variant.traits.is_packed else _larger(variant, call))
        return calls[-1]

    def run(launches: list[Launch]) -> None:
        nonlocal lse
        if calls and not (variant.is_gradient or variant.kind == "int8"):  # of which lse is looked at anyway
            lse = torch.full(calls[0].out_shape[:-1], torch.nan)
            launches = [with_lse(launch, lse) for launch in launches]
        execute(map(far, launches), code_of, **how)

    def splits(*given: Any, original: Callable[..., int] = verify._splits) -> int:
        return original(*given) and max(5, original(*given))

    with deterministic(), torch.no_grad(), mock.patch.multiple(verify, sample_call=sample_call, _splits=splits):
        error = verify.largest_error(variant, CPU, run)
        if not lse.numel():
            return error
        parts = verify._sequences(variant, calls[0])[1]
        right = torch.cat([verify._reference(part)[1] for part in parts], dim=-1)
        assert not lse.isnan().any(), "no lse"
        return max(error, gap(lse, right).relative)


def _larger(variant: Variant, call: AttentionCall) -> AttentionCall:
    """Two batch elements, scores that grow with the keys, and many heads where a tile holds the rows of several."""
    heads = 64 if variant.is_small else 2
    query = torch.cat([call.query.roll(n, -1) for n in range(heads // 2)], 1)
    key = (call.key * torch.linspace(0.1, 8, call.seq_len_kv)[:, None]).to(call.key)
    query, key, value = (torch.cat([t, t.flip(-1)]) for t in (query, key, call.value))
    mask = call.attn_mask
    if mask is not None:
        mask = torch.stack([mask.roll(n, -1) for n in range(2 * heads)]).unflatten(0, (2, heads))
    return replace(call, query=query, key=key, value=value, attn_mask=mask, batch=(2,), num_heads=heads)


_INT8 = 1e-3  # a probability that another exp2 rounds the other way moves by 1/255


def limit(variant: Compilation) -> float:
    """The largest error of a kernel that is right: far below what a card may have, whose exponentials are not exact.
    Results of 16 bits are rounded once; sums of float32 numbers are some roundings off."""
    eps = torch.finfo(getattr(torch, variant.dtype)).eps
    is_int8 = isinstance(variant, Variant) and variant.kind == "int8"
    return max(100 * eps if variant.dtype == "float32" else eps, _INT8 * is_int8)


class Result(NamedTuple):
    """error: as a share of the :func:`limit`, infinite where an instruction met an error; problem: which."""

    error: float
    seconds: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= 1


def result(variant: Compilation, code_of: CodeOf, **how: Any) -> Result:
    """Execute a variant's sample call, and the one with strides that are far beyond 2^31 bytes."""
    begin, problem = time.perf_counter(), ""
    try:
        errors = [of(variant, code_of, **how) for of in (largest_error, largest_error_far)]
        error = max(errors) / limit(variant)
    except (AssertionError, NotImplementedError) as failure:
        error, problem = float("inf"), str(failure)
    return Result(error, time.perf_counter() - begin, problem)
