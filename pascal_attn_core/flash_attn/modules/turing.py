"""The functions of flash-attention-turing (module ``flash_attn_turing``), for any device, dtype and head_dim.

``is_causal`` is lower-right, as there: the last query sees the last key. A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import flash_attn as functions
from ..options import FlashArgumentError
from ..signatures import called_as
from ..varlen import padded_lse, read_lengths
from . import raw

_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *sizes: int) -> Tensor:
    """Attention of ``q [B, L, H, D]`` over k and v; ``sizes`` (batch, tokens, heads, head_dim) must be those of q.

    Returns:
        ``[B, L, H, D]``.
    """
    if sizes and tuple(sizes) != tuple(q.shape):
        raise FlashArgumentError(
            f"batch_size, seq_len, num_heads, head_dim must be those of q, {tuple(q.shape)}, got {sizes}"
        )
    out = functions.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    return out


def fwd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """[out ``[B, L, Hq, D]``, lse ``[B, Hq, L]`` in float32] of ``q [B, L, Hq, D]`` over ``k, v [B, S, Hkv, D]``."""
    return list(raw.forward(q, k, v, causal=is_causal)[:2])


def bwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, l: Tensor, dout: Tensor, is_causal: bool) -> list[Tensor]:  # noqa: E741
    """[dq, dk, dv] from the results of :func:`fwd` and ``dout``, the gradient of out."""
    grads = [torch.empty_like(t) for t in (q, k, v)]
    raw.backward(q, k, v, out, dout, l, *grads, causal=is_causal)
    return grads


@called_as(f"q k v {_LENGTHS} is_causal", ignored="max_seqlen_k")
def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, is_causal: bool
) -> list[Tensor]:
    """:func:`fwd` within each of several concatenated sequences.

    Args:
        q: ``[total_q, Hq, D]``; k and v ``[total_k, Hkv, D]``.
        cu_seqlens_q, cu_seqlens_k: whole numbers ``[B + 1]``; max_seqlen_q: at least the longest of q.
        max_seqlen_k: ignored, for compatibility.
    Returns:
        [out ``[total_q, Hq, D]``, lse ``[B, Hq, max_seqlen_q]``, zero after each sequence].
    """
    out, lse, *_ = raw.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=is_causal)
    return [out, padded_lse(lse, cu_seqlens_q.tolist(), max_seqlen_q)]


@called_as(f"q k v out l dout {_LENGTHS} is_causal", ignored="max_seqlen_q max_seqlen_k")
def varlen_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, l: Tensor, dout: Tensor,  # noqa: E741
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv] from the results of :func:`varlen_fwd`, zero after the last sequence."""
    ends, _ = read_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    lse = torch.cat([row[:, : last - first] for row, first, last in zip(l, ends, ends[1:])], 1)
    lse = torch.nn.functional.pad(lse, (0, q.shape[0] - ends[-1]))
    grads = [torch.empty_like(t) for t in (q, k, v)]
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    raw.backward(q, k, v, out, dout, lse, *grads, **lengths, causal=is_causal)
    return grads
