"""Calls so short that torch's function takes them as they are, whichever kernel it has for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import FLOATS, PLAIN, AttentionCall, Results
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..machine.device import LONGEST_SUM_ON_MPS, MIB
from ..machine.runtime import runtime_of
from ..tiled.layout import rows_overlap, slides_by_one
from .derivatives import differentiable
from .route import Choice, Request, Route
from .torch_faults import broken_promise, fault_reasons
from .torch_kernel import fused_takes, run_as_it_is

# Since torch 2.5 its math attention too gives zeros, not NaN, for a row that may look at no key.
_EMPTY_ROWS_ARE_ZERO = hasattr(torch, "_safe_softmax")
# Numbers in the keys of grouped heads from which on a single query is no short call, however small its score matrix.
_MANY_KEYS = 1 << 21


class TorchAsIs(Route):
    """Torch's function on the arguments as they came; named after the kernel that it will take."""

    is_differentiable = True

    def __init__(self, name: str):
        self.name = name

    def plan(self, request: Request) -> Any:
        return None if is_short(request.call, request.config) else ["it is not short"]

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: Any, **options: Any) -> Results:
        return Results(differentiable(run_as_it_is(call), config))


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
    do with it as it likes. Decided in a few comparisons, since such a call takes microseconds."""
    if call.num_scores * 4 > config.math_limit_mib * MIB or config.route != "auto" or call.query.dim() != 4:
        return False
    if call.order > 1:
        return False
    if call.left is not None or (call.right is not None and not call.plain_causal) or call.scale <= 0:
        return False
    if call.seq_len_kv > LONGEST_SUM_ON_MPS and call.seq_len_kv > runtime_of(call.query.device).info.longest_sum:
        return False
    mask = call.attn_mask
    if call.softcap is not None or call.sinks is not None or call.score_rule is not None or isinstance(mask, LazyMask):
        return False
    if mask is not None and (
        call.is_causal or mask.dim() < 2 or mask.dtype not in (torch.bool, call.query.dtype) or not _EMPTY_ROWS_ARE_ZERO
    ):
        return False
    query, key, value = call.query, call.key, call.value
    if mask is not None and query.shape[:2] != (*call.batch, call.num_heads):
        return False  # torch's math adds it in place to scores that may lack the dimensions of value
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()) and (
        rows_overlap(query) or rows_overlap(key) or rows_overlap(value) or slides_by_one(query)
    ):
        return False
    if mask is not None and call.needs_grad and mask.dtype != torch.bool and fault_reasons(call, read=not in_graph):
        return False
    if call.groups > 1:
        if not fused_takes(call, query, key, value, mask):
            return False  # torch's math would expand K and V
        if call.seq_len_q == 1 and call.batch_size * call.num_kv_heads * call.seq_len_kv * call.head_dim >= _MANY_KEYS:
            return False
    return not call.is_empty and not broken_promise(call)


def is_plainly_short(
    config: AttentionConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether the arguments, before any check of them, are those of one of the commonest calls that :func:`is_short`
    accepts. What else may be wrong with them torch's function refuses itself: it never gives them another meaning.

    It is all that a short call pays for having come here, so it reads each attribute once.
    """
    if config.route != "auto" or not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return False
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace would warn of every size that is looked at
        return False
    if dropout_p != 0.0 or (scale is not None and not (type(scale) is float and 0.0 < scale < math.inf)):
        return False
    try:
        q_shape, k_shape = query.shape, key.shape
        if not len(q_shape) == len(k_shape) == 4 or k_shape != value.shape or query.dtype not in FLOATS:
            return False
        batch, heads, seq_len_q, head_dim = q_shape
        if k_shape[0] != batch or k_shape[1] != heads or not head_dim or k_shape[2] > LONGEST_SUM_ON_MPS:
            return False
        if not 0 < batch * heads * seq_len_q * k_shape[2] * 4 <= config.math_limit_mib * MIB:
            return False
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()) and not (
            _has_dense_rows(query, head_dim) and _has_dense_rows(key, head_dim) and _has_dense_rows(value, head_dim)
        ):
            return False
        if is_causal is not False and (is_causal is not True or attn_mask is not None):
            return False
        if attn_mask is not None:
            if type(attn_mask) is not Tensor or attn_mask.dtype is not torch.bool:
                return False
            # Torch reads a mask on meta as if it had numbers.
            return attn_mask.dim() > 1 and not attn_mask.is_meta and _EMPTY_ROWS_ARE_ZERO
    except RuntimeError:  # nested and sparse tensors have no such shape or strides
        return False
    return True


def _has_dense_rows(tensor: Tensor, head_dim: int) -> bool:
    batch_stride, head_stride, row_stride, last_stride = tensor.stride()
    return last_stride == 1 and row_stride >= head_dim and head_stride >= head_dim and batch_stride != 1
