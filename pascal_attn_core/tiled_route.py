"""The route ``tiled``: plan, run, remember what ran out of memory, and gradients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .attention import TiledStats, tiled_forward
from .backward import Gradients, tiled_backward
from .call import AttentionCall
from .config import AttentionConfig
from .device import CPU_LIKE, DeviceInfo, device_info
from .dropout import draw_seed
from .plan import plan_call
from .tiles import TilePlan

log = logging.getLogger("pascal_attn")
T = TypeVar("T")

# How often the budget of a shape was halved because the device ran out of memory; asked for only if any was.
_halvings: dict[tuple, int] = {}
_lock = threading.Lock()


def halvings_of(call: AttentionCall) -> int:
    """How often the budget of calls like this one has been halved."""
    return _halvings.get(_shape_key(call), 0) if _halvings else 0


def forget_halvings() -> None:
    """Plan every shape with the full budget again."""
    with _lock:
        _halvings.clear()


def _shape_key(call: AttentionCall) -> tuple:
    return call.query.device, call.query.dtype, call.query.shape, call.key.shape, call.value.shape


def _within_memory(
    call: AttentionCall, config: AttentionConfig, run: Callable[[TilePlan], T], *, backward: bool = False
) -> T:
    """``run`` with a plan for this call; when the device runs out of memory, again with half the budget."""
    info: DeviceInfo = device_info(call.query.device)
    while True:
        halvings = halvings_of(call)
        plan = plan_call(call, info, config, halvings=halvings, backward=backward)
        try:
            return run(plan)
        except torch.cuda.OutOfMemoryError:
            try:
                smaller = plan_call(call, info, config, halvings=halvings + 1, backward=backward)
            except ValueError:
                raise  # the error of the device, not that of the plan
            with _lock:
                _halvings[_shape_key(call)] = halvings + 1
            log.warning(
                "out of memory with %.1f MiB for query %s, key %s: going on with %.1f MiB",
                plan.extra_bytes / 2**20,
                list(call.query.shape),
                list(call.key.shape),
                smaller.extra_bytes / 2**20,
            )


def may_read(call: AttentionCall) -> bool:
    """Whether values on the call's device may be read by the host now."""
    device = call.query.device
    if device.type == "meta":
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _worth_looking(call: AttentionCall) -> bool:
    """On a GPU a look at the values waits for the device: worth it for large calls only."""
    return call.query.device.type in CPU_LIKE or call.num_scores >= 1 << 26


def forward(
    call: AttentionCall, config: AttentionConfig, *, with_lse: bool, stats: TiledStats | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse or None, dropout seed or None), without a graph for gradients."""
    seed = draw_seed(call.query.device) if call.dropout_p else None
    readable = may_read(call)
    softmax = config.softmax if _worth_looking(call) else "online"

    def run(plan: TilePlan) -> tuple[Tensor, Tensor | None]:
        return tiled_forward(
            call,
            plan,
            with_lse=with_lse,
            softmax=softmax,
            readable=readable,
            trim_masks=config.trim_masks,
            seed=seed,
            stats=stats,
        )

    return *_within_memory(call, config, run), seed


def backward(
    call: AttentionCall,
    config: AttentionConfig,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    seed: Tensor | None = None,
    wants_mask: bool = False,
) -> Gradients:
    """Gradients of :func:`forward`."""
    readable = may_read(call)

    def run(plan: TilePlan) -> Gradients:
        return tiled_backward(
            call,
            plan,
            grad_out,
            out,
            lse,
            grad_lse=grad_lse,
            seed=seed,
            wants_mask=wants_mask,
            trim_masks=config.trim_masks,
            readable=readable,
        )

    return _within_memory(call, config, run, backward=True)


class TiledFunction(torch.autograd.Function):
    """``apply(query, key, value, attn_mask, call, config, stats) -> (out, lse)``; keeps the inputs, out and lse."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *rest: Any) -> Any:
        call, config, stats = rest
        out, lse, seed = forward(call, config, with_lse=True, stats=stats)
        ctx.save_for_backward(query, key, value, attn_mask, out, lse, seed)
        ctx.call, ctx.config = call.without_tensors(), config
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients must be taken with route='math', got a tiled call; "
                "pass config=AttentionConfig(route='math', math_limit_mib=...)"
            )
        query, key, value, attn_mask, out, lse, seed = ctx.saved_tensors
        call = ctx.call.with_tensors(query, key, value, attn_mask)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = backward(
            call,
            ctx.config,
            grad_out,
            out,
            lse,
            grad_lse=grad_lse,
            seed=seed,
            wants_mask=ctx.needs_input_grad[3],
        )
        return grads.query, grads.key, grads.value, grads.attn_mask, None, None, None


def run_tiled(
    call: AttentionCall, config: AttentionConfig, *, with_lse: bool, stats: TiledStats | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None), with gradients where the call needs them."""
    if call.needs_grad:
        return TiledFunction.apply(call.query, call.key, call.value, call.attn_mask, call, config, stats)
    return forward(call, config, with_lse=with_lse, stats=stats)[:2]
