"""flash-attn's functions without autograd: ``_flash_attn_forward``, ``_flash_attn_backward`` and their varlen forms.
Ring attention and diffusers' backend ``flash`` reach its kernels by them.

A forward pass returns lse, and a backward pass goes back from a given (out, lse), which may come from more keys than it
is handed (Dao 2023, FlashAttention-2, Algorithm 2). Shapes are flash-attn's: q ``[B, L, Hq, D]``, k ``[B, S, Hkv, D]``,
v ``[B, S, Hkv, Dv]``, lse float32 ``[B, Hq, L]``; packed q ``[total_q, Hq, D]``, k and v ``[total_k, Hkv, D]``, lse
``[Hq, total_q]``. A query that sees no key has lse = -inf and an output of 0. Dropout is not supported, so
``rng_state`` is zeros ``[2]``. Under torch.compile the graph ends before them and goes on behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import sdpa_backward
from ...call import without_autocast
from ...config import config_of
from ..options import PACKED, TOKENS, FlashOptions, alibi_mask, attend, check_layout, flash_options
from ..signatures import called_as
from ..varlen import read_lengths, varlen_attend

_OPTIONS = "dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SAVED = "dout q k v out softmax_lse dq dk dv"


@torch._disable_dynamo
@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``_flash_attn_forward`` of a batch, or ``_flash_attn_varlen_forward`` within each of concatenated sequences.

    Args:
        others: see :func:`pascal_attn_core.flash_attn.flash_attn_varlen_func`.
    Returns:
        (out, lse in float32, an empty tensor, rng_state).
    Raises:
        NotImplementedError: an argument is not supported.
    """
    options = _options(**given)
    with without_autocast(q):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            out, lse = attend(q, k, v, options, with_lse=True)
        else:
            out, lse = varlen_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, with_lse=True)
    assert lse is not None
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


@torch._disable_dynamo
@torch.no_grad()
def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, softmax_lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, **given: Any,
) -> Tensor:  # fmt: skip
    """``_flash_attn_backward`` and ``_flash_attn_varlen_backward``: writes the gradients into dq, dk and dv, zero after
    the last sequence.

    Args:
        deterministic: see :func:`pascal_attn_core.flash_attn.flash_attn_func`.
    Returns:
        An empty tensor, in place of an intermediate result that callers leave alone.
    """
    options, targets = _options(**given), (dq, dk, dv)
    check_layout(TOKENS if cu_seqlens_q is None else PACKED, q=q, k=k, v=v)
    check_layout((*q.shape[:-1], v.shape[-1]), out=out, dout=dout)
    for name, target, like in zip(("dq", "dk", "dv"), targets, (q, k, v)):
        check_layout(like.shape, **{name: target})
    if cu_seqlens_q is None or cu_seqlens_k is None:
        _write_gradients(targets, dout, q, k, v, out, softmax_lse, options)
        return q.new_empty(0)
    q_ends, k_ends = read_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    batch = len(q_ends) - 1
    options.check_slopes(batch, q.shape[1])
    for target in targets:
        target.zero_()
    for b in range(batch):
        i, j = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
        own = dq[None, i], dk[None, j], dv[None, j]
        saved = out[None, i], softmax_lse[None, :, i]
        _write_gradients(own, dout[None, i], q[None, i], k[None, j], v[None, j], *saved, options.part(b, b + 1))
    return q.new_empty(0)


flash_attn_forward = called_as(f"q k v {_OPTIONS} return_softmax=False", ignored="return_softmax")(forward)
flash_attn_backward = called_as(f"{_SAVED} {_OPTIONS} deterministic=False rng_state=None", ignored="rng_state")(
    backward
)
flash_attn_varlen_forward = called_as(
    f"q k v {_LENGTHS} {_OPTIONS} return_softmax=False block_table=None leftpad_k=None seqused_k=None "
    "zero_tensors=False num_splits=0",
    ignored="max_seqlen_q max_seqlen_k return_softmax zero_tensors num_splits",
    refused="block_table leftpad_k seqused_k",
)(forward)
flash_attn_varlen_backward = called_as(
    f"{_SAVED} {_LENGTHS} {_OPTIONS} deterministic=False rng_state=None zero_tensors=False",
    ignored="max_seqlen_q max_seqlen_k rng_state zero_tensors",
)(backward)


# ---- one call --------------------------------------------------------------------------------------------------------


def _options(
    *, dropout_p: float = 0.0, window_size_left: int = -1, window_size_right: int = -1, **given: Any
) -> FlashOptions:
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0 in functions without autograd, got {dropout_p}")
    return flash_options(window_size=(window_size_left, window_size_right), **given)


def _write_gradients(
    targets: Sequence[Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: FlashOptions,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v, from out and lse in flash-attn's layout."""
    check_layout((q.shape[0], q.shape[2], q.shape[1]), softmax_lse=lse)
    rules = options.rules()
    del rules["dropout_p"]
    grad_out, query, key, value, output = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    rules |= {"attn_mask": alibi_mask(options, q, k), "config": config_of(options.config)}
    with without_autocast(q):
        grads = sdpa_backward(grad_out, query, key, value, output, lse, **rules)
    for target, grad in zip(targets, grads):
        target.copy_(grad.transpose(1, 2))
