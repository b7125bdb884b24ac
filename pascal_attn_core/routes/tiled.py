"""The route ``tiled``: plan a kind of call once, run, and with less memory once more when the device runs out of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, TiledStats, Wanted, distinct
from ..call.flex_rules import BlockRule
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig, log_once
from ..fused.code.source import HEAD_DIMS
from ..fused.launch.plan import FEW_QUERIES
from ..machine.device import CPU_LIKE, MIB
from ..machine.out_of_memory import out_of_memory
from ..machine.runtime import Runtime, runtime_of, runtimes
from ..tiled.dropout import draw_seed
from ..tiled.forward import tiled_forward
from ..tiled.gradients import tiled_backward
from ..tiled.layout import is_padding
from ..tiled.plan import Walk, plan_call
from ..tiled.rule_bytes import rule_bytes
from ..tiled.tangents import tiled_along
from .route import Choice, Request, Route
from .timing import Timings
from .torch_kernel import TorchForm

log = logging.getLogger("pascal_attn")
T = TypeVar("T")
_TRANSFORMS = "transforms of torch.func (grad, vmap, ...) are active, which do not see into a score_mod"

# A call of several queries with so few scores per batch element is not worth the question which tiles are fastest.
_SHORT_SCORES = 1 << 18
_CAP_SECONDS = 60.0  # after which the whole budget of a shape that ran out of memory is tried again


class TiledRoute(Route):
    """Tiles of plain PyTorch operators: takes every call that no route before it claims. The reasons of ``torch_route``
    say why the call came here."""

    name = "tiled"

    def __init__(self, torch_route: Route | None = None):
        self.torch_route = torch_route

    def plan(self, request: Request) -> list[str] | None:
        if torch._C._are_functorch_transforms_active() and request.call.score_rule is not None:
            return [_TRANSFORMS]
        return None

    def for_parts(self, call: AttentionCall, config: AttentionConfig, plan: None = None) -> Walk | list[str]:
        mask: Any = call.attn_mask
        is_bias = call.has_bias and isinstance(mask, Tensor)
        if is_bias and is_padding(mask) and math.prod(distinct(mask).shape[:-2]) > 1:
            return ["whether its float mask is padding is decided for all heads together"]
        walk = runtime_of(call.query.device).part(Walks).of(call, config)
        if walk.tiles.units > 1:
            return ["several heads share a step of the tiles: the call is short"]
        return walk

    def claim(self, request: Request) -> Choice | None:
        plan = request.plan(self)
        if isinstance(plan, list):
            return None
        reasons = request.plan(self.torch_route) if self.torch_route is not None else None
        if not isinstance(reasons, list):
            return Choice(self, "no earlier route takes the call", plan)
        if not request.with_lse:
            where = request.call.query.device.type
            # Without a fused kernel to hope for there is nothing to warn of.
            level = logging.INFO if where == "cpu" else logging.WARNING
            log_once(level, "on %s some attention calls run in tiles of plain PyTorch: %s", where, reasons[0])
        return Choice(self, "; ".join([reasons[0], *request.remarks]), plan, torch_stores=True)

    def claims_gradients(self, request: Request) -> bool:
        return not isinstance(request.plan(self), list)

    def forward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Walk | None = None,
        *,
        with_lse: bool = False,
        for_grad: bool = False,
        stats: TiledStats | None = None,
    ) -> Results:
        """Raises ValueError if the given tile or budget does not suffice, with ``for_grad`` also for the gradients."""
        if for_grad and not (config.q_block is config.kv_block is config.budget_mib is None):
            runtime_of(call.query.device).part(Walks).of(call, config, backward=True)
        call, config = _with_mask_per_head(call, config, backward=False)
        seed = draw_seed(call.query.device) if call.dropout_p else None
        stats = TiledStats() if stats is None else stats

        def run(walk: Walk) -> Results:
            return tiled_forward(call, walk, config, with_lse=with_lse, for_grad=for_grad, seed=seed, stats=stats)

        return _within_memory(call, config, run, stats, whole=plan)

    def backward(
        self, call: AttentionCall, config: AttentionConfig, plan: Walk | None, saved: Results, wanted: Wanted
    ) -> Gradients:
        call, config = _with_mask_per_head(call, config, backward=True)
        run = functools.partial(tiled_backward, call, saved=saved, wanted=wanted, trim_masks=config.trim_masks)
        return _within_memory(call, config, run, TiledStats(), backward=True)

    def along(self, call: AttentionCall, config: AttentionConfig, wanted: Wanted | None, **given: Any) -> Any:
        """:func:`..tiled.tangents.tiled_along`."""
        if wanted is not None:
            budget = config.budget_mib or runtime_of(call.query.device).info.default_budget_bytes(backward=True) / MIB
            config = replace(config, budget_mib=budget / 2)
        run = functools.partial(tiled_along, call, wanted=wanted, trim_masks=config.trim_masks, **given)
        return _within_memory(call, config, run, TiledStats(), backward=True)


class Rewritten(Route):
    """Claims calls on a GPU that torch's kernel takes in another form and in several calls: in tiles, where these were
    timed as faster. Where nothing is timed, a few queries go in tiles: one such call is slower than a product."""

    def __init__(self, torch_route: Route, tiles: TiledRoute):
        self.torch_route, self.tiles = torch_route, tiles

    def claim(self, request: Request) -> Choice | None:
        call, form = request.call, request.plan(self.torch_route)
        if not isinstance(form, TorchForm) or form.is_one_call or call.query.device.type in CPU_LIKE:
            return None
        if isinstance(request.plan(self.tiles), list) or max(call.head_dim, call.head_dim_v) > HEAD_DIMS[-1]:
            return None
        ratio = request.runtime.part(Timings).tiled_over_torch(self.tiles, call, request.budget_bytes)
        if ratio is None:
            is_faster, why = call.groups * call.seq_len_q <= FEW_QUERIES and not call.needs_grad, "it has few queries"
        else:
            is_faster, why = ratio < 1, f"timed on this card at {ratio:.2f} of the time of {form.kernel}"
        if is_faster:
            over_torch, stores = form.over_torch(ratio), form.torch_stores
            return Choice(self.tiles, f"{why} ({form.words()})", over_torch=over_torch, torch_stores=stores)
        if ratio is not None:
            request.remarks.append(f"tiles were {why}")
        return None


def _with_mask_per_head(
    call: AttentionCall, config: AttentionConfig, *, backward: bool
) -> tuple[AttentionCall, AttentionConfig]:
    """A call of many short sequences whose mask has one row for each, with this row repeated for every head: then all
    heads of all sequences are units of one dimension. Also the configuration with the rest of the budget. Both are
    returned as they are where tiles or budget are given, or an eighth of the default budget does not hold the mask."""
    mask, scores = call.attn_mask, call.num_heads * call.seq_len_q * call.seq_len_kv
    if not isinstance(mask, Tensor) or mask.dim() < 4 or scores > _SHORT_SCORES or call.needs_mask_grad:
        return call, config
    row = distinct(mask)
    is_shared = row.shape[-3:-1] == (1, 1) and call.num_heads > 1 and math.prod(row.shape[:-3]) > 1
    if not is_shared or not config.q_block is config.kv_block is config.budget_mib is None:
        return call, config
    shape = (*call.batch, call.num_heads, 1, row.shape[-1])
    budget = runtime_of(call.query.device).info.default_budget_bytes(backward=backward)
    left = budget - math.prod(shape) * row.itemsize
    if left < budget * 7 // 8:
        return call, config
    return replace(call, attn_mask=row.expand(shape).contiguous()), replace(config, budget_mib=left / MIB)


# ---- plans -----------------------------------------------------------------------------------------------------------

_MOST_KINDS = 512
_MOST_RANGES = 4096  # of a walk that is kept; a call with more of them takes far longer than planning it again


class Walks:
    """How calls of each kind are walked on one device, worked out at the first of them. No tensor is kept."""

    def __init__(self, runtime: Runtime):
        self._info = runtime.info
        self._walks: dict[tuple, Walk] = {}

    def of(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        *,
        most_bytes: int | None = None,
        backward: bool = False,
        whole: Walk | None = None,
    ) -> Walk:
        """
        Args:
            most_bytes: of extra memory, if that is less than the budget.
            whole: for a part of a call, the walk of the whole: with its tiles a row has the bits of the whole.
        Raises:
            ValueError: the budget does not suffice.
        """
        is_traced = torch._C._get_tracing_state() is not None  # then sizes are tensors
        kind = None if is_traced else _kind(call, config, backward, most_bytes, whole)
        walk = None if kind is None else self._walks.get(kind)
        if walk is None:
            if whole is not None:
                walk = replace(Walk.of(call, whole.tiles), may_bound=whole.may_bound)
            else:
                walk = Walk.of(call, plan_call(call, self._info, config, most_bytes=most_bytes, backward=backward))
            if kind is not None and len(walk.q_ranges) + len(walk.key_ranges) + len(walk.spans) <= _MOST_RANGES:
                if len(self._walks) >= _MOST_KINDS:
                    self._walks.clear()
                self._walks[kind] = walk
        return walk


def _kind(call: AttentionCall, config: AttentionConfig, backward: bool, *asked: Any) -> tuple:
    """All that :func:`.tiled.plan.plan_call` and :class:`.tiled.plan.Walk` look at."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    return (
        query.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        None if mask is None else (mask.dtype, mask.shape, isinstance(mask, Tensor) and mask.stride()),
        isinstance(mask, BlockRule) and mask.window, call.score_rule is None,
        rule_bytes(call, backward=backward) if call.score_rule is not None or isinstance(mask, LazyMask) else None,
        call.num_heads, call.num_kv_heads, call.left, call.right, call.offset,
        call.dropout_p > 0, call.softcap is None, call.sinks is None, call.needs_mask_grad,
        config.budget_mib, config.q_block, config.kv_block, backward, *asked,
    )  # fmt: skip


