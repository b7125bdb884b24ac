"""The functions of flash-attention-turing (module ``flash_attn_turing``), for any device, dtype and head_dim.

``is_causal`` is lower-right, as there: the last query sees the last key. A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import flash_attn as functions
from ...attention import sdpa_backward
from ..options import FlashArgumentError, check_layout
from ..varlen import read_ends

__all__ = ["bwd", "flash_attn_func", "fwd", "varlen_bwd", "varlen_fwd"]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *sizes: int) -> Tensor:
    """Attention of ``q [B, L, H, D]`` over k and v; ``sizes`` (batch, tokens, heads, head_dim) must be those of q.

    Returns:
        ``[B, L, H, D]``.
    """
    if sizes and tuple(sizes) != tuple(q.shape):
        raise FlashArgumentError(f"batch_size, seq_len, num_heads, head_dim must be those of q, {tuple(q.shape)}, "
                                 f"got {sizes}")  # fmt: skip
    out = functions.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    return out


def fwd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """[out ``[B, L, Hq, D]``, lse ``[B, Hq, L]`` in float32] of ``q [B, L, Hq, D]`` over ``k, v [B, S, Hkv, D]``."""
    with torch.no_grad():
        out, lse, _ = functions.flash_attn_func(q, k, v, causal=is_causal, return_attn_probs=True)
    return [out, lse]


def bwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, l: Tensor, dout: Tensor, is_causal: bool) -> list[Tensor]:  # noqa: E741
    """[dq, dk, dv] from the results of :func:`fwd` and ``dout``, the gradient of out."""
    check_layout("[B, tokens, heads, head_dim]", 4, q=q, k=k, v=v, out=out, dout=dout)
    query, key, value, result, grad = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    grads = sdpa_backward(
        grad, query, key, value, result, l, is_causal=is_causal, enable_gqa=True, alignment="lower_right"
    )
    return [grad.transpose(1, 2) for grad in grads]


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
) -> list[Tensor]:
    """:func:`fwd` within each of several concatenated sequences.

    Args:
        q: ``[total_q, Hq, D]``; k and v ``[total_k, Hkv, D]``.
        cu_seqlens_q, cu_seqlens_k: whole numbers ``[B + 1]``; max_seqlen_q: at least the longest of q.
        max_seqlen_k: ignored, for compatibility.
    Returns:
        [out ``[total_q, Hq, D]``, lse ``[B, Hq, max_seqlen_q]``, zero behind each sequence].
    """
    with torch.no_grad():
        out, lse, _ = functions.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=is_causal, return_attn_probs=True
        )
    ends = read_ends("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    padded = lse.new_zeros(len(ends) - 1, q.shape[1], max_seqlen_q)
    for row, first, last in zip(padded, ends, ends[1:]):
        if last - first > max_seqlen_q:
            raise FlashArgumentError(f"max_seqlen_q must be at least {last - first}, got {max_seqlen_q}")
        row[:, : last - first] = lse[:, first:last]
    return [out, padded]


def varlen_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    l: Tensor,  # noqa: E741
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
) -> list[Tensor]:
    """[dq, dk, dv] from the results of :func:`varlen_fwd`, zero behind the last sequence."""
    check_layout("[total, heads, head_dim]", 3, q=q, k=k, v=v, out=out, dout=dout)
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    ends_q = read_ends("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    ends_k = read_ends("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    for row, q0, q1, k0, k1 in zip(l, ends_q, ends_q[1:], ends_k, ends_k[1:]):
        of_q, of_k = slice(q0, q1), slice(k0, k1)
        parts = bwd(
            q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q], row[None, :, : q1 - q0], dout[None, of_q],
            is_causal,
        )  # fmt: skip
        for grad, part, tokens in zip(grads, parts, (of_q, of_k, of_k)):
            grad[tokens] = part[0]
    return grads
