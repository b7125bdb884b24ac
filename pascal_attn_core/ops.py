"""One custom operator, ``pascal_attn::sdpa``, with a fake and an autograd formula: what torch.compile, fake tensors and
graphs see of a call. Its body is the ordinary dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch, tiled_route
from .call import AttentionCall, check_call
from .config import AttentionConfig, default_config
from .layout import accumulate_dtype, empty_output


DEFAULT = "default"  # in place of a config's token: that of the environment


def _config(token: str) -> AttentionConfig:
    return default_config() if token == DEFAULT else AttentionConfig.from_token(token)


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
    config: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as one node of a graph; lse is empty unless asked for."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    sides = None if window is None else [-1 if side is None else side for side in window]
    options = (dropout_p, is_causal, scale, enable_gqa, alignment, sides, config)
    out, lse, _ = _sdpa(query, key, value, attn_mask, *options, with_lse or for_grad, for_grad)
    return out, lse


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
) -> AttentionCall:
    sides = None if window is None else (window[0], window[1])
    return check_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment=alignment, window=sides
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse or empty, dropout seed or empty)"""
    call = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window)
    settings = _config(config)
    seed = None
    if for_grad:
        out, lse, seed = tiled_route.forward(call, settings, with_lse=True)
    else:
        out, lse = dispatch._run(call, settings, with_lse=with_lse)
    return (
        _laid_out(call, out),
        _or_empty(lse, query, accumulate_dtype(query.dtype)),
        _or_empty(seed, query, torch.int64),
    )


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
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window)
    out = empty_output(call)
    lse = query.new_empty(out.shape[:-1] if with_lse else (0,), dtype=accumulate_dtype(query.dtype))
    return out, lse, query.new_empty((1,) if for_grad and dropout_p else (0,), dtype=torch.int64)


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
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alignment: str,
    window: Sequence[int] | None,
    config: str,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and attn_mask (or empty)."""
    call = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment, window)
    grads = tiled_route.backward(
        call,
        _config(config),
        grad_out,
        out,
        lse,
        grad_lse=grad_lse,
        seed=seed if seed.numel() else None,
        wants_mask=wants_mask,
    )
    assert grads.query is not None and grads.key is not None and grads.value is not None
    mask = _or_empty(grads.attn_mask, query, query.dtype)
    return grads.query.contiguous(), grads.key.contiguous(), grads.value.contiguous(), mask


@_sdpa_backward.register_fake
def _(grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, *options):
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    return (*grads, attn_mask.new_empty(attn_mask.shape) if options[-1] else query.new_empty(0))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, attn_mask = inputs[:4]
    out, lse, seed = output
    ctx.save_for_backward(query, key, value, attn_mask, out, lse, seed)
    ctx.options = inputs[4:11]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_seed: None) -> tuple:
    query, key, value, attn_mask, out, lse, seed = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wants_mask = ctx.needs_input_grad[3]
    grads = _sdpa_backward(grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, *ctx.options, wants_mask)
    return (*grads[:3], grads[3] if wants_mask else None, *[None] * 9)


_sdpa.register_autograd(_backward, setup_context=_save)
