"""The route ``tiled``: plan, run, remember what ran out of memory, and gradients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..call import AttentionCall
from ..config import AttentionConfig
from ..device import DeviceInfo, device_info
from ..lazy_mask import LazyMask
from ..outputs import TiledOutput, TiledStats
from ..tiled.dropout import draw_seed
from ..tiled.forward import tiled_forward
from ..tiled.gradients import Gradients, sinks_gradient, tiled_backward
from ..tiled.layout import may_read, worth_looking
from ..tiled.plan import plan_call
from ..tiled.tiles import TilePlan
from .first_order import Grads, first_order

log = logging.getLogger("pascal_attn")
T = TypeVar("T")

_PATIENCE = 16  # successful calls of a shape before twice the memory is tried again
_MOST_PATIENCE = 1024
_PAUSE = 60.0  # seconds without a call of a shape after which its next one belongs to another run


@dataclass(slots=True)
class _Cap:
    """What calls of a shape may use after the device ran out of memory with more.

    Attributes:
        most_bytes: of extra memory.
        patience: successful calls between one raise and the next; twice as many each time that a raise was too much.
        left: of those.
        was_raised: since memory ran out last.
        used: when a call of the shape ended last, by the monotonic clock.
    """

    most_bytes: int
    patience: int = _PATIENCE
    left: int = _PATIENCE
    was_raised: bool = False
    used: float = field(default_factory=time.monotonic)


_caps: dict[tuple, _Cap] = {}
_lock = threading.Lock()


def forget_halvings() -> None:
    """Plan every shape with the full budget again: for whoever knows that a new run begins. Without it the budget of a
    shape comes back step by step, and at once after a minute without a call of that shape."""
    with _lock:
        _caps.clear()


def _shape_key(call: AttentionCall, backward: bool) -> tuple:
    return call.query.device, call.query.dtype, call.query.shape, call.key.shape, call.value.shape, backward


def _most_bytes(key: tuple) -> int | None:
    """What calls of this shape may use, None = the whole budget."""
    with _lock:
        cap = _caps.get(key)
        if cap is not None and time.monotonic() - cap.used > _PAUSE:
            del _caps[key]
            return None
    return None if cap is None else cap.most_bytes


def _lower(key: tuple, most_bytes: int) -> None:
    """Memory ran out: calls of this shape take at most so much from now on."""
    with _lock:
        cap = _caps.setdefault(key, _Cap(most_bytes))
        if cap.was_raised:
            cap.patience = min(2 * cap.patience, _MOST_PATIENCE)
        cap.most_bytes, cap.left, cap.was_raised, cap.used = most_bytes, cap.patience, False, time.monotonic()


def _succeeded(key: tuple, full_bytes: int) -> None:
    """A call of this shape went well: after some of them twice as much is allowed, until that is the whole budget."""
    with _lock:
        cap = _caps.get(key)
        if cap is None:
            return
        cap.used = time.monotonic()
        cap.left -= 1
        if cap.left > 0:
            return
        if cap.most_bytes >= full_bytes:
            del _caps[key]
            return
        cap.most_bytes, cap.left, cap.was_raised = 2 * cap.most_bytes, cap.patience, True


def _within_memory(
    call: AttentionCall,
    config: AttentionConfig,
    run: Callable[[TilePlan], T],
    stats: TiledStats,
    *,
    backward: bool = False,
) -> T:
    """``run`` with a plan for this call; when the device runs out of memory, again with half of it."""
    info: DeviceInfo = device_info(call.query.device)
    plan = full = plan_call(call, info, config, backward=backward)
    if _caps:
        plan = _smaller(call, config, info, plan, _most_bytes(_shape_key(call, backward)), backward) or plan
    while True:
        try:
            result = run(plan)
        except torch.cuda.OutOfMemoryError:
            # Half, and a little for what does not shrink with the tile.
            smaller = _smaller(call, config, info, plan, plan.extra_bytes * 17 // 32, backward)
            if smaller is None:
                raise
            _lower(_shape_key(call, backward), smaller.extra_bytes)
            stats.budget_halvings += 1
            sizes = plan.extra_bytes / 2**20, smaller.extra_bytes / 2**20
            shapes = list(call.query.shape), list(call.key.shape)
            log.warning(
                "out of memory with %.2f MiB for query %s, key %s: going on with %.2f MiB", sizes[0], *shapes, sizes[1]
            )
            plan = smaller
        else:
            if _caps:
                _succeeded(_shape_key(call, backward), full.extra_bytes)
            return result


def _smaller(
    call: AttentionCall,
    config: AttentionConfig,
    info: DeviceInfo,
    plan: TilePlan,
    most_bytes: int | None,
    backward: bool,
) -> TilePlan | None:
    """A plan that takes at most ``most_bytes``, or None if there is none below the given one."""
    if most_bytes is None or most_bytes >= plan.extra_bytes:
        return None
    try:
        return plan_call(call, info, config, most_bytes=most_bytes, backward=backward)
    except ValueError:
        return None


class Forward(NamedTuple):
    """out, and what :func:`backward` needs besides the inputs: lse, log_sum (float masks), dropout seed."""

    out: Tensor
    lse: Tensor | None
    log_sum: Tensor | None
    seed: Tensor | None


def forward(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    with_lse: bool = False,
    for_grad: bool = False,
    stats: TiledStats | None = None,
) -> Forward:
    """The call in tiles, without a graph for gradients.

    Raises:
        ValueError: the tile or budget asked for does not suffice, with ``for_grad`` neither for the gradients.
    """
    if for_grad and not (config.q_block is config.kv_block is config.budget_mib is None):
        plan_call(call, device_info(call.query.device), config, backward=True)
    seed = draw_seed(call.query.device) if call.dropout_p else None
    readable = may_read(call)
    softmax = config.softmax if worth_looking(call) else "online"
    stats = TiledStats() if stats is None else stats

    def run(plan: TilePlan) -> TiledOutput:
        return tiled_forward(
            call,
            plan,
            with_lse=with_lse,
            for_grad=for_grad,
            softmax=softmax,
            readable=readable,
            trim_masks=config.trim_masks,
            seed=seed,
            stats=stats,
        )

    return Forward(*_within_memory(call, config, run, stats), seed)


def backward(
    call: AttentionCall,
    config: AttentionConfig,
    grad_out: Tensor,
    saved: Forward,
    *,
    grad_lse: Tensor | None = None,
    wants_mask: bool = False,
) -> Gradients:
    """Gradients of :func:`forward` with ``for_grad=True``."""
    assert saved.lse is not None
    readable, lse = may_read(call), saved.lse

    def run(plan: TilePlan) -> Gradients:
        return tiled_backward(
            call,
            plan,
            grad_out,
            saved.out,
            lse,
            log_sum=saved.log_sum,
            grad_lse=grad_lse,
            seed=saved.seed,
            wants_mask=wants_mask,
            trim_masks=config.trim_masks,
            readable=readable,
        )

    return _within_memory(call, config, run, TiledStats(), backward=True)


class TiledFunction(torch.autograd.Function):
    """``apply(query, key, value, attn_mask, sinks, call, config, stats) -> (out, lse)``; keeps inputs, out and lse."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Tensor | None, *rest: Any
    ) -> Any:
        call, config, stats = rest
        result = forward(call, config, for_grad=True, stats=stats)
        ctx.rule = attn_mask if isinstance(attn_mask, LazyMask) else None
        ctx.save_for_backward(query, key, value, None if ctx.rule is not None else attn_mask, sinks, *result)
        ctx.call, ctx.config = call.without_tensors(), config
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, attn_mask, sinks, *results = ctx.saved_tensors
        call = ctx.call.with_tensors(query, key, value, ctx.rule or attn_mask, sinks)
        saved = Forward(*results)
        wants_mask, wants_sinks = ctx.needs_input_grad[3:5]

        def compute(grad_out: Tensor, grad_lse: Tensor | None) -> Grads:
            grads = backward(call, ctx.config, grad_out, saved, grad_lse=grad_lse, wants_mask=wants_mask)
            grad_sinks = None
            if wants_sinks and saved.lse is not None:
                grad_sinks = sinks_gradient(call, grad_out, saved.out, saved.lse, grad_lse)
            return grads.query, grads.key, grads.value, grads.attn_mask, grad_sinks

        grad_out = torch.zeros_like(saved.out) if grad_out is None else grad_out
        inputs = query, key, value, attn_mask, sinks
        return *first_order(compute, "tiled", grad_out, grad_lse, inputs), None, None, None


def run_tiled(
    call: AttentionCall, config: AttentionConfig, *, with_lse: bool, stats: TiledStats | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None), with gradients where the call needs them."""
    if call.needs_grad:
        return TiledFunction.apply(call.query, call.key, call.value, call.attn_mask, call.sinks, call, config, stats)
    return forward(call, config, with_lse=with_lse, stats=stats)[:2]
