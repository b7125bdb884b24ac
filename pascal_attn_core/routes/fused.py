"""The routes ``fused`` and ``fused-int8``: reasons, forward, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..config import AttentionConfig
from ..device import DeviceInfo, device_info
from ..fused import kernels
from ..fused.launches import forward_launches, num_splits, variant_of
from ..fused.launches_backward import backward_launches
from ..fused.launches_int8 import int8_launches
from ..fused.launches_packed import Packed, packed_launches
from ..fused.select import call_reasons, rows_are_readable
from ..fused.source import Variant
from ..fused.verify import ensure
from ..tiled.layout import empty_output, without_autocast
from .first_order import Grads, first_order

KernelUnavailable = kernels.KernelUnavailable
Results = tuple[Tensor, Tensor | None, Tensor | None]
_DP4A = (6, 1)


def why_not(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    int8: bool = False,
    with_lse: bool = False,
    packed: Packed | None = None,
) -> list[str]:
    """Why the fused route cannot take a call; empty = it can."""
    if not takes_device(call.query.device):
        return [f"the fused kernel needs a CUDA device, got {call.query.device.type}"]
    if not config.fused:
        return ["switched off by the configuration (fused)"]
    reasons = call_reasons(call, int8=int8, with_lse=with_lse)
    if reasons:
        return reasons
    index = _index(call)
    reasons = list(kernels.machine_reasons(index))
    info = device_info(call.query.device)
    if int8 and not reasons and info.capability is not None and info.capability < _DP4A:
        reasons.append(f"the int8 mode needs compute capability 6.1, got {info.capability[0]}.{info.capability[1]}")
    if not reasons:
        variants = _variants(call, info, int8, packed, for_grad=call.needs_grad)
        failures = (kernels.failure(index, variant) for variant in variants)
        reasons += [reason for reason in failures if reason]
    return reasons


def takes_device(device: torch.device) -> bool:
    """Whether the kernels run on devices of this type."""
    return device.type == "cuda"


def may_win(call: AttentionCall, *, torch_has_a_kernel: bool) -> bool:
    """Whether the kernel can be the fastest route on the call's device: up to Turing, but not where torch multiplies on
    tensor cores, as it does float16 on Volta and Turing, and everything on newer cards."""
    capability = device_info(call.query.device).capability
    if capability is None or capability >= (8, 0):
        return False
    return capability < (7, 0) or call.query.dtype != torch.float16 or not torch_has_a_kernel


def run(call: AttentionCall, *, with_lse: bool, int8: bool = False) -> tuple[Tensor, Any]:
    """(out, lse or None), with gradients where the call needs them.

    Raises:
        KernelUnavailable: a kernel could not be had; nothing has been queued, and :func:`why_not` says so from now on.
    """
    if int8:
        ensure([variant_of(call, "int8")], _index(call))
        out = empty_output(call)
        kernels.run(int8_launches(call, out), _index(call))
        return out, None
    if call.needs_grad:
        return FusedFunction.apply(call.query, call.key, call.value, call, None)
    return forward(call, with_lse=with_lse)[:2]


def run_packed(call: AttentionCall, packed: Packed, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention within each of many sequences in one launch, with gradients where the call needs them.

    Args:
        call: query ``[1, Hq, total_q, D]``, key ``[1, Hkv, total_k, D]``, value ``[1, Hkv, total_k, Dv]``, no mask;
            aligned ``upper_left``: ``packed`` says where each sequence's diagonal lies.
    Returns:
        (out ``[1, Hq, total_q, Dv]``, zero behind the last sequence; lse ``[1, Hq, total_q]``, there -inf, or None).
    Raises:
        KernelUnavailable: as :func:`run`.
    """
    if call.needs_grad:
        return FusedFunction.apply(call.query, call.key, call.value, call, packed)
    return forward(call, with_lse=with_lse, packed=packed)[:2]


