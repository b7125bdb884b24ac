"""From a call and its saved results to the launches of the backward kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall
from .launches import Launch, View, common_fields, result_fields, views, work_of
from .params import Backward
from .plan import Plan


def backward_launches(
    call: AttentionCall,
    plan: Plan,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor | None,
    grad_lse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
) -> list[Launch]:
    """The launches that write the gradients of query, key and value.

    Args:
        plan: with the variants for gradients.
        grad_out, out: ``[*batch, Hq, L, Dv]``, rows as the kernels take them.
        lse, log_sum, grad_lse: ``[*batch, Hq, L]`` float32, contiguous.
        grads: of query ``[*batch, Hq, L, D]``, key ``[*batch, Hkv, S, D]`` and value ``[*batch, Hkv, S, Dv]``, in full
            even where inputs broadcast.
    """
    optional = [t for t in (log_sum, grad_lse) if t is not None]
    launches = []
    for view in views(call, grad_out, out, lse, *grads, *optional):
        launches += _launches_of(call, view, plan, log_sum is not None, grad_lse is not None)
    return launches


def _launches_of(call: AttentionCall, view: View, plan: Plan, has_log_sum: bool, has_grad_lse: bool) -> list[Launch]:
    grad_out, out, lse, *rest = view.rest
    grad_query, grad_key, grad_value, *optional = rest
    stats = lse.new_empty((3, lse.numel()), dtype=torch.float32)
    fields = common_fields(call, view) | {
        "log_sum": optional.pop(0).data_ptr() if has_log_sum else 0,
        "grad_lse": optional.pop(0).data_ptr() if has_grad_lse else 0,
        "delta": stats[0].data_ptr(),
        "shift": stats[1].data_ptr(),
        "bits": stats[2].data_ptr(),
        **result_fields(lse, "lse", "l"),
        **result_fields(out, "o", "o"),
        **result_fields(grad_out, "g", "g"),
        **result_fields(grad_query, "dq", "dq"),
        **result_fields(grad_key, "dk", "dk"),
        **result_fields(grad_value, "dv", "dv"),
    }
    params, keep, work = Backward(**fields), (stats, *view.tensors), work_of(call, view)
    batches = view.query.shape[0]
    query, key = plan.gradients
    rows = batches * call.num_heads * call.seq_len_q
    query_grid = (-(-call.seq_len_q // query.geometry.rows), call.num_heads, batches)
    key_grid = (-(-call.seq_len_kv // key.geometry.rows), call.num_kv_heads, batches)
    return [
        Launch(query, "pa_delta", (-(-rows // 4), 1, 1), 128, params, keep),
        Launch(query, "pa_grad_query", query_grid, query.geometry.threads, params, keep, 2 * work),
        Launch(key, "pa_grad_key_value", key_grid, key.geometry.threads, params, keep, 2 * work),
    ]
