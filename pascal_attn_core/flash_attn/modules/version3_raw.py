"""FlashAttention-3's functions without autograd, ``_flash_attn_forward`` and ``_flash_attn_backward`` of the module
``flash_attn_interface``, by which ring attention reaches its kernels. See ``raw`` for shapes and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import raw
from .version3 import refuse

__all__ = ["flash_attn_backward", "flash_attn_forward"]


def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
    window_size: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_forward``: of a batch, or of concatenated sequences with ``cu_seqlens_q`` and ``cu_seqlens_k``.

    Args:
        out_, out: where the output is written as well.
        window_size: (left, right), as versions before 2026 took it.
        seqlens_rotary, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin: change nothing.
    Returns:
        (out, lse, an empty tensor, an empty tensor).
    Raises:
        NotImplementedError: new keys, a cache, rotation or scales are given.
    """
    refuse(
        k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, seqused_q=seqused_q,
        kv_batch_idx=kv_batch_idx, rotary_cos=rotary_cos, rotary_sin=rotary_sin, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), window_size, softcap)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        refuse(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, page_table=page_table,
               leftpad_k=leftpad_k)  # fmt: skip
        found, lse, *_ = raw.flash_attn_forward(q, k, v, **options)
    else:
        keys: dict[str, Any] = {"block_table": page_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
        found, lse, *_ = raw.flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options, **keys
        )
    for target in (out_, out):
        if target is not None:
            found = target.copy_(found)
    return found, lse, q.new_empty(0), q.new_empty(0)


def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool | None = None,
    window_size: Sequence[int] | None = None,
) -> Tensor:
    """``_flash_attn_backward``: writes the gradients into dq, dk and dv where they are tensors.

    Args:
        causal, window_size: the names of is_causal and of the window's two sides before 2026.
        others: see :func:`.raw.flash_attn_backward`.
    Returns:
        softmax_d, see there.
    """
    refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    options = _options(
        softmax_scale,
        is_causal if causal is None else causal,
        (window_size_left, window_size_right),
        window_size,
        softcap,
    )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        refuse(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        return raw.flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, **options)
    lengths: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return raw.flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, **lengths, **options
    )


def _options(
    softmax_scale: float | None, causal: bool, sides: tuple[int, int], window: Sequence[int] | None, softcap: float
) -> dict[str, Any]:
    left, right = sides if window is None else window
    return {
        "dropout_p": 0.0,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": softcap,
    }
