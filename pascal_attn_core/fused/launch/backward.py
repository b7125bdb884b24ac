"""From a call and its saved results to the launches of the backward kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.params import AllGradients, Backward, TensorBackward
from ..code.source import Variant
from . import Launch
from .fields import View, common_fields, mask_bits, mask_tiles, result_fields, softcap_fields, view_of, work_of
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
        grad_out, out: ``[*batch, Hq, L, Dv]``, rows as the kernels take them.
        lse, log_sum, grad_lse: ``[*batch, Hq, L]`` float32, contiguous.
        grads: of query ``[*batch, Hq, L, D]``, key ``[*batch, Hkv, S, D]`` and value ``[*batch, Hkv, S, Dv]``, in full
            even where inputs broadcast. Those that the plan computes in ranges have a dimension of them before: the
            gradient is their sum.
    """
    optional = [t for t in (log_sum, grad_lse) if t is not None]
    of_query, of_key = plan.ranges
    first = [grad if ranges == 1 else grad[0] for grad, ranges in zip(grads, (of_query, of_key, of_key))]
    view = view_of(call, grad_out, out, lse, *first, *optional)
    launches = _launches_of(call, view, plan, log_sum is not None, grad_lse is not None)
    if plan.ranges == (1, 1):
        return launches
    delta, query, key = launches
    return [delta, *_by_ranges(query, of_query, dqb=grads[0]), *_by_ranges(key, of_key, dkb=grads[1], dvb=grads[2])]