def forward(call: AttentionCall, *, with_lse: bool, for_grad: bool = False, packed: Packed | None = None) -> Results:
    """(out, lse, log_sum), the last two only where they are wanted: log_sum for the gradients of calls with a float
    mask, next to whose largest numbers it would be lost in lse. No graph for gradients."""
    info = device_info(call.query.device)
    ensure(_variants(call, info, False, packed, for_grad=for_grad), _index(call))
    out = empty_output(call)
    wanted = with_lse or for_grad
    lse = out.new_empty(out.shape[:-1], dtype=torch.float32) if wanted else None
    has_bias = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    log_sum = torch.empty_like(lse) if lse is not None and for_grad and has_bias else None
    launches = forward_launches(call, out, lse, log_sum, info, may_split=packed is None)
    if packed is not None:
        launches = packed_launches(launches, packed)
        out[..., packed.end_q :, :] = 0
        if lse is not None:
            lse[..., packed.end_q :] = -torch.inf
    kernels.run(launches, _index(call))
    return out, lse, log_sum


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor | None,
    grad_lse: Tensor | None,
    *,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their shapes. Extra memory: three float32 numbers per query row, the
    gradients of inputs that broadcast in full, and a copy of grad_out where its rows cannot be read as they lie."""
    grad_out = grad_out.expand(out.shape)
    if not rows_are_readable(grad_out):
        grad_out = grad_out.contiguous()
    heads = () if call.query.dim() == 2 else (call.num_heads,)
    kv_lead = call.batch if call.query.dim() == 2 else (*call.batch, call.num_kv_heads)
    grads = (
        call.query.new_empty((*call.batch, *heads, call.seq_len_q, call.head_dim)),
        call.key.new_empty((*kv_lead, call.seq_len_kv, call.head_dim)),
        call.value.new_empty((*kv_lead, call.seq_len_kv, call.head_dim_v)),
    )
    contiguous_grad_lse = None if grad_lse is None else grad_lse.float().expand(lse.shape).contiguous()
    launches = backward_launches(call, grad_out, out, lse.contiguous(), log_sum, contiguous_grad_lse, grads)
    if packed is not None:
        launches = packed_launches(launches, packed)
        for grad, end in zip(grads, (packed.end_q, packed.end_k, packed.end_k)):
            grad[..., end:, :] = 0
    kernels.run(launches, _index(call))
    query, key, value = (
        grad if grad.shape == t.shape else grad.sum_to_size(t.shape)
        for grad, t in zip(grads, (call.query, call.key, call.value))
    )
    return query, key, value


class FusedFunction(torch.autograd.Function):
    """``apply(query, key, value, call, packed or None) -> (out, lse)``; keeps inputs, out, lse and log_sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, packed: Any) -> Any:
        out, lse, log_sum = forward(call, with_lse=True, for_grad=True, packed=packed)
        ctx.save_for_backward(query, key, value, call.attn_mask, out, lse, log_sum)
        ctx.call, ctx.packed = call.without_tensors(), packed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, attn_mask, out, lse, log_sum = ctx.saved_tensors
        call = ctx.call.with_tensors(query, key, value, attn_mask)

        def compute(grad_out: Tensor, grad_lse: Tensor | None) -> Grads:
            with without_autocast(query):
                return backward(call, grad_out, out, lse, log_sum, grad_lse, packed=ctx.packed)

        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        return *first_order(compute, "fused", grad_out, grad_lse, (query, key, value, attn_mask)), None, None


def _variants(
    call: AttentionCall, info: DeviceInfo, int8: bool, packed: Packed | None, *, for_grad: bool
) -> list[Variant]:
    """What a call needs; for its gradients too, while another route could still take the call."""
    if int8:
        kinds = ["int8"]
    else:
        kinds = ["split" if packed is None and num_splits(call, info) else "forward"]
        kinds += ["grad_query", "grad_key_value"] if for_grad else []
    return [variant_of(call, kind) for kind in kinds]


def _index(call: AttentionCall) -> int:
    index = call.query.device.index
    return torch.cuda.current_device() if index is None else index
