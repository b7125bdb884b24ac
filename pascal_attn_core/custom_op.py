"""One custom operator, ``pascal_attn::sdpa``, with a fake and an autograd formula: what torch.compile, fake tensors and
graphs see of a call. Its body is the ordinary attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import attention, routes
from .call import AttentionCall, check_call
from .config import AttentionConfig, UnsupportedAttention, default_config
from .lazy_mask import LazyMask, MaskRule, rule_named
from .outputs import AttentionOutput, TiledStats
from .routes import Choice, fused
from .routes import tiled as tiled_route
from .tiled.gradients import Gradients, sinks_gradient
from .tiled.layout import accumulate_dtype, empty_output, without_autocast
from .version import __version__

# Compiled graphs are cached on disk by what they pass to the operator: with the version in it, a graph that was
# compiled against another version of the operator is never taken from there.
_TAG = f"{__version__}|"
_ENVIRONMENT = "environment"  # instead of a config's token
_UNREGISTERED = "-"  # instead of a rule's name


def _token(config: AttentionConfig | None) -> str:
    return _TAG + (_ENVIRONMENT if config is None else config.token)


def _config(token: str) -> AttentionConfig:
    token = token.removeprefix(_TAG)
    return default_config() if token == _ENVIRONMENT else AttentionConfig.from_token(token)


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: tuple[int, int] | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: AttentionConfig | None,
    lse: bool,
) -> AttentionOutput:
    """The call as one node of a graph, for torch.compile and fake tensors; lse is empty unless asked
    for. A mask that is a rule stays one: it goes in by its name, with the tensors that it reads."""
    tensors = [t for t in (query, key, value, attn_mask) if t is not None and not isinstance(t, LazyMask)]
    if not all(isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested for t in tensors):
        check_call(query, key, value, attn_mask)  # raises
    if isinstance(scale, Tensor) and scale.requires_grad:
        check_call(query, key, value, scale=scale)  # raises: a graph would take its value
    rule: tuple[str, Sequence[int], Sequence[Tensor]] = ("", (), ())
    if isinstance(attn_mask, LazyMask):
        if not isinstance(attn_mask.rule, MaskRule) and not _has_no_numbers(query):
            _check_that_a_graph_may_break(attn_mask, query)
            from .outside_graphs import sdpa_with_an_unregistered_mask_rule as run

            out, eager_lse = run(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment=alignment,
                window=window, softcap=softcap, sinks=sinks, config=config, lse=lse,
            )  # fmt: skip
            return AttentionOutput(out, query.new_empty(0) if eager_lse is None else eager_lse)
        rule, attn_mask = _rule_arguments(attn_mask), None
    inputs = [t for t in (query, key, value, attn_mask, sinks) if t is not None]
    for_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    sides = None if window is None else [-1 if side is None else side for side in window]
    options = (dropout_p, is_causal, scale, enable_gqa, alignment, sides, _token(config))
    out, row_lse, *_ = _sdpa(
        query, key, value, attn_mask, *options, lse or for_grad, for_grad, softcap, sinks, *rule
    )  # fmt: skip
    return AttentionOutput(out, row_lse)


def _has_no_numbers(query: Tensor) -> bool:
    """Whether a call on this tensor only works out shapes, so that no rule is ever evaluated."""
    return not torch.compiler.is_compiling() and isinstance(query, FakeTensor)


def _check_that_a_graph_may_break(mask: LazyMask, query: Tensor) -> None:
    if not torch.compiler.is_compiling():
        kind = type(query).__name__
        raise TypeError(f"for tensors of type {kind} mask_rule must register the rule of a LazyMask, got {mask.rule!r}")


def _rule_arguments(mask: LazyMask) -> tuple[str, Sequence[int], Sequence[Tensor]]:
    """A mask as the operator takes it: ``"float32 module:name"``, its shape, the tensors that the rule reads."""
    name = mask.rule.name if isinstance(mask.rule, MaskRule) else _UNREGISTERED
    dtype = str(mask.dtype).removeprefix("torch.")
    return f"{dtype} {name}", list(mask.shape), [t.detach() for t in mask.tensors]


def _lazy_mask(rule: str, shape: Sequence[int], tensors: Sequence[Tensor], query: Tensor) -> LazyMask:
    """The inverse of :func:`_rule_arguments`."""
    dtype, _, name = rule.partition(" ")
    function = _unregistered if name == _UNREGISTERED else rule_named(name)
    return LazyMask(shape, function, device=query.device, dtype=getattr(torch, dtype), tensors=tensors)


def _unregistered(*indices: Tensor) -> Tensor:
    raise LookupError("this graph was made without numbers, of a LazyMask whose rule mask_rule has not registered")


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> AttentionCall:
    sides = None if window is None else (window[0], window[1])
    return check_call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        alignment=alignment,
        window=sides,
        softcap=softcap,
        sinks=sinks,
    )


@torch.library.custom_op("pascal_attn::sdpa", mutates_args=())
def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    config: str,
    with_lse: bool,
    for_grad: bool,
    softcap: float | None,
    sinks: Tensor | None,
    rule: str,
    rule_shape: Sequence[int],
    rule_tensors: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, log_sum, dropout seed), the last three empty where there is none."""
    mask = attn_mask if not rule else _lazy_mask(rule, rule_shape, rule_tensors, query)
    call = _call(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks)
    settings = _config(config)
    with without_autocast(query):
        if for_grad:
            result = _forward_for_grad(call, settings)
        else:
            result = tiled_route.Forward(*attention.run(call, settings, with_lse=with_lse), None, None)
    dtype = accumulate_dtype(query.dtype)
    return (
        _laid_out(call, result.out),
        _or_empty(result.lse, query, dtype),
        _or_empty(result.log_sum, query, dtype),
        _or_empty(result.seed, query, torch.int64),
    )


