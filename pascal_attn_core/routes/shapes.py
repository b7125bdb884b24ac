"""Calls on the meta device: shapes without numbers, in no time and no memory, whatever their length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, accumulate_dtype, empty_output


def run_shapes(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call, with gradients where the call needs them."""
    mask = call.attn_mask if isinstance(call.attn_mask, Tensor) else None
    return _Shapes.apply(call.query, call.key, call.value, mask, call.sinks, call)


class _Shapes(torch.autograd.Function):
    """``apply(query, key, value, attn_mask, sinks, call) -> (out, lse)``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, call = arguments
        ctx.save_for_backward(*inputs)
        out = empty_output(call)
        return out, out.new_empty(out.shape[:-1], dtype=accumulate_dtype(out.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad)
        return (*(torch.empty_like(t) if wants else None for t, wants in wanted), None)
