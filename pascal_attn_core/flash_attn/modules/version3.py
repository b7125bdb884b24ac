"""FlashAttention-3's functions: the module ``flash_attn_interface``.

What its kernels alone need (num_splits, pack_gqa, sm_margin, scheduler_metadata) is taken and changes nothing; what
would change the result and is not here raises: scales of 8-bit inputs, attention_chunk, rotary_seqlens, and qv with a
cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import flash_attn as functions
from ..options import FlashArgumentError, check_layout

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of ``q [B, L, Hq, D]`` over ``k [B, S, Hkv, D]`` and ``v [B, S, Hkv, Dv]``.

    Args:
        qv: ``[B, L, Hq, Dv]``: the scores are q k + qv v, their default factor 1 / sqrt(D + Dv).
        others: see :func:`pascal_attn_core.flash_attn.flash_attn_func`.
    Returns:
        ``[B, L, Hq, Dv]``, with ``return_attn_probs`` (that, lse ``[B, Hq, L]``).
    Raises:
        NotImplementedError: an argument that is not supported, see the module.
    """
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    q, k = _with_values(q, k, v, qv)
    result = functions.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )
    return result[:2] if isinstance(result, tuple) else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` with ``qkv [B, L, 3, H, D]``, or ``[B, L, num_heads_q + 2 * Hkv, D]``."""
    if isinstance(qkv, Tensor) and qkv.dim() == 4 and num_heads_q is not None:
        heads_kv, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd or heads_kv < 1:
            raise FlashArgumentError(
                f"qkv must be [B, tokens, {num_heads_q} + 2 * heads, head_dim], got {list(qkv.shape)}"
            )
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    else:
        check_layout("[B, tokens, 3, heads, head_dim]", 5, qkv=qkv)
        if qkv.shape[2] != 3:
            raise FlashArgumentError(f"qkv must be [B, tokens, 3, heads, head_dim], got {list(qkv.shape)}")
        q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` within each of many sequences that are concatenated.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hkv, D]``; v ``[total_k, Hkv, Dv]``.
        seqused_q, seqused_k: int32 ``[B]``: only this many first tokens of each sequence count; the output is 0 for the
            other queries.
        others: see :func:`pascal_attn_core.flash_attn.flash_attn_varlen_func`.
    Returns:
        ``[total_q, Hq, Dv]``, with ``return_attn_probs`` (that, lse ``[Hq, total_q]``).
    """
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    q, k = _with_values(q, k, v, qv)
    total = q.shape[0]
    places = None
    if seqused_q is not None:
        places, cu_seqlens_q = _used("seqused_q", cu_seqlens_q, seqused_q)
        q = q.index_select(0, places.to(q.device))
    if seqused_k is not None:
        k, v, cu_seqlens_k = cut_to_used("seqused_k", cu_seqlens_k, seqused_k, k, v)
    result = functions.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )
    out, lse = result[:2] if isinstance(result, tuple) else (result, None)
    if places is not None:
        places = places.to(out.device)
        out = out.new_zeros(total, *out.shape[1:]).index_copy(0, places, out)
        if lse is not None:
            lse = lse.new_full((lse.shape[0], total), -torch.inf).index_copy(1, places, lse)
    return out if lse is None else (out, lse)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, see :func:`pascal_attn_core.flash_attn.flash_attn_with_kvcache`.

    Args:
        q: ``[B, L, Hq, D]``, with ``cu_seqlens_q`` (``[B + 1]``) ``[total_q, Hq, D]``.
        k, v: new tokens ``[B, N, Hkv, D]``, with ``cu_seqlens_k_new`` ``[total_new, Hkv, D]``.
        page_table: int32 ``[B, pages of a sequence]``.
    Returns:
        of the shape of q, with ``return_softmax_lse`` (that, lse ``[B, Hq, L]`` or ``[Hq, total_q]``).
    """
    refuse(
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        qv=qv,
        rotary_seqlens=rotary_seqlens,
    )
    options: dict[str, Any] = {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "rotary_interleaved": rotary_interleaved,
        "return_softmax_lse": return_softmax_lse,
    }
    if cu_seqlens_q is None and cu_seqlens_k_new is None:
        return functions.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=page_table,
            **options,
        )
    queries = _sequences("q", q, cu_seqlens_q)
    count = len(queries)
    new_k, new_v = (
        [None] * count if t is None else _sequences(name, t, cu_seqlens_k_new) for name, t in (("k", k), ("v", v))
    )
    if not len(new_k) == len(new_v) == count:
        raise FlashArgumentError(f"k and v must hold new tokens of {count} sequences, got {len(new_k)}, {len(new_v)}")
    results = []
    for b in range(count):
        row = slice(b, b + 1)
        by_row = page_table is not None or cache_batch_idx is not None
        results.append(
            functions.flash_attn_with_kvcache(
                queries[b],
                k_cache if by_row else k_cache[row],
                v_cache if by_row else v_cache[row],
                new_k[b],
                new_v[b],
                cache_seqlens=cache_seqlens[row] if isinstance(cache_seqlens, Tensor) else cache_seqlens,
                cache_batch_idx=None if cache_batch_idx is None else cache_batch_idx[row],
                cache_leftpad=None if cache_leftpad is None else cache_leftpad[row],
                block_table=None if page_table is None else page_table[row],
                **options,
            )
        )
    return _together(results, q, packed=cu_seqlens_q is not None, with_lse=return_softmax_lse)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """One attention from parts over disjoint keys.

    Args:
        out_partial: ``[parts, B, L, H, D]``; lse_partial: ``[parts, B, L, H]``, -inf = no key in this part.
        out: ``[B, L, H, D]``, where the result is written.
    Returns:
        (out ``[B, L, H, D]`` in out_dtype, or in the dtype of the parts; lse ``[B, L, H]``).
    """
    check_layout("[parts, B, tokens, heads, head_dim]", 5, out_partial=out_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        raise FlashArgumentError(f"lse_partial must be {list(out_partial.shape[:-1])}, got {list(lse_partial.shape)}")
    lse = lse_partial.logsumexp(0)
    # a query without a key in any part has weights of 0
    weights = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    # a part without a key may hold anything
    parts = out_partial.masked_fill((weights == 0)[..., None], 0.0)
    total = (parts * weights[..., None]).sum(0)
    total = total.to(out_partial.dtype if out_dtype is None else out_dtype)
    return (total if out is None else out.copy_(total)), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: :func:`flash_attn_with_kvcache` here plans each call itself."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not (name == "attention_chunk" and value == 0):
            raise NotImplementedError(f"{name} is not supported by Pascal Attention; got {_shown(value)}")


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _with_values(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """(queries, keys) with which q k + qv v is one product."""
    if qv is None:
        return q, k
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
        raise FlashArgumentError(f"qv must be {[*q.shape[:-1], v.shape[-1]]}, got {list(qv.shape)}")
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def cut_to_used(name: str, ends: Tensor, used: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, where each sequence starts) with only the first ``used [B]`` tokens of each sequence."""
    places, ends = _used(name, ends, used)
    places = places.to(k.device)
    return k.index_select(0, places), v.index_select(0, places), ends


def _used(name: str, ends: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """(the places of the tokens that count, where each sequence starts among them)."""
    batch = ends.shape[0] - 1
    if used.shape != (batch,) or used.is_floating_point():
        raise FlashArgumentError(f"{name} must be whole numbers [{batch}], got {used.dtype} {list(used.shape)}")
    starts, counts = ends.tolist(), used.tolist()
    sizes = [last - first for first, last in itertools.pairwise(starts)]
    if any(not 0 <= count <= size for count, size in zip(counts, sizes)):
        raise FlashArgumentError(f"{name} must be from 0 to the lengths {sizes}, got {counts}")
    places = [torch.arange(first, first + count) for first, count in zip(starts, counts)]
    new_ends = torch.tensor([0, *counts], device=ends.device).cumsum(0, dtype=torch.int32)
    return torch.cat([torch.arange(0), *places]), new_ends


def _sequences(name: str, tensor: Tensor, ends: Tensor | None) -> list[Tensor]:
    """Each sequence as ``[1, tokens, heads, head_dim]``."""
    if ends is None:
        check_layout("[B, tokens, heads, head_dim]", 4, **{name: tensor})
        return list(tensor.split(1))
    check_layout("[total, heads, head_dim]", 3, **{name: tensor})
    starts = ends.tolist()
    if not starts or starts[0] != 0 or sorted(starts) != starts or starts[-1] > tensor.shape[0]:
        raise FlashArgumentError(f"cu_seqlens of {name} must rise from 0 to at most {tensor.shape[0]}, got {starts}")
    return [tensor[first:last][None] for first, last in itertools.pairwise(starts)]


def _together(results: list[Any], q: Tensor, *, packed: bool, with_lse: bool) -> Any:
    outs = [result[0] if with_lse else result for result in results]
    all_lse = [result[1] for result in results] if with_lse else []
    if not packed:
        return (torch.cat(outs), torch.cat(all_lse)) if with_lse else torch.cat(outs)
    out = torch.cat([part[0] for part in outs])
    missing = q.shape[0] - out.shape[0]
    if missing:
        out = torch.cat([out, out.new_zeros(missing, *out.shape[1:])])
    if not with_lse:
        return out
    lse = torch.cat([part[0] for part in all_lse], 1)
    return out, torch.nn.functional.pad(lse, (0, missing), value=-torch.inf)
