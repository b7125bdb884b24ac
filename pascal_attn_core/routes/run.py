"""Runs a checked call by the route that takes it; whoever watches is shown the call, and told what ran."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import Tensor

from ..call import AttentionCall, TiledStats, without_autocast
from ..config import AttentionConfig, RouteUnavailable
from ..fused.plan import Plan
from ..observe import report
from . import Choice, choose, route_named

_observers: tuple[Callable[[AttentionCall], None], ...] = ()
_observers_lock = threading.Lock()


def run(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    with_lse: bool,
    choice: Choice | None = None,
    stats: TiledStats | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A checked call by the route that :func:`choose` finds, or has found: (out, lse or None).

    Args:
        stats: what the route ``tiled`` counts is added to it.
    """
    stats = TiledStats() if stats is None and report.recording() else stats
    show(call)
    while True:
        taken = choose(call, config, with_lse=with_lse) if choice is None else choice
        try:
            with without_autocast(call.query):
                result = taken.by.run(call, config, taken.plan, with_lse=with_lse, stats=stats)
        except RouteUnavailable:  # its plan names the reason from now on
            choice = None
        else:
            note(call, taken, stats)
            return result


def run_packed(
    call: AttentionCall,
    config: AttentionConfig,
    plan: Plan,
    *,
    with_lse: bool,
    why: str,
    sequences: Callable[[], Iterable[AttentionCall]],
) -> tuple[Tensor, Tensor | None]:
    """A checked call whose tokens are those of many sequences, in one launch of the fused kernel. Reports count it as
    one call; ``sequences`` gives what observers are shown.

    Args:
        call: query ``[1, Hq, total_q, D]``, key ``[1, Hkv, total_k, D]``, value ``[1, Hkv, total_k, Dv]``, no mask;
            aligned ``upper_left``: ``plan.packed`` holds where each sequence's diagonal lies.
        plan: by :func:`.fused.find_plan`.
    Returns:
        (out ``[1, Hq, total_q, Dv]``, zero behind the last sequence; lse ``[1, Hq, total_q]``, there -inf, or None).
    Raises:
        RouteUnavailable: nothing has been computed.
    """
    if _observers:
        for part in sequences():
            show(part)
    choice = Choice(route_named("fused"), why, plan)
    with without_autocast(call.query):
        result = choice.by.run(call, config, plan, with_lse=with_lse, stats=None)
    note(call, choice, None)
    return result


# ---- watching --------------------------------------------------------------------------------------------------------


def add_observer(observer: Callable[[AttentionCall], None]) -> Callable[[], None]:
    """Show every checked call of this process to ``observer`` before it runs; returns what ends that."""
    global _observers
    with _observers_lock:
        _observers = (*_observers, observer)

    def remove() -> None:
        global _observers
        with _observers_lock:
            _observers = tuple(other for other in _observers if other is not observer)

    return remove


def is_watched() -> bool:
    """Whether anybody observes or records calls. It never changes what runs."""
    return bool(_observers) or report.recording()


def show(call: AttentionCall) -> None:
    """Show a call to the observers, once, before it runs."""
    for observer in _observers:
        observer(call)


def note(call: AttentionCall, choice: Choice, stats: TiledStats | None) -> None:
    """Count a call that has run in the reports that are being recorded."""
    if not report.recording():
        return
    key = report.CallKey(
        choice.route,
        tuple(call.query.shape),
        tuple(call.key.shape),
        str(call.query.dtype).removeprefix("torch."),
        report.mask_kind(call.attn_mask, is_causal=call.is_causal, left=call.left, right=call.right),
        choice.why,
    )
    stats = TiledStats() if stats is None else stats
    report.note(key, blocks=stats.blocks, bounded_blocks=stats.bounded_blocks, budget_halvings=stats.budget_halvings)
