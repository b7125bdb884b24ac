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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall, Gradients, Results, Wanted, check_call
from ...config import AttentionConfig, default_config
from ...routes.run import gradients, run
from ..options import FlashArgumentError, FlashOptions, alibi_mask, check_layout
from ..signatures import called_as
from ..varlen import cut_to_used, read_ends, varlen_attend

_ROWS = 128  # flash-attn rounds the rows of softmax_d up to it

_OPTIONS = "dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SAVED = "dout q k v out softmax_lse dq dk dv"


@called_as(f"q k v {_OPTIONS} return_softmax=False", ignored="return_softmax")
def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_flash_attn_forward``; for its arguments see :func:`pascal_attn_core.flash_attn.flash_attn_func`.

    Returns:
        (out ``[B, L, Hq, Dv]``, lse float32 ``[B, Hq, L]``, an empty tensor, rng_state).
    """
    check_layout("[B, tokens, heads, head_dim]", 4, q=q, k=k, v=v)
    with torch.no_grad():
        out, lse = _attend(q, k, v, _options(q, q.shape[0], **given))
    return out, lse, q.new_empty(0), _rng_state(q)


@called_as(f"{_SAVED} {_OPTIONS} deterministic=False rng_state=None", ignored="rng_state")
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
    check_layout("[B, tokens, heads, head_dim]", 4, q=q, k=k, v=v, out=out, dout=dout)
    options = _options(q, q.shape[0], **given)
    with torch.no_grad():
        grads = _go_back(dout, q, k, v, Results(out, softmax_lse), options)
        for name, target, grad in zip(("dq", "dk", "dv"), (dq, dk, dv), grads):
            if target is not None:
                _check_shape(name, target, grad.shape)
                target.copy_(grad)
        sums = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return torch.nn.functional.pad(sums, (0, -sums.shape[2] % _ROWS))


@called_as(
    f"q k v {_LENGTHS} {_OPTIONS} return_softmax=False block_table=None leftpad_k=None seqused_k=None "
    "zero_tensors=False num_splits=0",
    ignored="max_seqlen_q max_seqlen_k return_softmax zero_tensors num_splits",
    refused="leftpad_k",
)
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
    check_layout("[total, heads, head_dim]", 3, q=q)
    if block_table is not None and seqused_k is not None:
        raise NotImplementedError("block_table is not supported by Pascal Attention with seqused_k")
    if seqused_k is not None:
        k, v, cu_seqlens_k = cut_to_used("seqused_k", cu_seqlens_k, seqused_k, k, v)
    with torch.no_grad():
        out, lse = varlen_attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, lambda batch: _options(q, batch, **given), with_lse=True,
            block_table=block_table,
        )  # fmt: skip
    assert lse is not None
    return out, lse, q.new_empty(0), _rng_state(q)


@called_as(
    f"{_SAVED} {_LENGTHS} {_OPTIONS} deterministic=False rng_state=None zero_tensors=False",
    ignored="max_seqlen_q max_seqlen_k rng_state zero_tensors",
)
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
    check_layout("[total, heads, head_dim]", 3, q=q, k=k, v=v, out=out, dout=dout)
    batch = len(cu_seqlens_q) - 1
    options = _options(q, batch, **given)
    softmax_d = q.new_zeros(q.shape[1], q.shape[0] + _ROWS * batch, dtype=torch.float32)
    with torch.no_grad():
        for name, target, like in zip(("dq", "dk", "dv"), (dq, dk, dv), (q, k, v)):
            if target is not None:
                _check_shape(name, target, like.shape)
                target.zero_()
        for b, of_q, of_k in _sequences(cu_seqlens_q, cu_seqlens_k, q, k):
            saved = Results(out[None, of_q], softmax_lse[None, :, of_q])
            one = dout[None, of_q], q[None, of_q], k[None, of_k], v[None, of_k]
            for target, grad, tokens in zip(
                (dq, dk, dv), _go_back(*one, saved, options.part(b, b + 1)), (of_q, of_k, of_k)
            ):
                if target is not None:
                    target[tokens] = grad[0]
            sums = (dout[of_q].float() * out[of_q].float()).sum(-1).T
            softmax_d[:, of_q.start + _ROWS * b : of_q.stop + _ROWS * b] = sums
    return softmax_d


# ---- one call --------------------------------------------------------------------------------------------------------


def _options(
    q: Tensor,
    batch: int,
    *,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
    **given: Any,
) -> FlashOptions:
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0 in functions without autograd, got {dropout_p}")
    return FlashOptions.of(
        dropout_p=0.0,
        **given,
        window_size=(window_size_left, window_size_right),
        softcap=softcap or 0.0,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach(),
        deterministic=deterministic,
        batch=batch,
        heads=q.shape[-2],
    )


def _checked(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> AttentionCall:
    query, key, value = (t.detach().transpose(1, 2) for t in (q, k, v))
    given = options.given(enable_gqa=q.shape[2] != k.shape[2])
    return check_call(query, key, value, alibi_mask(options.slopes, q, k), given)


def _config(options: FlashOptions) -> AttentionConfig:
    config = options.config or default_config()
    return config.in_fixed_order() if options.deterministic else config


def _attend(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> tuple[Tensor, Tensor]:
    """(out ``[B, L, Hq, Dv]``, lse ``[B, Hq, L]``)."""
    out, lse, *_ = run(_checked(q, k, v, options), _config(options), with_lse=True)
    assert lse is not None
    return out.transpose(1, 2).contiguous(), lse


def _go_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Results, options: FlashOptions
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v in their layout, from out and lse in flash-attn's layout."""
    call = _checked(q, k, v, options)
    expected = [*q.shape[:3], v.shape[-1]]
    lse = saved.lse
    assert lse is not None
    rows = list(call.out_shape[:-1])
    for name, tensor, shape in (("out", saved.out, expected), ("dout", dout, expected), ("softmax_lse", lse, rows)):
        _check_shape(name, tensor, shape)
    saved = Results(saved.out.transpose(1, 2).to(q.dtype), lse.to(call.sums_dtype))
    grads: Gradients = gradients(call, _config(options), saved, Wanted(dout.transpose(1, 2)))
    return tuple(grad.transpose(1, 2) for grad in (grads.query, grads.key, grads.value))


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


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise FlashArgumentError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _rng_state(q: Tensor) -> Tensor:
    """flash-attn's state of dropout."""
    return q.new_zeros(2, dtype=torch.int64)
