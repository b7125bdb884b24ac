"""FlashAttention-3's functions: the module ``flash_attn_interface``.

Arguments that only its kernels need (num_splits, pack_gqa, sm_margin, scheduler_metadata) change nothing. Those that
would change the result and are not supported raise a NotImplementedError: scales of 8-bit inputs, qv, attention_chunk,
lengths that are used, and caches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import flash_attn as functions
from ..options import unpacked
from ..signatures import called_as
from . import raw

_SCALES = "q_descale=None k_descale=None v_descale=None"
_OPTIONS = f"{_SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0"
_LAST = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
_LENGTHS = "cu_seqlens_q=None cu_seqlens_k=None"
_LONGEST = "max_seqlen_q=None max_seqlen_k=None"
_SIDES = "window_size_left=-1 window_size_right=-1"

_IGNORED = "num_splits pack_gqa sm_margin"
_REFUSED = "q_descale k_descale v_descale attention_chunk"


@called_as(
    f"q k v softmax_scale=None causal=False qv=None {_OPTIONS} {_LAST}", ignored=_IGNORED, refused=f"{_REFUSED} qv"
)
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`pascal_attn_core.flash_attn.flash_attn_func`, which returns (out, lse) with ``return_attn_probs``.

    Raises:
        NotImplementedError: an argument is not supported, see the module.
    """
    result = functions.flash_attn_func(q, k, v, **options)
    return result[:2] if isinstance(result, tuple) else result


@called_as(
    f"qkv softmax_scale=None causal=False {_OPTIONS} deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    ignored="sm_margin",
    refused=_REFUSED,
)
def flash_attn_qkvpacked_func(qkv: Tensor, num_heads_q: int | None, **options: Any) -> Any:
    """:func:`flash_attn_func` with ``qkv [B, L, 3, H, D]``, or ``[B, L, num_heads_q + 2 * Hkv, D]``."""
    return flash_attn_func(*unpacked(qkv, num_heads_q), **options)


@called_as(
    f"q k v cu_seqlens_q cu_seqlens_k {_LONGEST} seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None "
    f"{_OPTIONS} {_LAST}",
    ignored=_IGNORED,
    refused=f"{_REFUSED} qv seqused_q seqused_k",
)
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`flash_attn_func` within each of several concatenated sequences; see
    :func:`pascal_attn_core.flash_attn.flash_attn_varlen_func`."""
    result = functions.flash_attn_varlen_func(q, k, v, **options)
    return result[:2] if isinstance(result, tuple) else result


# ---- without autograd ------------------------------------------------------------------------------------------------


@called_as(
    f"q k v k_new=None v_new=None qv=None out_=None {_LENGTHS} cu_seqlens_k_new=None seqused_q=None seqused_k=None "
    f"{_LONGEST} page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None "
    f"{_SCALES} softmax_scale=None causal=False {_SIDES} attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0 * out=None window_size=None",
    ignored=f"{_IGNORED} max_seqlen_q max_seqlen_k seqlens_rotary rotary_interleaved scheduler_metadata",
    refused=f"{_REFUSED} qv k_new v_new cu_seqlens_k_new seqused_q seqused_k page_table kv_batch_idx leftpad_k "
    "rotary_cos rotary_sin out_ out",
)
def flash_attn_forward(q: Tensor, **given: Any) -> Any:
    """``_flash_attn_forward`` for a batch, or for concatenated sequences with ``cu_seqlens_q`` and ``cu_seqlens_k``.

    Args:
        window_size: (left, right), as versions before 2026 took it.
        seqlens_rotary, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin: change nothing.
    Returns:
        (out, lse, an empty tensor, an empty tensor).
    Raises:
        NotImplementedError: new keys, a cache, rotation, scales or a tensor for the output are given.
    """
    return *raw.forward(q, **_with_sides(given))[:2], q.new_empty(0), q.new_empty(0)


@called_as(
    f"dout q k v out softmax_lse {_LENGTHS} sequed_q=None sequed_k=None {_LONGEST} dq=None dk=None dv=None "
    f"softmax_scale=None is_causal=False {_SIDES} softcap=0.0 deterministic=False sm_margin=0 * causal=None "
    "window_size=None",
    ignored="max_seqlen_q max_seqlen_k sm_margin",
    refused="sequed_q sequed_k",
)
def flash_attn_backward(is_causal: bool, causal: bool | None, **given: Any) -> Tensor:
    """``_flash_attn_backward``: writes the gradients into dq, dk and dv.

    Args:
        causal, window_size: the names of is_causal and of the two sides of the window before 2026.
        others: see :func:`.raw.backward`.
    Returns:
        An empty tensor.
    """
    return raw.backward(causal=is_causal if causal is None else causal, **_with_sides(given))


def _with_sides(given: dict[str, Any]) -> dict[str, Any]:
    window = given.pop("window_size")
    if window is not None:
        given["window_size_left"], given["window_size_right"] = window
    if (given["cu_seqlens_q"] is None) != (given["cu_seqlens_k"] is None):
        raise NotImplementedError("cu_seqlens_q is not supported without cu_seqlens_k, nor the other way round")
    return given