def _by_ranges(launch: Launch, ranges: int, **grads: Tensor) -> Iterator[Launch]:
    """A launch of gradients as one for each batch element, to which ranges of the columns are its batch. ``grads``:
    those that it writes, by the parameter that leads from one range to the next."""
    if ranges == 1:
        yield launch
        return
    variant: Any = launch.variant
    whole: Any = launch.params
    numbers = {"batches": ranges, "qb": 0, "gb": 0, "lb": 0, "kb": 0, "vb": 0}
    numbers |= {name: grad.stride(0) for name, grad in grads.items()}
    columns = whole.lk if "dqb" in grads else whole.lq
    if variant.on_tensor_cores:
        cols = variant.geometry.cols
        length = -(-columns // (ranges * cols)) * cols
        numbers |= {"range": length, "range_end": length}
    else:
        length = columns // ranges
        of_keys = {"lk": length, "kb": length * whole.ks, "vb": length * whole.vs}
        of_queries = {"lq": length, "qb": length * whole.qs, "gb": length * whole.gs, "lb": length}
        numbers |= of_keys if "dqb" in grads else of_queries
    item = launch.keep[1].element_size()
    batch_bytes = {name: item * getattr(whole, f"{name}b") for name in ("q", "k", "v", "g", "dq", "dk", "dv")}
    batch_bytes |= dict.fromkeys(("delta", "shift", "bits"), 4 * whole.lb)
    for b in range(whole.batches):
        params = type(whole).from_buffer_copy(whole)
        begins = {name: getattr(whole, name) + b * step for name, step in batch_bytes.items()}
        for name, number in (begins | numbers).items():
            setattr(params, name, number)
        grid, keep = (*launch.grid[:2], ranges), (*launch.keep, *grads.values())
        yield launch._replace(grid=grid, params=params, keep=keep, work=launch.work // whole.batches)


def _launches_of(call: AttentionCall, view: View, plan: Plan, has_log_sum: bool, has_grad_lse: bool) -> list[Launch]:
    grad_out, out, lse, *rest = view.rest
    grad_query, grad_key, grad_value, *optional = rest
    stats = lse.new_empty((4 if plan.is_all_at_once else 3, lse.numel() + 1), dtype=torch.float32)
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
    work = work_of(call)
    if plan.is_all_at_once:
        return _launches_at_once(call, view, plan.gradients[0], fields, stats, work)
    query, key = plan.gradients
    if query.on_tensor_cores:
        return _tensor_launches(call, view, (query, key), fields, stats, 2 * work)
    params, keep = Backward(**fields), (stats, *view.tensors)
    delta_grid, query_grid, key_grid = _grids(call, view, query, key)
    return [
        Launch(query, "pa_delta", delta_grid, 128, params, keep),
        Launch(query, "pa_grad_query", query_grid, query.geometry.threads, params, keep, 2 * work),
        Launch(key, "pa_grad_key_value", key_grid, key.geometry.threads, params, keep, 2 * work),
    ]


def _launches_at_once(
    call: AttentionCall, view: View, variant: Variant, fields: dict, stats: Tensor, work: int
) -> list[Launch]:
    """All gradients in one kernel, which adds that of query to float32 numbers in memory: to the gradient itself where
    it is float32, else to numbers beside it that one more launch rounds."""
    grad_query = view.rest[3]
    is_float32 = grad_query.dtype == torch.float32
    sums = grad_query if is_float32 else torch.empty_like(grad_query, dtype=torch.float32)
    delta_grid, _, grid = _grids(call, view, variant, variant)
    turns = {"turns": stats[3].data_ptr(), "begun": stats[3, -1:].data_ptr()}
    params = AllGradients(**fields, **result_fields(sums, "sums", "sums_"), **turns)
    keep = (stats, sums, *view.tensors)
    launches = [
        Launch(variant, "pa_delta_all", delta_grid, 128, params, keep),
        Launch(variant, "pa_grad_all", grid, variant.geometry.threads, params, keep, 5 * work // 2),
    ]
    return launches if is_float32 else [*launches, Launch(variant, "pa_round_query", delta_grid, 128, params, keep)]


def sums_bytes(call: AttentionCall) -> int:
    """Memory that the kernel of all gradients takes for the sums of that of query: none in float32, see above."""
    wide = call.query.dtype == torch.float32
    return 0 if wide else 4 * call.batch_size * call.num_heads * call.seq_len_q * call.head_dim


Grid = tuple[int, int, int]
_KEYS_OF_BLOCK = 256  # the most of any geometry


def _grids(call: AttentionCall, view: View, query: Variant, key: Variant) -> tuple[Grid, Grid, Grid]:
    """Grids of the kernels of delta, of the gradient of query, and of those of key and value."""
    batches = view.query.shape[0]
    rows = batches * call.num_heads * call.seq_len_q
    return (
        (-(-rows // 4), 1, 1),
        (-(-call.seq_len_q // query.geometry.rows), call.num_heads, batches),
        (-(-call.seq_len_kv // key.geometry.rows), call.num_kv_heads, batches),
    )


def _tensor_launches(
    call: AttentionCall, view: View, variants: tuple[Variant, Variant], fields: dict, stats: Tensor, work: int
) -> list[Launch]:
    delta_grid, *grids = _grids(call, view, *variants)
    keep = [stats, *view.tensors]
    fields |= {"grad_scale": call.scale, "range_end": max(call.seq_len_q, call.seq_len_kv), **softcap_fields(call)}
    params = TensorBackward(**fields)
    launches = [Launch(variants[0], "pa_tensor_delta", delta_grid, 128, params, tuple(keep))]
    # Both kernels write the same bits: words for whole blocks of keys of the largest geometry.
    words = -(-call.seq_len_kv // _KEYS_OF_BLOCK) * (_KEYS_OF_BLOCK // 32)
    bits = None if view.mask is None else mask_bits(call, view, words)
    for variant, grid in zip(variants, grids):
        function, own = variant.functions[0], dict(fields)
        if bits is not None:
            geometry = variant.geometry
            keys, queries = geometry.cols, geometry.rows
            if "key_value" in variant.kind:
                keys, queries = queries, keys
            tiles = -(-bits.shape[2] // queries), -(-call.seq_len_kv // keys)
            flags, of_mask, mask_grid = mask_tiles(bits, bits.shape[1], *tiles)
            keep += [bits, flags]
            own |= of_mask
            launches.append(Launch(variant, "pa_gradient_bits", mask_grid, 128, TensorBackward(**own), tuple(keep)))
        launches.append(
            Launch(variant, function, grid, variant.geometry.threads, TensorBackward(**own), tuple(keep), work)
        )
    return launches
