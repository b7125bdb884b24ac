"""Calls so short that torch's function takes them as they are, whichever kernel it has for them."""

from __future__ import annotations

from typing import Any

import torch

from ..call import AttentionCall, Results
from ..config import AttentionConfig
from ..machine.device import MIB
from ..machine.runtime import runtime_of
from ..tiled.layout import rows_overlap, slides_by_one
from .derivatives import differentiable
from .route import Choice, Request, Route
from .torch_faults import EMPTY_ROWS_ARE_ZERO, broken_promise, fault_reasons
from .torch_kernel import call_torch, fused_takes, lacks

# Numbers in the keys of grouped heads from which on a single query is no short call, however small its score matrix.
MANY_KEYS = 1 << 21


class TorchAsIs(Route):
    """Torch's function on the arguments as they came; named after the kernel that it will take."""

    is_differentiable = True

    def __init__(self, name: str):
        self.name = name

    def plan(self, request: Request) -> Any:
        return None if is_short(request.call, request.config) else ["it is not short"]

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: Any, **options: Any) -> Results:
        tensors: Any = (call.query, call.key, call.value, call.attn_mask)
        return Results(differentiable(call_torch(call, *tensors), config))


class ShortCalls(Route):
    """Claims the short calls. Of these only the name is open: which kernel torch's function will take."""

    def __init__(self) -> None:
        self.by_kernel, self.by_math = TorchAsIs("torch"), TorchAsIs("math")

    def claim(self, request: Request) -> Choice | None:
        call, config = request.call, request.config
        if request.with_lse or not is_short(call, config, in_graph=request.in_graph):
            return None
        if request.in_graph and call.dropout_p:
            return None  # the backward pass would draw other numbers
        has_kernel = fused_takes(call, call.query, call.key, call.value, call.attn_mask)  # type: ignore[arg-type]
        why = f"the score matrix is below {config.math_limit_mib:g} MiB: torch's function as it is"
        return Choice(self.by_kernel if has_kernel else self.by_math, why, torch_stores=not has_kernel)


def is_short(call: AttentionCall, config: AttentionConfig, *, in_graph: bool = False) -> bool:
    """A call whose score matrix is below the limit, and which torch's function takes as it is with our meaning: it may
    do with it as it likes."""
    if call.num_scores * 4 > config.math_limit_mib * MIB or config.route != "auto" or call.query.dim() != 4:
        return False
    if lacks(call) or call.scale <= 0 or call.seq_len_kv > runtime_of(call.query.device).info.longest_sum:
        return False
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None and (mask.dim() < 2 or mask.dtype not in (torch.bool, query.dtype) or not EMPTY_ROWS_ARE_ZERO):
        return False
    if mask is not None and query.shape[:2] != (*call.batch, call.num_heads):
        return False  # torch's math adds it in place to scores that may lack the dimensions of value
    if rows_overlap(query) or rows_overlap(key) or rows_overlap(value) or slides_by_one(query):
        return False
    if mask is not None and call.needs_grad and mask.dtype != torch.bool and fault_reasons(call, read=not in_graph):
        return False
    if call.groups > 1:
        if not fused_takes(call, query, key, value, mask):  # type: ignore[arg-type]
            return False  # torch's math would expand K and V
        if call.seq_len_q == 1 and call.batch_size * call.num_kv_heads * call.seq_len_kv * call.head_dim >= MANY_KEYS:
            return False
    return not broken_promise(call)
