"""Machine code, executed on a CPU by the interpreter of its maker's instructions: on the call with which a card checks
a kernel before its first use."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pascal_attn_core.call import AttentionCall
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.reference.checks import Gap, gap

from ..amd import machine as amd
from ..nvidia import machine as nvidia
from .memory import far, lse_too
from .modes import deterministic

_RANGES = 7  # of keys. What 3 and 5 divide comes out right by other words of their reciprocals, too
CPU = torch.device("cpu")
CodeOf = Callable[[Compilation], bytes]


def largest_error(variant: Compilation, code_of: CodeOf, **how: Any) -> float:
    """Return what ``verify.largest_error`` finds; new memory holds NaN. how: options of the interpreter.

    Raises:
        AssertionError: an instruction met an error.
    """
    execute = amd.execute if variant.arch else nvidia.execute
    with deterministic(), torch.no_grad(), mock.patch.object(verify, "gap", _gap_of(variant)):
        return verify.largest_error(variant, CPU, lambda launches: execute(launches, code_of, **how))


def _gap_of(variant: Compilation) -> Callable[[Tensor, Tensor], Gap]:
    """The distance relative to the largest number of each row, of gradients of each head: rows with many keys have
    smaller numbers than those with few."""
    axes = (-2, -1) if variant.traits.is_gradient else (-1,)

    def of_each(found: Tensor, right: Tensor) -> Gap:
        sizes = right.abs().amax(axes, keepdim=True)
        sizes[sizes == 0] = 1
        return gap(found / sizes, right / sizes)

    return of_each


def largest_error_far(variant: Compilation, code_of: CodeOf, **how: Any) -> float:
    """Return that of a larger call with strides far beyond 2^31 bytes, see :func:`_larger` and :func:`_many_keys`; and
    of lse where a kernel gives it."""
    execute = amd.execute if variant.arch else nvidia.execute
    calls: list[AttentionCall] = []

    def sample_call(*given: Any, original: Callable[..., AttentionCall] = verify.sample_call) -> AttentionCall:
        calls.append(_larger(variant, original(*given)))
        return calls[-1]

    def splits(*given: Any, original: Callable[..., int] = verify._splits) -> int:
        return original(*given) and max(_RANGES, original(*given))

    changed = {"sample_call": sample_call, "_splits": splits, "gap": _gap_of(variant), "RANGES": (1,)}
    with deterministic(), torch.no_grad(), mock.patch.multiple(verify, **changed), lse_too() as found:
        run: verify.Run = lambda launches: execute(map(far, launches), code_of, **how)  # noqa: E731
        error = verify.largest_error(variant, CPU, run, _many_keys(variant))
    for lse in found:
        assert not lse.isnan().any(), "no lse"
        right = torch.cat([verify._reference(part)[1] for part in verify._sequences(variant, calls[0])[1]], dim=-1)
        error = max(error, gap(lse, right).relative)
    return error


def _many_keys(variant: Compilation) -> int | None:
    """So many that the first row attends to two tiles and a part of the third; a tile for each range of keys, and some
    more, where they are cut."""
    if not isinstance(variant, Variant):
        return None
    rows, cols = variant.geometry.rows, variant.geometry.cols
    return (_RANGES - 1) * cols + 9 if variant.cuts_keys else rows + 2 * cols + 9


def _larger(variant: Variant, call: AttentionCall) -> AttentionCall:
    """Two batch elements and two key heads (for gradients one); for few rows nine, of so many heads that they fill
    several tiles in part. Of kernels with sequences or a list of blocks what it was. Half of the heads have peaks."""
    if not (variant.is_even or variant.traits.is_packed):
        of_rows, heads, key_heads = (3, 60, 2) if variant.is_small else (1, 2, 1 if variant.is_gradient else 2)
        query = _copies(_copies(call.query, of_rows, 2), heads // 2, 1)
        key, value = _copies(call.key, key_heads, 1), _copies(call.value, key_heads, 1)
        query, key, value = (torch.cat([t, t.flip(-1)]) for t in (query, key, value))
        mask, sinks, rows = call.attn_mask, call.sinks, query.shape[2]
        if mask is not None:
            mask = _copies(_copies(mask, of_rows, 0)[None, None], 2, 0)
            mask = _copies(mask, heads, 1)
        if sinks is not None:
            sinks = sinks.repeat(heads // 2)
        call = replace(
            call, query=query, key=key, value=value, attn_mask=mask, sinks=sinks, batch=(2,), num_heads=heads,
            num_kv_heads=key_heads, seq_len_q=rows, offset=call.seq_len_kv - rows,
        )  # fmt: skip
    return call if variant.is_gradient else _with_peaks(variant, call)


def _copies(tensor: Tensor, count: int, axis: int) -> Tensor:
    """So many along an axis, which differ."""
    return torch.cat([tensor.roll(n, -1) for n in range(count)], axis)


def _with_peaks(variant: Variant, call: AttentionCall) -> AttentionCall:
    """Each query of every second head is a large multiple of one of the keys that it may attend to. Then a row that
    loses its largest score, or rescales its sums by a wrong one, has another key's value, or none."""
    rows, keys = torch.arange(call.seq_len_q)[:, None], torch.arange(call.seq_len_kv)
    allowed = keys <= rows + call.offset
    if variant.traits.is_packed:
        allowed = allowed & ((rows < rows[-9]) == (keys < keys[-9]))
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        allowed = allowed & call.attn_mask
    chances = torch.rand((*call.out_shape[:-1], call.seq_len_kv), generator=torch.Generator().manual_seed(2))
    peak = (chances * allowed).argmax(-1)[..., None].expand(*call.query.shape)
    peaks = call.key.repeat_interleave(call.groups, 1).gather(2, peak) * math.copysign(64, call.scale)
    query = call.query.clone()
    query[:, 1::2] = peaks[:, 1::2]
    return replace(call, query=query)


_INT8 = 1e-3  # a probability that another exp2 rounds the other way moves by 1/255


def limit(variant: Compilation) -> float:
    """The largest error of a kernel that is right: far below what a card may have, whose exponentials are not exact.
    Results of 16 bits are rounded once; sums of float32 numbers are some roundings off."""
    eps = torch.finfo(getattr(torch, variant.dtype)).eps
    is_int8 = isinstance(variant, Variant) and variant.kind == "int8"
    return max(50 * eps if variant.dtype == "float32" else eps, _INT8 * is_int8)


class Result(NamedTuple):
    """error: as a share of the :func:`limit`, infinite where an instruction met an error; problem: which; seconds: of a
    processor."""

    error: float
    seconds: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= 1


def _cpu_seconds() -> float:
    """Return the time of this process and of the disassembler."""
    return sum(os.times()[:4])


def result(variant: Compilation, code_of: CodeOf, **how: Any) -> Result:
    """Execute a variant's sample call and, if that was right, the one with strides that are far beyond 2^31 bytes."""
    begin, error, problem = _cpu_seconds(), 0.0, ""
    try:
        for error_of in (largest_error, largest_error_far):
            error = max(error, error_of(variant, code_of, **how) / limit(variant))
            if error > 1:
                break
    except (AssertionError, NotImplementedError) as failure:
        error, problem = float("inf"), str(failure)
    return Result(error, _cpu_seconds() - begin, problem)
