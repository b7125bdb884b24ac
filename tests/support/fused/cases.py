"""Calls for the fused kernels on a CPU: run in the emulation, compared with the definition in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call, empty_output
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, forward_variants, plan_call, variants_of
from pascal_attn_core.fused.launch.select import call_reasons

from ..table import TABLE, Case
from .emulation import emulate


@functools.cache
def _reasons_and_splits() -> dict[str, tuple[bool, bool]]:
    found = {}
    for case in TABLE:
        inputs, options = case.build()
        call = check_call(*inputs, **options)
        is_taken = not call_reasons(call)
        found[case.name] = is_taken, is_taken and plan_call(call, 1).splits > 0
    return found


def takes(case: Case) -> bool:
    """Whether the kernels take a call of the table."""
    return _reasons_and_splits()[case.name][0]


def is_split(case: Case) -> bool:
    """Whether they do so by the kernel for few rows, on a card of one multiprocessor."""
    return _reasons_and_splits()[case.name][1]


MANY_SMS = 1000  # as many as make the keys of a call with few rows many parts


@dataclass
class Emulated:
    """The results that the forward kernels wrote; every element was NaN before."""

    call: AttentionCall
    plan: Plan
    out: Tensor
    lse: Tensor
    log_sum: Tensor | None


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def forward(
    inputs: list[Tensor | None],
    options: dict[str, Any],
    *,
    parts: bool = False,
    arch: str = "",
    run: Callable[..., int] = emulate,
    **how: Any,
) -> Emulated:
    """The forward kernels on a call, as one block per tile of rows or with the keys in parts.

    Args:
        arch: AMD's; run: is given the launches, and what else is in ``how``.
    """
    call = check_call(*inputs, **options)  # type: ignore[arg-type]
    out = empty_output(call).fill_(float("nan"))
    lse = poisoned(out.shape[:-1], torch.float32)
    has_bias = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    log_sum = poisoned(lse.shape, torch.float32) if has_bias else None
    plan = whole(call, arch) if not parts else plan_call(call, MANY_SMS, for_grad=True, arch=arch)
    run(forward_launches(call, plan, out, lse, log_sum), **how)
    return Emulated(call, plan, out, lse, log_sum)


def whole(call: AttentionCall, arch: str = "") -> Plan:
    """The plan of a call with one block per tile of rows, gradients and all."""
    variants = variants_of(call, arch)
    return Plan(forward_variants(call, variants)[0], 0, (variants.grad_query, variants.grad_key_value))


def of_kernel(kind: str, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Those gradients of query, key and value that a kind of kernel computes."""
    return list(gradients[:1] if "grad_query" in kind else gradients[1:])


def backward(
    result: Emulated,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    run: Callable[..., int] = emulate,
    only: str = "",
    **how: Any,
) -> list[Tensor]:
    """Gradients of query, key and value by the backward kernels, in the shapes of the inputs.

    Args:
        only: the kind of kernel that is wanted; the other one is not launched, and its gradients are left out.
    """
    call = result.call
    heads = () if call.query.dim() == 2 else (call.num_heads,)
    kv_heads = () if call.query.dim() == 2 else (call.num_kv_heads,)
    dtype = call.query.dtype
    grads = (
        poisoned((*call.batch, *heads, call.seq_len_q, call.head_dim), dtype),
        poisoned((*call.batch, *kv_heads, call.seq_len_kv, call.head_dim), dtype),
        poisoned((*call.batch, *kv_heads, call.seq_len_kv, call.head_dim_v), dtype),
    )
    launches = backward_launches(call, result.plan, grad_out, result.out, result.lse, result.log_sum, grad_lse, grads)
    if only:
        other = "grad_key_value" if "grad_query" in only else "grad_query"
        launches = [launch for launch in launches if other not in launch.function]
    run(launches, **how)
    found = [g.sum_to_size(t.shape) for g, t in zip(grads, (call.query, call.key, call.value))]
    return of_kernel(only, found) if only else found