def _by_fused(call: AttentionCall, config: AttentionConfig) -> bool:
    """Whether the fused route takes a call whose gradients will be wanted: the same answer in both passes."""
    if config.route not in ("auto", "fused") or not fused.takes_device(call.query.device):
        return False
    return routes.choose(replace(call, needs_grad=True), config, with_lse=True).route == "fused"


def _forward_for_grad(call: AttentionCall, config: AttentionConfig) -> tiled_route.Forward:
    attention.show(call)
    stats = TiledStats()
    if _by_fused(call, config):
        try:
            result = tiled_route.Forward(*fused.forward(call, with_lse=True, for_grad=True), None)
        except fused.KernelUnavailable as unavailable:
            if config.route == "fused":
                raise UnsupportedAttention("fused", [str(unavailable)]) from unavailable
        else:
            attention.note(call, Choice("fused", "a graph with gradients, which has no other kernel for them"), stats)
            return result
    result = tiled_route.forward(call, config, for_grad=True, stats=stats)
    attention.note(call, Choice("tiled", "a graph with gradients, which are computed in tiles"), stats)
    return result


def _laid_out(call: AttentionCall, out: Tensor) -> Tensor:
    """The output in the strides that the fake operator promised."""
    expected = empty_output(call)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype) if tensor is None else tensor


@_sdpa.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    config: str,
    with_lse: bool,
    for_grad: bool,
    softcap: float | None,
    sinks: Tensor | None,
    rule: str,
    rule_shape: Sequence[int],
    rule_tensors: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = attn_mask if not rule else _lazy_mask(rule, rule_shape, rule_tensors, query)
    call = _call(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks)
    out = empty_output(call)
    dtype = accumulate_dtype(query.dtype)
    has_bias = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    lse = query.new_empty(out.shape[:-1] if with_lse else (0,), dtype=dtype)
    log_sum = query.new_empty(out.shape[:-1] if for_grad and has_bias else (0,), dtype=dtype)
    return out, lse, log_sum, query.new_empty((1,) if for_grad and dropout_p else (0,), dtype=torch.int64)


@torch.library.custom_op("pascal_attn::sdpa_backward", mutates_args=())
def _sdpa_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor,
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    config: str,
    wants_mask: bool,
    wants_sinks: bool,
    softcap: float | None,
    sinks: Tensor | None,
    rule: str,
    rule_shape: Sequence[int],
    rule_tensors: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, attn_mask (or empty) and sinks (or empty)."""
    mask = attn_mask if not rule else _lazy_mask(rule, rule_shape, rule_tensors, query)
    call = _call(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks)
    saved = tiled_route.Forward(out, lse, log_sum if log_sum.numel() else None, seed if seed.numel() else None)
    with without_autocast(query):
        if not wants_mask and _by_fused(call, _config(config)):
            grads = Gradients(*fused.backward(call, grad_out, out, lse, saved.log_sum, grad_lse), None)
        else:
            settings = _config(config)
            grads = tiled_route.backward(call, settings, grad_out, saved, grad_lse=grad_lse, wants_mask=wants_mask)
        sinks_grad = None
        if wants_sinks:
            sinks_grad = sinks_gradient(call, grad_out, out, lse, grad_lse)
    extras = _or_empty(grads.attn_mask, query, query.dtype), _or_empty(sinks_grad, query, query.dtype)
    return grads.query.contiguous(), grads.key.contiguous(), grads.value.contiguous(), *extras


@_sdpa_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor,
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    config: str,
    wants_mask: bool,
    wants_sinks: bool,
    softcap: float | None,
    sinks: Tensor | None,
    rule: str,
    rule_shape: Sequence[int],
    rule_tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    like = (attn_mask if wants_mask else None, sinks if wants_sinks else None)
    extras = [query.new_empty(0) if t is None else t.new_empty(t.shape) for t in like]
    return (*(t.new_empty(t.shape) for t in (query, key, value)), *extras)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, attn_mask, *options, _with_lse, _for_grad, softcap, sinks, rule, shape, tensors = inputs
    ctx.save_for_backward(query, key, value, attn_mask, sinks, *output, *tensors)
    ctx.options, ctx.softcap, ctx.rule = options, softcap, (rule, shape)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *others: None) -> tuple:
    query, key, value, attn_mask, sinks, out, lse, log_sum, seed, *rule_tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wants_mask, wants_sinks = ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[14]
    grads = _sdpa_backward(
        grad_out, grad_lse, query, key, value, attn_mask, out, lse, log_sum, seed, *ctx.options, wants_mask,
        wants_sinks, ctx.softcap, sinks, *ctx.rule, rule_tensors,
    )  # fmt: skip
    of_mask, of_sinks = grads[3] if wants_mask else None, grads[4] if wants_sinks else None
    of_shape: Any = None if ctx.rule[1] else []  # to autograd an empty list is one of tensors
    return (*grads[:3], of_mask, *[None] * 10, of_sinks, None, of_shape, [None] * len(rule_tensors))


_sdpa.register_autograd(_backward, setup_context=_save)
