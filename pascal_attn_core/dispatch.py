"""Which route a call takes, and why: ``why_not``, ``choose``, ``explain``, and the public functions.

Nothing is chosen silently: the sentences that decide here are the ones in errors, in the log and in reports.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import report
from .arguments import PLAIN, prepared
from .call import AttentionCall, check_call
from .config import ROUTES, AttentionConfig, UnsupportedAttention, default_config
from .device import MIB, device_info
from .layout import without_autocast
from .lazy_mask import LazyMask
from .math_route import run_math
from .outputs import AttentionOutput, TiledStats
from .tiled_route import run_tiled
from .torch_route import TorchForm, find_form, fused_takes, run_as_it_is, run_form

log = logging.getLogger("pascal_attn")

# Up to so many threads the tiled route keeps pace with torch's kernel, which spreads heads over threads.
_TILED_THREADS = 4


# Since torch 2.5 its math attention too gives zeros, not NaN, for a row that may look at no key.
_EMPTY_ROWS_ARE_ZERO = hasattr(torch, "_safe_softmax")


@dataclass(frozen=True, eq=False)
class Choice:
    """A route, the sentence that says why, and how torch's kernel is to be called if it is that one."""

    route: str
    why: str
    form: TorchForm | None = None


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
    query, key, value, attn_mask, is_causal, alignment = prepared(query, key, value, attn_mask, is_causal, alignment)
    if torch.compiler.is_compiling() or type(query) not in PLAIN:
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
    if _is_short(call, config):
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
    query, key, value, attn_mask, is_causal, alignment = prepared(query, key, value, attn_mask, is_causal, alignment)
    if torch.compiler.is_compiling() or type(query) not in PLAIN:
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
            True,
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
    out, lse = run(call, config, with_lse=True)
    assert lse is not None
    return AttentionOutput(out, lse)


# ---- choosing ------------------------------------------------------------------------------------------------------


