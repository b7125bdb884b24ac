"""flash-attn's functions without autograd: ``_flash_attn_forward``, ``_flash_attn_backward`` and their varlen forms.
Ring attention and diffusers' backend ``flash`` reach its kernels by them.

A forward pass returns lse, and a backward pass goes back from a given (out, lse), which may come from more keys than it
is handed (Dao 2023, FlashAttention-2, Algorithm 2). Shapes are flash-attn's: q ``[B, L, Hq, D]``, k ``[B, S, Hkv, D]``,
v ``[B, S, Hkv, Dv]``, lse float32 ``[B, Hq, L]``; packed q ``[total_q, Hq, D]``, k and v ``[total_k, Hkv, D]``, lse
``[Hq, total_q]``. A query that sees no key has lse = -inf and an output of 0. Dropout is not supported, so
``rng_state`` is zeros ``[2]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...attention import sdpa_backward
from ...call import without_autocast
from ..options import PACKED, TOKENS, FlashArgumentError, FlashOptions, alibi_mask, attend, check_layout, flash_options
from ..signatures import called_as
from ..varlen import cut_to_used, read_ends, varlen_attend

_ROWS = 128  # flash-attn rounds the rows of softmax_d up to it

_OPTIONS = "dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SAVED = "dout q k v out softmax_lse dq dk dv"


@called_as(f"q k v {_OPTIONS} return_softmax=False", ignored="return_softmax")
@torch.no_grad()
def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_forward``; for its arguments see :func:`pascal_attn_core.flash_attn.flash_attn_func`.

    Returns:
        (out ``[B, L, Hq, Dv]``, lse float32 ``[B, Hq, L]``, an empty tensor, rng_state).
    """
    check_layout(TOKENS, q=q)
    with without_autocast(q):
        return _results(q, *attend(q, k, v, _options(**given), with_lse=True))


@called_as(f"{_SAVED} {_OPTIONS} deterministic=False rng_state=None", ignored="rng_state")
@torch.no_grad()
def flash_attn_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, **given: Any,
) -> Tensor:  # fmt: skip
    """``_flash_attn_backward``: writes the gradients into dq, dk and dv where they are tensors.

    Args:
        dout, out: ``[B, L, Hq, Dv]``; softmax_lse: ``[B, Hq, L]``.
        deterministic: see :func:`pascal_attn_core.flash_attn.flash_attn_func`.
    Returns:
        float32 ``[B, Hq, L rounded up to 128]``: the sum over dout * out, zero after the last query.
    """
    check_layout(TOKENS, q=q, k=k, v=v)
    _check_targets((dq, dk, dv), (q, k, v))
    grads = _go_back(dout, q, k, v, out, softmax_lse, _options(**given))
    for target, grad in zip((dq, dk, dv), grads):
        if target is not None:
            target.copy_(grad)
    sums = _sums(dout, out).transpose(1, 2)
    return pad(sums, (0, -sums.shape[2] % _ROWS))


@called_as(
    f"q k v {_LENGTHS} {_OPTIONS} return_softmax=False block_table=None leftpad_k=None seqused_k=None "
    "zero_tensors=False num_splits=0",
    ignored="max_seqlen_q max_seqlen_k return_softmax zero_tensors num_splits",
    refused="leftpad_k",
)
@torch.no_grad()
def flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor | None,
    seqused_k: Tensor | None, **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``_flash_attn_varlen_forward``: :func:`flash_attn_forward` within each of several concatenated sequences.

    Args:
        seqused_k: int32 ``[B]``: only this many first keys of each sequence count.
        others: see :func:`pascal_attn_core.flash_attn.flash_attn_varlen_func`.
    Returns:
        (out ``[total_q, Hq, Dv]``, lse float32 ``[Hq, total_q]``, an empty tensor, rng_state).
    Raises:
        NotImplementedError: leftpad_k is given, or block_table together with seqused_k.
    """
    if block_table is not None and seqused_k is not None:
        raise NotImplementedError("block_table is not supported by Pascal Attention with seqused_k")
    if seqused_k is not None:
        k, v, cu_seqlens_k = cut_to_used("seqused_k", cu_seqlens_k, seqused_k, k, v)
    check_layout(PACKED, q=q)
    options = _options(**given)
    with without_autocast(q):
        found = varlen_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options, with_lse=True, block_table=block_table)
    return _results(q, *found)


@called_as(
    f"{_SAVED} {_LENGTHS} {_OPTIONS} deterministic=False rng_state=None zero_tensors=False",
    ignored="max_seqlen_q max_seqlen_k rng_state zero_tensors",
)
@torch.no_grad()
def flash_attn_varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **given: Any,
) -> Tensor:  # fmt: skip
    """``_flash_attn_varlen_backward``: writes the gradients into dq, dk and dv where they are tensors, zero after the
    last sequence.

    Returns:
        float32 ``[Hq, total_q + 128 * B]``: the sum over dout * out of each query, in the places of its sequence's
        first query plus 128 times the number of the sequence; else zero.
    """
    check_layout(PACKED, q=q, k=k, v=v)
    targets, batch, options = (dq, dk, dv), len(cu_seqlens_q) - 1, _options(**given)
    options.check_slopes(batch, q.shape[1])
    _check_targets(targets, (q, k, v))
    for target in targets:
        if target is not None:
            target.zero_()
    softmax_d = q.new_zeros(q.shape[1], q.shape[0] + _ROWS * batch, dtype=torch.float32)
    for b, of_q, of_k in _sequences(cu_seqlens_q, cu_seqlens_k, q, k):
        one = dout[None, of_q], q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q], softmax_lse[None, :, of_q]
        for target, grad, tokens in zip(targets, _go_back(*one, options.part(b, b + 1)), (of_q, of_k, of_k)):
            if target is not None:
                target[tokens] = grad[0]
        softmax_d[:, of_q.start + _ROWS * b : of_q.stop + _ROWS * b] = _sums(dout[of_q], out[of_q]).T
    return softmax_d


# ---- one call --------------------------------------------------------------------------------------------------------


def _options(*, dropout_p: float, window_size_left: int, window_size_right: int, **given: Any) -> FlashOptions:
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0 in functions without autograd, got {dropout_p}")
    return flash_options(window_size=(window_size_left, window_size_right), **given)


def _results(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert lse is not None
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


def _go_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: FlashOptions
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v in their layout, from out and lse in flash-attn's layout."""
    check_layout((*q.shape[:3], v.shape[-1]), out=out, dout=dout)
    check_layout((q.shape[0], q.shape[2], q.shape[1]), softmax_lse=lse)
    rules, config = options.rules._asdict(), options.config_in_force
    del rules["dropout_p"]
    given = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
    with without_autocast(q):
        grads = sdpa_backward(*given, lse, alibi_mask(options, q, k), **rules, config=config)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _sums(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.float() * out.float()).sum(-1)


def _check_targets(targets: tuple[Tensor | None, ...], likes: tuple[Tensor, ...]) -> None:
    for name, target, like in zip(("dq", "dk", "dv"), targets, likes):
        if target is not None:
            check_layout(like.shape, **{name: target})


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Number, queries and keys of each sequence."""
    ends_q = read_ends("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    ends_k = read_ends("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(ends_q) != len(ends_k):
        raise FlashArgumentError(
            f"cu_seqlens_q and cu_seqlens_k must both be [B + 1], got [{len(ends_q)}] and [{len(ends_k)}]"
        )
    for b, (of_q, of_k) in enumerate(zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k))):
        yield b, slice(*of_q), slice(*of_k)
