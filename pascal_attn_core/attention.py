"""The public functions, and the running of a call by the route that :mod:`.routes` chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .arguments import PLAIN, prepared
from .call import AttentionCall, check_call
from .config import ROUTES, AttentionConfig, default_config
from .lazy_mask import LazyMask
from .observe import report
from .outputs import AttentionOutput, TiledStats
from .routes import Choice, choose, fused, is_plainly_short, is_short, why_not
from .routes.math import run_math
from .routes.shapes import run_shapes
from .routes.tiled import run_tiled
from .routes.torch_kernel import run_as_it_is, run_form, torch_sdpa
from .tiled.layout import without_autocast

_observers: tuple[Callable[[AttentionCall], None], ...] = ()
_observers_lock = threading.Lock()


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Scaled dot-product attention by the fastest exact route this device has, never in O(L*S) memory.

    The arguments of :func:`torch.nn.functional.scaled_dot_product_attention`, with its meaning.

    Args:
        query: ``[*batch, Hq, L, D]``; key ``[*batch, Hkv, S, D]``; value ``[*batch, Hkv, S, Dv]``; float16, bfloat16,
            float32 or float64; leading dimensions broadcast.
        attn_mask: broadcasts to ``[*batch, Hq, L, S]``; bool (True = takes part) or float (added to the scores, any
            float dtype), or a :class:`~pascal_attn_core.lazy_mask.LazyMask`, evaluated tile by tile. May be combined
            with ``is_causal`` and ``window``. A row that may look at no key gives zeros.
            torch's own ``causal_lower_right(L, S)`` is understood too.
        dropout_p: share of the probabilities that is dropped, drawn from torch's generator.
        is_causal: query i sees the keys up to i (see ``alignment``).
        scale: factor of the scores; None = 1 / sqrt(D).
        enable_gqa: Hq may be a multiple of Hkv. K and V are never expanded.
        alignment: where the diagonal of ``is_causal`` and ``window`` lies when L != S: ``"upper_left"`` as in torch
            (query 0 sees key 0), or ``"lower_right"`` as in flash-attn (the last query sees the last key). For L = 2,
            S = 4, causal (1 = may look)::

                upper_left   1 0 0 0      lower_right  1 1 1 0
                             1 1 0 0                   1 1 1 1

        window: (left, right): query i sees keys i - left ... i + right only; -1 = no bound. Tiles outside are skipped.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None = off.
        sinks: ``[Hq]``, one further score per head that takes part in the softmax's denominator only (gpt-oss).
        config: routes, memory budget, tiles; None = the environment's (:meth:`AttentionConfig.from_env`).
    Returns:
        ``[*batch, Hq, L, Dv]`` in the dtype of query; in tiles laid out in memory as query is, by torch's kernels as
        they do it.
    Raises:
        TypeError, ValueError: arguments that do not fit together; nothing has been computed.
        UnsupportedAttention: a route asked for by name cannot take the call; ``.reasons`` says why.
    """
    if (
        not torch.compiler.is_compiling()
        and is_plainly_short(
            default_config() if config is None else config,
            query, key, value, attn_mask, dropout_p, is_causal, scale,
        )
        and window is None and softcap is None and sinks is None and alignment == "upper_left"
        and not is_watched()
    ):  # fmt: skip
        try:
            return torch_sdpa(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        except RuntimeError:
            check_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)  # knows the reason better
            raise
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        overriding = (query, key, value, attn_mask, sinks)
        if not torch.compiler.is_compiling() and has_torch_function(overriding):
            return handle_torch_function(
                sdpa,
                overriding,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                alignment=alignment,
                window=window,
                softcap=softcap,
                sinks=sinks,
                config=config,
            )
    query, key, value, attn_mask, is_causal, alignment = prepared(query, key, value, attn_mask, is_causal, alignment)
    if _goes_to_the_operator(query, key, value, attn_mask):
        return (
            _operator()
            .call(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                alignment,
                window,
                softcap,
                sinks,
                config,
                lse=False,
            )
            .out
        )
    config = default_config() if config is None else config
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        alignment=alignment,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    if query.is_meta:
        return run_shapes(call)[0]
    if is_short(call, config) and not is_watched():
        return run_as_it_is(call)
    return run(call, config, with_lse=False)[0]


def sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> AttentionOutput:
    """:func:`sdpa` and the natural logarithm of the softmax's denominator, ``[*batch, Hq, L]`` in float32 (float64 for
    float64 inputs), through which gradients flow too. Two results over disjoint keys merge into one by their lse."""
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        overriding = (query, key, value, attn_mask, sinks)
        if not torch.compiler.is_compiling() and has_torch_function(overriding):
            return handle_torch_function(
                sdpa_with_lse,
                overriding,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                alignment=alignment,
                window=window,
                softcap=softcap,
                sinks=sinks,
                config=config,
            )
    query, key, value, attn_mask, is_causal, alignment = prepared(query, key, value, attn_mask, is_causal, alignment)
    if _goes_to_the_operator(query, key, value, attn_mask):
        return _operator().call(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            alignment,
            window,
            softcap,
            sinks,
            config,
            lse=True,
        )
    config = default_config() if config is None else config
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        alignment=alignment,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    if query.is_meta:
        return AttentionOutput(*run_shapes(call))
    out, lse = run(call, config, with_lse=True)
    assert lse is not None
    return AttentionOutput(out, lse)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> str:
    """Which route :func:`sdpa` would take for this call and why, and what speaks against each of the others. Where that
    is decided by timing two kernels (:mod:`.timing`), it times them."""
    config = default_config() if config is None else config
    query, key, value, attn_mask, is_causal, alignment = prepared(query, key, value, attn_mask, is_causal, alignment)
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        alignment=alignment,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    chosen = choose(call, config)
    lines = [f"route {chosen.route}: {chosen.why}"]
    for route in ROUTES:
        if route != chosen.route:
            reasons = why_not(route, call, config)
            lines.append(f"  {route}: {'; '.join(reasons) if reasons else 'could take it'}")
    return "\n".join(lines)


# ---- running -------------------------------------------------------------------------------------------------------


def run(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    with_lse: bool,
    choice: Choice | None = None,
    stats: TiledStats | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A checked call by the route that :func:`choose` finds, or has found: (out, lse or None).

    stats: what the route ``tiled`` counts is added to it.
    """
    stats = TiledStats() if stats is None and report.recording() else stats
    show(call)
    while True:
        taken = choose(call, config, with_lse=with_lse) if choice is None else choice
        try:
            with without_autocast(call.query):
                result = _run_route(call, config, taken, with_lse=with_lse, stats=stats)
        except fused.KernelUnavailable:  # why_not names the reason from now on
            choice = None
        else:
            note(call, taken, stats)
            return result


def _run_route(
    call: AttentionCall, config: AttentionConfig, choice: Choice, *, with_lse: bool, stats: TiledStats | None
) -> tuple[Tensor, Tensor | None]:
    if choice.as_it_is:
        return run_as_it_is(call), None
    if choice.route == "torch":
        assert choice.form is not None
        return run_form(call, choice.form), None
    if choice.route == "math":
        return run_math(call), None
    if choice.route.startswith("fused"):
        return fused.run(call, with_lse=with_lse, int8=choice.route == "fused-int8")
    return run_tiled(call, config, with_lse=with_lse, stats=stats)


def run_packed(
    call: AttentionCall,
    packed: fused.Packed,
    *,
    with_lse: bool,
    why: str,
    sequences: Callable[[], Iterable[AttentionCall]],
) -> tuple[Tensor, Tensor | None]:
    """A checked call whose tokens are those of many sequences, in one launch of the fused kernel: see
    :func:`.fused.route.run_packed`. Reports count it as one call; ``sequences`` gives what observers are shown.

    Raises:
        KernelUnavailable: nothing has been computed.
    """
    if _observers:
        for part in sequences():
            show(part)
    with without_autocast(call.query):
        result = fused.run_packed(call, packed, with_lse=with_lse)
    note(call, Choice("fused", why), None)
    return result


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


def _goes_to_the_operator(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | LazyMask | None) -> bool:
    """Whether a call is one node of a graph: while compiling, and for fake tensors and others with a dispatch of their
    own."""
    if torch.compiler.is_compiling():
        return True
    return any(type(t) not in PLAIN and isinstance(t, Tensor) for t in (query, key, value, attn_mask))


def _operator() -> Any:
    """The module with the custom operator, which calls back into this one."""
    from . import custom_op

    return custom_op
