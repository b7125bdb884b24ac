"""Plain attention in a dozen lines: the definition of a correct result. Slow, O(L*S) memory, any dtype up to
float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def allowed_keys(
    seq_len_q: int,
    seq_len_kv: int,
    *,
    is_causal: bool = False,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Bool ``[L, S]``: which keys each query sees under the causal rule and the sliding window.

    L = 2, S = 4, causal (1 = may attend)::

        upper_left   1 0 0 0      lower_right  1 1 1 0
                     1 1 0 0                   1 1 1 1
    """
    offset = seq_len_kv - seq_len_q if alignment == "lower_right" else 0
    distance = (
        torch.arange(seq_len_kv, device=device)[None, :] - torch.arange(seq_len_q, device=device)[:, None] - offset
    )
    left, right = (-1, -1) if window is None else window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    if is_causal:
        allowed &= distance <= 0
    return allowed


def reference_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(query @ key^T * scale + attn_mask) @ value, and the log of the softmax's denominator.

    Shapes and dtypes as in :func:`pascal_attn_core.sdpa`; computed in the dtype of the inputs throughout (pass float64
    for a reference result). A row that sees no key gives zeros and lse = -inf.

    Returns:
        (out ``[*batch, Hq, L, Dv]``, lse ``[*batch, Hq, L]``)
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    head_dim = query.shape[-1]
    factor = (1 / math.sqrt(head_dim) if head_dim else 1.0) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    rule = allowed_keys(
        *scores.shape[-2:], is_causal=is_causal, alignment=alignment, window=window, device=query.device
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        rule = rule & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    scores = scores.masked_fill(~rule, -math.inf)
    if sinks is not None:  # one more key, whose value is zero
        scores = torch.cat([scores, sinks[..., None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        value = torch.cat([value, torch.zeros_like(value[..., :1, :])], dim=-2)
    if scores.shape[-1] == 0:
        return torch.matmul(scores, value), scores.new_full(scores.shape[:-1], -math.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0))
    row_sum = weights.sum(dim=-1, keepdim=True)
    row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    return torch.matmul(weights / row_sum, value), (row_max + row_sum.log())[..., 0]