# ---- memory ----------------------------------------------------------------------------------------------------------


class MemoryCaps(dict[tuple, tuple[int, float]]):
    """For calls of each shape that ran out of memory on one device: the bytes that they may use, and until when, by the
    monotonic clock."""

    def __init__(self, runtime: Runtime):
        super().__init__()

    def most_bytes(self, key: tuple) -> int | None:
        """Bytes that the next call of this shape may use; None = the whole budget."""
        most, until = self.get(key, (None, 0.0))
        return most if time.monotonic() < until else None


def forget_halvings() -> None:
    """Plan every shape with the full budget again, because a new run begins. Without it the budget of a shape comes
    back after a minute."""
    for runtime in runtimes():
        runtime.part(MemoryCaps).clear()


def _within_memory(
    call: AttentionCall,
    config: AttentionConfig,
    run: Callable[[Walk], T],
    stats: TiledStats,
    *,
    backward: bool = False,
    whole: Walk | None = None,
) -> T:
    """``run`` with a plan for this call; when the device runs out of memory, again with half of it."""
    runtime = runtime_of(call.query.device)
    walks, caps = runtime.part(Walks), runtime.part(MemoryCaps)
    key = call.query.dtype, call.query.shape, call.key.shape, call.value.shape, backward
    walk = walks.of(call, config, backward=backward, whole=whole)

    def smaller(most_bytes: int | None) -> Walk | None:
        """A walk whose tiles take at most ``most_bytes``, or None if there is none below the present one."""
        if most_bytes is not None and most_bytes < walk.tiles.extra_bytes:
            with contextlib.suppress(ValueError):
                return walks.of(call, config, most_bytes=most_bytes, backward=backward)
        return None

    if caps:
        walk = smaller(caps.most_bytes(key)) or walk
    while True:
        try:
            return run(walk)
        except out_of_memory():
            # Half, and a little for what does not shrink with the tile.
            less = smaller(walk.tiles.extra_bytes * 17 // 32)
            if less is None:
                raise
            caps[key] = less.tiles.extra_bytes, time.monotonic() + _CAP_SECONDS
            stats.budget_halvings += 1
            before, after = (each.tiles.extra_bytes / MIB for each in (walk, less))
            what = f"query {list(call.query.shape)}, key {list(call.key.shape)}"
            log.warning("out of memory with %.2f MiB for %s: continuing with %.2f MiB", before, what, after)
            walk = less
