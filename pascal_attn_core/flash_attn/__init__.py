"""flash-attn's API on any GPU and on the CPU.

    from pascal_attn_core.flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)        # [B, L, H, D], as in flash-attn

Names, layouts, defaults and the lower-right causal rule are those of flash-attn 2.8; float32 and float64, any head_dim,
``softcap`` together with dropout, and values whose head_dim differs from the keys' work too. Differences from
flash-attn:

* a query that sees no key has lse = -inf (flash-attn: +inf), so that results over disjoint keys can be merged;
* with ``alibi_slopes`` and ``causal`` lse is that of the documented bias -slope * |i + S - L - j| (flash-attn's bias
  differs by a constant per row; the output is the same);
* gradients flow through lse; ``S_dmask`` is always None: no score matrix exists;
* invalid arguments raise a ``ValueError``, or a ``TypeError`` for the wrong kind; where these functions check them, the
  ``ValueError`` is also a ``RuntimeError``, which flash-attn raises;
* ``window_size`` keeps its documented meaning when a side is as large as the number of keys.

:func:`patch_flash_attn` makes ``import flash_attn`` find this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .install import install_as_flash_attn, patch_flash_attn
from .modules.padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from .options import attend, check_layout, flash_options, unpacked
from .signatures import options_of, refuse
from .varlen import varlen_attend

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "index_first_axis",
    "index_put_first_axis",
    "install_as_flash_attn",
    "pad_input",
    "patch_flash_attn",
    "unpad_input",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of ``q [B, L, Hq, D]`` over ``k [B, S, Hkv, D]`` and ``v [B, S, Hkv, Dv]``, exact, in O(N) memory.

    Args:
        q, k, v: float16, bfloat16, float32 or float64; Hq a multiple of Hkv, K and V are never expanded.
        dropout_p: share of the probabilities that is dropped; pass 0 in evaluation.
        softmax_scale: factor of the scores; None = 1 / sqrt(D).
        causal: lower-right. For L = 2, S = 5 and for L = 5, S = 2 (1 = may attend)::

            1 1 1 1 0      0 0
            1 1 1 1 1      0 0
                           0 0
                           1 0
                           1 1

        window_size: (left, right): query i sees keys i + S - L - left ... i + S - L + right; -1 = no bound.
        softcap: scores become softcap * tanh(scores / softcap); 0 = off.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``: -slope * |i + S - L - j| is added to the scores, tile by tile; in
            tiles of PyTorch this takes a few MiB beside the memory budget. It gets no gradient, as in flash-attn.
        deterministic: bitwise reproducible gradients; on a GPU this uses our own backward pass.
        return_attn_probs: return (out, lse ``[B, Hq, L]`` float32, None).
    Returns:
        ``[B, L, Hq, Dv]``, contiguous, zero where a query sees no key.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments; nothing has been computed.
    """
    options = flash_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _answer(*attend(q, k, v, options, with_lse=return_attn_probs))


@options_of(flash_attn_func, 3)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_func` with ``kv [B, S, 2, Hkv, D]``."""
    check_layout(("B", "tokens", 2, "heads", "head_dim"), kv=kv)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options, **named)


@options_of(flash_attn_func, 3)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_func` with ``qkv [B, L, 3, H, D]``."""
    return flash_attn_func(*unpacked(qkv), *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_func` within each of several concatenated sequences; nothing is padded.

    Neighbouring sequences of equal lengths are computed as one batch, or all sequences in one launch where the fused
    kernel is the fastest route. Does not work under ``torch.compile(fullgraph=True)``, because the values of the
    lengths are read.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hkv, D]``; v ``[total_k, Hkv, Dv]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, where each sequence starts and the last one ends; sequences
            may be empty.
        max_seqlen_q, max_seqlen_k: ignored, for compatibility; the lengths determine them.
        block_table: must be None.
        others: see :func:`flash_attn_func`; lse is ``[Hq, total_q]``.
    Returns:
        ``[total_q, Hq, Dv]``; zero after the last sequence.
    """
    options = flash_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    refuse("block_table", block_table, None)
    return _answer(*varlen_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, with_lse=return_attn_probs))


@options_of(flash_attn_varlen_func, 5)
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_varlen_func` with ``kv [total_k, 2, Hkv, D]``."""
    check_layout(("total", 2, "heads", "head_dim"), kv=kv)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, **named)


@options_of(flash_attn_varlen_func, 7)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_varlen_func` with ``qkv [total, 3, H, D]``."""
    check_layout(("total", 3, "heads", "head_dim"), qkv=qkv)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named)


def _answer(out: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor, None]:
    return out if lse is None else (out, lse, None)
