"""Calls for the fused kernels on a CPU: run in the emulation, compared with the definition in float64."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call, empty_output
from pascal_attn_core.fused.geometry.amd import RANGES
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, forward_kinds, plain_gradients, plan_call, variant_of
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.fused.launch.tail_rows import TailRows

from ..oracle import assert_attention, assert_gradients
from ..table import TABLE, Case
from ..table import case as case_of
from .emulation import Deadlock, emulate

LOWER_RIGHT: dict[str, Any] = {"is_causal": True, "alignment": "lower_right"}


def sized(
    dtype: torch.dtype,
    dim: int,
    queries: int,
    keys: int,
    mask: str = "none",
    layout: str = "contiguous",
    *,
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    dim_v: int = 0,
    **options: Any,
) -> Case:
    """A case that is named after all of this. heads: of query, and of key and value."""
    words = f"{dtype}, {queries} x {keys} x {dim}, {mask}, {layout}".removeprefix("torch.")
    name = ", ".join([words, *(f"{name} {value}" for name, value in options.items())])
    sizes = (*heads, queries, keys, dim, dim_v)
    return case_of(name, *sizes, batch=(batch,), dtype=dtype, mask=mask, layout=layout, options=options)


@functools.cache
def _plans() -> dict[str, Plan | None]:
    """The plans of the table's calls on a card of one multiprocessor; None: not taken."""
    calls = {case.name: check_call(*inputs, **options) for case in TABLE for inputs, options in (case.build(),)}
    return {name: None if call_reasons(call) else plan_call(call, 1) for name, call in calls.items()}


def takes(case: Case) -> bool:
    """Whether the kernels take a call of the table."""
    return _plans()[case.name] is not None


def is_split(case: Case) -> bool:
    """Whether they do so by the kernel for few rows, on a card of one multiprocessor."""
    plan = _plans()[case.name]
    return plan is not None and plan.splits > 0


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
    plan: Plan | None = None,
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
    if plan is None:
        plan = whole(call, arch) if not parts else plan_call(call, MANY_SMS, for_grad=True, arch=arch)
    run(forward_launches(call, plan, out, lse, log_sum), **how)
    return Emulated(call, plan, out, lse, log_sum)


def check_forward(case: Case, **how: Any) -> Emulated:
    """Check that output and lse are as close to the definition as ``oracle`` asks; ``how``: of :func:`forward`."""
    inputs, options = case.build()
    result = forward(inputs, options, **how)
    assert_attention(result.out, result.lse, inputs, options, case.dtype)
    return result


def check_gradients(result: Emulated, case: Case, *, with_lse: bool = False, **how: Any) -> None:
    """Check the gradients as :func:`check_forward` checks the output; ``how``: of :func:`backward`."""
    assert_gradients(functools.partial(backward, result, **how), *case.build(), case.dtype, with_lse=with_lse)


def whole(call: AttentionCall, arch: str = "") -> Plan:
    """The plan of a call with one block per tile of rows, gradients and all."""
    return Plan(variant_of(call, forward_kinds(call)[0], arch), 0, plain_gradients(call, arch))


def check_tail(case: Case, arch: str, ranges: int, **how: Any) -> Emulated:
    """:func:`check_forward` on an AMD card that cuts the keys into so many ranges for all rows but those of the first
    tile."""
    inputs, options = case.build()
    call = check_call(*inputs, **options)
    forward = variant_of(call, "forward", arch)
    tail = TailRows(variant_of(call, RANGES, arch), forward.geometry.rows, ranges)
    return check_forward(case, plan=Plan(forward, tail=tail), **how)


def at_once(result: Emulated) -> Emulated:
    """Return the same results with a plan of one kernel for all gradients."""
    return replace(result, plan=result.plan._replace(gradients=(variant_of(result.call, "grad_all"),)))


Answers = tuple[Sequence[Tensor], Sequence[Tensor]]  # found, expected


def worst_error(runs: Iterable[Callable[[], Answers]], enough: float) -> float:
    """The largest error of what these runs find, as a share of the largest element that was expected; infinite for a
    deadlock or a NaN. A larger one than ``enough`` ends them."""
    worst = 0.0
    for run in runs:
        try:
            found, expected = run()
        except Deadlock:
            return float("inf")
        for one, right in zip(found, expected, strict=True):
            error = (one.double() - right).abs().max() / right.abs().max()
            worst = max(worst, error.nan_to_num(nan=torch.inf).item())
        if worst > enough:
            break
    return worst


def of_kernel(kind: str, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return those gradients of query, key and value that a kind of kernel computes."""
    if "grad_all" in kind:
        return list(gradients)
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
    q_heads, kv_heads = ((), ()) if call.query.dim() == 2 else ((call.num_heads,), (call.num_kv_heads,))
    keys = *call.batch, *kv_heads, call.seq_len_kv
    shapes = (*call.batch, *q_heads, call.seq_len_q, call.head_dim), (*keys, call.head_dim), (*keys, call.head_dim_v)
    grads = tuple(poisoned(shape, call.query.dtype) for shape in shapes)
    launches = backward_launches(call, result.plan, grad_out, result.out, result.lse, result.log_sum, grad_lse, grads)
    if only and "grad_all" not in only:
        other = "grad_key_value" if "grad_query" in only else "grad_query"
        launches = [launch for launch in launches if other not in launch.function]
    run(launches, **how)
    found = [g.sum_to_size(t.shape) for g, t in zip(grads, (call.query, call.key, call.value))]
    return of_kernel(only, found) if only else found
