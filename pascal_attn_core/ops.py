"""One custom operator, ``pascal_attn::sdpa``, with a fake and an autograd formula: what torch.compile, fake tensors and
graphs see of a call. Its body is the ordinary dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import dispatch, routes, tiled_route
from .backward import Gradients, sinks_gradient
from .call import AttentionCall, check_call
from .config import AttentionConfig, UnsupportedAttention, default_config
from .fused import route as fused
from .layout import accumulate_dtype, empty_output, without_autocast
from .lazy_mask import LazyMask
from .outputs import AttentionOutput
from .version import __version__

# Compiled graphs are cached on disk by what they pass to the operator: with the version in it, a graph that was
# compiled against another version of the operator is never taken from there.
_TAG = f"{__version__}|"
_ENVIRONMENT = "environment"  # instead of a config's token


def _token(config: AttentionConfig | None) -> str:
    return _TAG + (_ENVIRONMENT if config is None else config.token)


def _config(token: str) -> AttentionConfig:
    token = token.removeprefix(_TAG)
    return default_config() if token == _ENVIRONMENT else AttentionConfig.from_token(token)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: tuple[int, int] | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: AttentionConfig | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as one node of a graph; lse is empty unless asked for."""
    tensors = [t for t in (query, key, value, attn_mask, sinks) if t is not None]
    for_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    sides = None if window is None else [-1 if side is None else side for side in window]
    options = (dropout_p, is_causal, scale, enable_gqa, alignment, sides, _token(config))
    out, lse, *_ = _sdpa(query, key, value, attn_mask, *options, with_lse or for_grad, for_grad, softcap, sinks)
    return out, lse


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
    lse: bool = False,
) -> AttentionOutput:
    """The call as one custom operator, for torch.compile and fake tensors."""
    if isinstance(attn_mask, LazyMask):
        attn_mask = attn_mask.dense()  # a graph can hold tensors only
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested for t in tensors):
        check_call(query, key, value, attn_mask)  # raises
    return AttentionOutput(
        *sdpa(
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
            lse,
        )
    )


def _call(
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, log_sum, dropout seed), the last three empty where there is none."""
    call = _call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks
    )
    settings = _config(config)
    with without_autocast(query):
        if for_grad:
            result = _forward_for_grad(call, settings)
        else:
            result = tiled_route.Forward(*dispatch.run(call, settings, with_lse=with_lse), None, None)
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
    if _by_fused(call, config):
        try:
            return tiled_route.Forward(*fused.forward(call, with_lse=True, for_grad=True), None)
        except fused.KernelUnavailable as unavailable:
            if config.route == "fused":
                raise UnsupportedAttention("fused", [str(unavailable)]) from unavailable
    return tiled_route.forward(call, config, for_grad=True)


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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks
    )
    out = empty_output(call)
    dtype = accumulate_dtype(query.dtype)
    has_bias = attn_mask is not None and attn_mask.dtype != torch.bool
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
    wants_sinks: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, attn_mask (or empty) and sinks (or empty)."""
    call = _call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window, softcap, sinks
    )
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
    wants_sinks: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    like = (attn_mask if wants_mask else None, sinks if wants_sinks else None)
    extras = [query.new_empty(0) if t is None else t.new_empty(t.shape) for t in like]
    return (*(t.new_empty(t.shape) for t in (query, key, value)), *extras)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, attn_mask = inputs[:4]
    softcap, sinks = (*inputs[13:], None, None)[:2]
    ctx.save_for_backward(query, key, value, attn_mask, sinks, *output)
    ctx.options, ctx.softcap, ctx.num_inputs = inputs[4:11], softcap, len(inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *others: None) -> tuple:
    query, key, value, attn_mask, sinks, out, *saved = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wants_mask, wants_sinks = ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[14]
    options = (*ctx.options, wants_mask, wants_sinks, ctx.softcap, sinks)
    grads = _sdpa_backward(grad_out, grad_lse, query, key, value, attn_mask, out, *saved, *options)
    all_grads = [*grads[:3], grads[3] if wants_mask else None, *[None] * 10, grads[4] if wants_sinks else None]
    return tuple(all_grads[: ctx.num_inputs])


_sdpa.register_autograd(_backward, setup_context=_save)
