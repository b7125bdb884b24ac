"""From a call and its saved results to the launches of the backward kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall
from .launches import Launch, View, common_fields, stride_fields, variant_of, views, work_of
from .params import Backward


def backward_launches(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor | None,
    grad_lse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
) -> list[Launch]:
    """The launches that write the gradients of query, key and value.

    Args:
        grad_out, out: ``[*batch, Hq, L, Dv]``, rows as the kernels take them.
        lse, log_sum, grad_lse: ``[*batch, Hq, L]`` float32, contiguous.
        grads: of query ``[*batch, Hq, L, D]``, key ``[*batch, Hkv, S, D]`` and value ``[*batch, Hkv, S, Dv]``, in full
            even where inputs broadcast.
    """
    optional = [t for t in (log_sum, grad_lse) if t is not None]
    launches = []
    for view in views(call, grad_out, out, lse, *grads, *optional):
        launches += _launches_of(call, view, log_sum is not None, grad_lse is not None)
    return launches


def _launches_of(call: AttentionCall, view: View, has_log_sum: bool, has_grad_lse: bool) -> list[Launch]:
    grad_out, out, lse, *rest = view.rest
    grad_query, grad_key, grad_value, *optional = rest
    stats = lse.new_empty((3, lse.numel()), dtype=torch.float32)
    fields = common_fields(call, view) | {
        "o": out.data_ptr(),
        "g": grad_out.data_ptr(),
        "dq": grad_query.data_ptr(),
        "dk": grad_key.data_ptr(),
        "dv": grad_value.data_ptr(),
        "lse": lse.data_ptr(),
        "log_sum": optional.pop(0).data_ptr() if has_log_sum else 0,
        "grad_lse": optional.pop(0).data_ptr() if has_grad_lse else 0,
        "delta": stats[0].data_ptr(),
        "shift": stats[1].data_ptr(),
        "bits": stats[2].data_ptr(),
        **stride_fields(lse, "lb lh"),
        **stride_fields(out, "ob oh os"),
        **stride_fields(grad_out, "gb gh gs"),
        **stride_fields(grad_query, "dqb dqh dqs"),
        **stride_fields(grad_key, "dkb dkh dks"),
        **stride_fields(grad_value, "dvb dvh dvs"),
    }
    params, keep, work = Backward(**fields), (stats, *view.tensors), work_of(call, view)
    batches = view.query.shape[0]
    query, key = variant_of(call, "grad_query"), variant_of(call, "grad_key_value")
    rows = batches * call.num_heads * call.seq_len_q
    query_grid = (-(-call.seq_len_q // query.geometry.rows), call.num_heads, batches)
    key_grid = (-(-call.seq_len_kv // key.geometry.rows), call.num_kv_heads, batches)
    return [
        Launch(query, "pa_delta", (-(-rows // 4), 1, 1), 128, params, keep),
        Launch(query, "pa_grad_query", query_grid, query.geometry.threads, params, keep, 2 * work),
        Launch(key, "pa_grad_key_value", key_grid, key.geometry.threads, params, keep, 2 * work),
    ]
