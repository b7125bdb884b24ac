"""From a checked call to its tile shape."""

from __future__ import annotations

import math

from torch import Tensor

from ..call import AttentionCall, accumulate_dtype, distinct
from ..config import AttentionConfig
from ..device import MIB, DeviceInfo
from .layout import copies
from .tiles import TilePlan, Workload, plan_tiles


def workload(call: AttentionCall, *, backward: bool = False) -> Workload:
    """The sizes of a call as far as tiles depend on them."""
    acc_dtype = accumulate_dtype(call.query.dtype)
    copies_query, copies_kv, copies_out = copies(call)
    mask = call.attn_mask if isinstance(call.attn_mask, Tensor) else None
    same_for_rows = mask is not None and (mask.dim() < 2 or mask.shape[-2] == 1 or mask.stride(-2) == 0)
    has_band = call.left is not None or call.right is not None
    window = None
    if call.left is not None:
        window = call.left + 1 + (call.right or 0)
    return Workload(
        units=call.batch_size * call.num_kv_heads,
        groups=call.groups,
        seq_len_q=call.seq_len_q,
        seq_len_kv=call.seq_len_kv,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        acc_size=acc_dtype.itemsize,
        copies_query=copies_query,
        copies_kv=copies_kv,
        copies_out=copies_out,
        writes_mask=has_band or call.attn_mask is not None,
        has_band=has_band,
        mask_keys=math.prod(distinct(mask).shape) if mask is not None and same_for_rows else 0,
        dropout=call.dropout_p > 0,
        causal=call.right is not None,
        window=window,
        softcap=call.softcap is not None,
        backward=backward,
        mask_grad=backward and call.needs_mask_grad,
    )


def plan_call(
    call: AttentionCall,
    info: DeviceInfo,
    config: AttentionConfig,
    *,
    most_bytes: int | None = None,
    backward: bool = False,
) -> TilePlan:
    """The tile shape for a call under a configuration, and with at most ``most_bytes`` if that is less."""
    work = workload(call, backward=backward)
    if config.budget_mib is None:
        budget = info.default_budget_bytes(backward=backward)
    else:
        budget = int(config.budget_mib * MIB)
    if most_bytes is not None:
        budget = min(budget, most_bytes)
    return plan_tiles(info, work, budget, q_block=config.q_block, kv_block=config.kv_block)