def why_not(route: str, call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> list[str]:
    """Why a route cannot take a call, one sentence each; an empty list = it can."""
    if route == "tiled":
        return _why_not_tiled()
    if route == "torch":
        form = find_form(call, _budget(call, config), with_lse=with_lse)
        return form if isinstance(form, list) else []
    if route == "math":
        return _why_not_math(call, config, with_lse)
    if route == "fused":
        return ["the fused CUDA kernel is not part of this version"]
    raise ValueError(f"route must be one of {list(ROUTES)}, got {route!r}")


def choose(call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> Choice:
    """The route for a call.

    Raises:
        UnsupportedAttention: the config names a route that cannot take it.
    """
    if config.route != "auto":
        return _by_name(config.route, call, config, with_lse)
    if _tiled_is_faster(call):
        return Choice("tiled", "measured faster than torch's kernel for this kind of call on a CPU")
    form = find_form(call, _budget(call, config), with_lse=with_lse)
    if isinstance(form, TorchForm):
        words = form.words()
        return Choice("torch", "torch has a fused kernel for it" + (f" ({words})" if words else ""), form)
    if not _why_not_math(call, config, with_lse):
        return Choice("math", f"the score matrix is below {config.math_limit_mib:g} MiB")
    against = _why_not_tiled()
    if against:
        raise UnsupportedAttention("auto", [*form, *against])
    if not with_lse:
        _warn_once(call.query.device.type, form[0])
    return Choice("tiled", form[0])


def _by_name(route: str, call: AttentionCall, config: AttentionConfig, with_lse: bool) -> Choice:
    form = find_form(call, _budget(call, config), with_lse=with_lse) if route == "torch" else None
    reasons = form if isinstance(form, list) else [] if form else why_not(route, call, config, with_lse=with_lse)
    if reasons:
        raise UnsupportedAttention(route, reasons)
    return Choice(route, "asked for by name", form if isinstance(form, TorchForm) else None)


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
    """Which route :func:`sdpa` would take for this call and why, and what speaks against each of the others."""
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


def _budget(call: AttentionCall, config: AttentionConfig) -> int:
    if config.budget_mib is None:
        return device_info(call.query.device).default_budget_bytes()
    return int(config.budget_mib * MIB)


def _why_not_tiled() -> list[str]:
    if torch._C._are_functorch_transforms_active():
        return ["transforms of torch.func (grad, vmap, ...) are active: use torch.autograd, or a larger math_limit_mib"]
    return []


def _why_not_math(call: AttentionCall, config: AttentionConfig, with_lse: bool) -> list[str]:
    reasons = []
    score_mib = call.num_scores * max(4, call.query.element_size()) / MIB
    if score_mib > config.math_limit_mib:
        reasons.append(f"its score matrix of {score_mib:.1f} MiB is above math_limit_mib {config.math_limit_mib:g}")
    if with_lse:
        reasons.append("torch's function does not return lse")
    if call.is_empty:
        reasons.append("the call is empty")
    return reasons


def _tiled_is_faster(call: AttentionCall) -> bool:
    """Kinds of calls for which ``pascal-attn bench`` shows the tiled route ahead of torch's fused CPU kernel."""
    if call.query.device.type != "cpu" or torch.get_num_threads() > _TILED_THREADS or _why_not_tiled():
        return False
    rows, keys, mask = call.groups * call.seq_len_q, call.seq_len_kv, call.attn_mask
    if call.softcap is not None or call.sinks is not None or isinstance(mask, LazyMask):
        return False  # torch has no kernel for it at all
    if mask is not None:
        if mask.dtype != torch.bool and mask.dim() > 1 and mask.shape[-2] > 1:
            return False
        return rows >= 128 and keys >= 256 and not call.needs_grad
    if call.query.dtype != torch.float32 and call.needs_grad:
        return False  # torch's kernel multiplies in 16 bits there
    if call.seq_len_q == 1:
        return call.groups > 1 and keys >= 1024 and not call.needs_grad
    return rows >= 1024 and (keys <= 128 or (call.plain_causal and keys >= 1024))


def _is_short(call: AttentionCall, config: AttentionConfig) -> bool:
    """A call whose score matrix is below the limit, and which torch's function takes as it is with our meaning: it may
    do with it as it likes. Decided in a few comparisons, since such a call takes microseconds."""
    if call.num_scores * 4 > config.math_limit_mib * MIB or config.route != "auto" or call.query.dim() != 4:
        return False
    if call.left is not None or (call.right is not None and not call.plain_causal) or call.scale <= 0:
        return False
    mask = call.attn_mask
    if call.softcap is not None or call.sinks is not None or isinstance(mask, LazyMask):
        return False
    if mask is not None and (
        call.is_causal or mask.dim() < 2 or mask.dtype not in (torch.bool, call.query.dtype) or not _EMPTY_ROWS_ARE_ZERO
    ):
        return False
    if call.groups > 1 and not fused_takes(call, call.query, call.key, call.value, mask):
        return False  # torch's math would expand K and V
    return not call.is_empty and not report.recording()


@functools.lru_cache(maxsize=256)
def _warn_once(device_type: str, reason: str) -> None:
    # Without a fused kernel to hope for there is nothing to warn of.
    level = logging.INFO if device_type == "cpu" else logging.WARNING
    log.log(level, "on %s some attention calls run in tiles of plain PyTorch: %s", device_type, reason)


# ---- running -------------------------------------------------------------------------------------------------------


def run(call: AttentionCall, config: AttentionConfig, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """A checked call by the route that :func:`choose` finds: (out, lse or None)."""
    choice = choose(call, config, with_lse=with_lse)
    stats = TiledStats() if report.recording() else None
    with without_autocast(call.query):
        if choice.route == "torch":
            assert choice.form is not None
            result: tuple[Tensor, Tensor | None] = run_form(call, choice.form), None
        elif choice.route == "math":
            result = run_math(call), None
        else:
            result = run_tiled(call, config, with_lse=with_lse, stats=stats)
    if stats is not None:
        _note(call, choice, stats)
    return result


def _note(call: AttentionCall, choice: Choice, stats: TiledStats) -> None:
    key = report.CallKey(
        choice.route,
        tuple(call.query.shape),
        tuple(call.key.shape),
        str(call.query.dtype).removeprefix("torch."),
        report.mask_kind(call.attn_mask, is_causal=call.is_causal, left=call.left, right=call.right),
        choice.why,
    )
    report.note(key, blocks=stats.blocks, bounded_blocks=stats.bounded_blocks, budget_halvings=stats.budget_halvings)


def _operator() -> Any:
    """The module with the custom operator, which calls back into this one."""
    from . import ops

    return ops
