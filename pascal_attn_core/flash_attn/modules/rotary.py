"""Rotary position embedding: flash-attn's ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``.

Sums are computed in float32 (float64 for float64) and rounded once. Gradients flow to what is rotated; the tables of
cosines and sines are constants, as in flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import FlashArgumentError, check_layout

__all__ = [
    "ApplyRotaryEmb",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first ``rotary_dim`` numbers of each head; autograd does not look inside (as in flash-attn).

    Args:
        x: ``[B, L, H, D]``, or with ``cu_seqlens`` ``[total, H, D]``; D may be of any size.
        cos, sin: ``[positions, rotary_dim / 2]`` with rotary_dim <= D.
        seqlen_offsets: the position of the first token: a number, or whole numbers ``[B]``. Tokens at a position behind
            the table are not rotated where the offsets are a tensor (as in flash-attn; checking would make a GPU wait).
        cu_seqlens: ``[B + 1]``, where each sequence starts; ``max_seqlen`` must come with it.
        interleaved: pairs are numbers 0 and 1, 2 and 3 ...; otherwise 0 and rotary_dim / 2 ...
        inplace: write into x and return it.
        conjugate: rotate back.
    Raises:
        TypeError, ValueError: arguments that do not fit together; x has not been touched.
    """
    positions = _positions(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    with torch.no_grad():
        return _rotate(x, cos, sin, positions, interleaved=interleaved, inplace=inplace, conjugate=conjugate)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`apply_rotary` with gradients: returns x rotated, of its shape and dtype."""
    positions = _positions(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return _differentiable(x, cos, sin, positions, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmb:
    """``ApplyRotaryEmb.apply`` is :func:`apply_rotary_emb`, for code that calls the autograd function by its name."""

    apply = staticmethod(apply_rotary_emb)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys within ``qkv``, in place.

    Args:
        qkv: ``[B, L, 3, H, D]``, or with ``num_heads_q`` ``[B, L, num_heads_q + 2 * num_heads_k, D]``.
        cos_k, sin_k: tables of their own for the keys (xPos); None = those of the queries.
        others: see :func:`apply_rotary`.
    Returns:
        qkv.
    """
    q, k = _queries_and_keys(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    parts = [(q, cos, sin), (k, cos_k, sin_k)]
    checked = [(*part, _positions(*part, seqlen_offsets, None, None)) for part in parts]
    return _in_place_parts(qkv, num_heads_q, checked, interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys within ``kv [B, L, 2, H, D]``, in place; returns kv. Arguments as :func:`apply_rotary`."""
    check_layout("[B, tokens, 2, heads, head_dim]", 5, kv=kv)
    if kv.shape[2] != 2:
        raise FlashArgumentError(f"kv must be [B, tokens, 2, heads, head_dim], got shape {tuple(kv.shape)}")
    positions = _positions(kv[:, :, 0], cos, sin, seqlen_offsets, None, None)
    return _in_place_parts(kv, None, [(kv[:, :, 0], cos, sin, positions)], interleaved)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(-second, first) of each pair of numbers of the last dimension, in the places of (first, second)."""
    first, second = _pairs(x, interleaved)
    return _joined(-second, first, interleaved)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As :func:`apply_rotary_emb`, in the dtype of x, differentiable in the tables too.

    Args:
        x: ``[B, L, H, D]``; cos, sin: ``[L, rotary_dim / 2]`` or ``[B, L, rotary_dim / 2]``.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise FlashArgumentError(f"cos must be [..., at most {x.shape[-1] // 2}], got shape {tuple(cos.shape)}")
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = _pairs(turned, interleaved)
    turned = _joined(first * cos - second * sin, first * sin + second * cos, interleaved)
    return torch.cat([turned, rest], dim=-1)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables that grow as longer sequences come; with ``scale_base`` xPos.

    Args:
        dim: rotary_dim, even.
        base: of the frequencies base ** (-2 i / dim). For NTK scaling pass the scaled base.
        interleaved: see :func:`apply_rotary`.
        scale_base: None = plain; otherwise queries are multiplied and keys divided by a power of
            (2 i + 0.4 dim) / (1.4 dim) that grows by one every ``scale_base`` tokens (xPos, arXiv 2212.10554).
        pos_idx_in_fp32: for programs written for flash-attn before 2.8; positions are always exact.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        *,
        pos_idx_in_fp32: bool = True,
    ):
        super().__init__()
        if dim % 2:
            raise FlashArgumentError(f"dim must be even, got {dim}")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / self.base**exponents

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Tables ``[seqlen, dim / 2]`` for at least ``seqlen`` positions, on ``device`` and in ``dtype``."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == device
            and cached.dtype == dtype
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Frequencies and positions stay in float32 (float64 tables: float64): a bfloat16 model has bfloat16 buffers.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        places = torch.arange(seqlen, device=device, dtype=exact)
        angles = places[:, None] * frequencies.to(device=device, dtype=exact)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (places - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=exact) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys, in place.

        Args:
            qkv: ``[B, L, 3, H, D]``, with ``num_heads_q`` ``[B, L, num_heads_q + 2 * num_heads_k, D]``, or with ``kv``
                the queries ``[B, L, Hq, D]``.
            kv: ``[B, S, 2, Hkv, D]``.
            seqlen_offset: position of the first token, a number or whole numbers ``[B]``; with the latter
                ``max_seqlen`` says for how many positions tables are needed.
        Returns:
            qkv, or with ``kv`` (q, kv).
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            tokens = qkv.shape[1] if kv is None else max(qkv.shape[1], kv.shape[1])
            max_seqlen = tokens + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise FlashArgumentError("max_seqlen must be given with the first seqlen_offset that is a tensor, got None")
        cos_k, sin_k = (self._cos_k_cached, self._sin_k_cached) if self.scale is not None else (None, None)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


# ---- how it is computed ----------------------------------------------------------------------------------------------


def _positions(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor | slice:
    """The row of the tables of each token: a slice, or whole numbers ``[B, L]`` or ``[total]``.

    Raises:
        TypeError, ValueError: arguments that do not fit together.
    """
    if cu_seqlens is None:
        check_layout("[B, tokens, heads, head_dim]", 4, x=x)
        batch, tokens = x.shape[:2]
    else:
        check_layout("[total, heads, head_dim]", 3, x=x)
        check_layout("[B + 1]", 1, cu_seqlens=cu_seqlens)
        if max_seqlen is None:
            raise FlashArgumentError("max_seqlen must be given with cu_seqlens, got None")
        batch, tokens = cu_seqlens.shape[0] - 1, max_seqlen
    check_layout("[positions, rotary_dim / 2]", 2, cos=cos, sin=sin)
    if cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise FlashArgumentError(
            f"cos and sin must be [positions, at most {x.shape[-1] // 2}], got {list(cos.shape)} and {list(sin.shape)}"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise FlashArgumentError("cos and sin must not require a gradient: none is computed; pass cos.detach()")
    if isinstance(offsets, Tensor):
        if offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
            raise FlashArgumentError(
                f"seqlen_offsets must be int32 or int64 [{batch}], got {offsets.dtype} {list(offsets.shape)}"
            )
        last = tokens
    else:
        last = tokens + offsets
        if offsets < 0:
            raise FlashArgumentError(f"seqlen_offsets must not be negative, got {offsets}")
    if last > cos.shape[0]:
        raise FlashArgumentError(f"cos must have {last} positions, got {cos.shape[0]}")
    if cu_seqlens is None:
        if not isinstance(offsets, Tensor):
            return slice(offsets, last)
        return offsets[:, None].long() + torch.arange(tokens, device=offsets.device)
    ends = cu_seqlens.long()
    place = torch.arange(x.shape[0], device=ends.device)
    sequence = torch.searchsorted(ends, place, right=True) - 1
    behind = sequence >= batch  # tokens behind the last sequence belong to none
    sequence = sequence.clamp(max=max(batch - 1, 0))
    place = place - ends[sequence]
    place = place + (offsets[sequence].long() if isinstance(offsets, Tensor) else offsets)
    return place.masked_fill(behind, cos.shape[0])


def _table(cos: Tensor, sin: Tensor, positions: Tensor | slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token, ``[..., tokens, 1, rotary_dim / 2]``; 1 and 0 outside of the tables."""
    if isinstance(positions, slice):
        return cos[positions].to(dtype).unsqueeze(-2), sin[positions].to(dtype).unsqueeze(-2)
    positions = positions.to(cos.device)
    outside = ((positions < 0) | (positions >= cos.shape[0]))[..., None]
    rows = positions.clamp(0, max(cos.shape[0] - 1, 0))
    cos, sin = cos[rows].masked_fill(outside, 1), sin[rows].masked_fill(outside, 0)
    return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | slice,
    *,
    interleaved: bool,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    rotary_dim = 2 * cos.shape[1]
    cos, sin = _table(cos, sin, positions, dtype)
    if conjugate:
        sin = -sin
    first, second = (part.to(dtype) for part in _pairs(x[..., :rotary_dim], interleaved))
    turned = first * cos - second * sin, first * sin + second * cos
    out = x if inplace else torch.empty_like(x)
    for target, part in zip(_pairs(out[..., :rotary_dim], interleaved), turned):
        target.copy_(part)
    if not inplace:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second number of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


class _Rotation(torch.autograd.Function):
    """One rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Any, options: tuple[bool, bool, bool]) -> Any:
        interleaved, inplace, conjugate = options
        source = _writable(x) if inplace else x
        out = _rotate(source, cos, sin, positions, interleaved=interleaved, inplace=inplace, conjugate=conjugate)
        _save(ctx, [(cos, sin, positions)])
        ctx.options = interleaved, False, not conjugate
        # Not marked as changed in place: a leaf may be rotated too, as in flash-attn.
        return x if inplace else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ((cos, sin, positions),) = _saved(ctx)
        return _Rotation.apply(grads[0], cos, sin, positions, ctx.options), None, None, None, None


class _RotationOfParts(torch.autograd.Function):
    """Rotations of parts of one tensor, in place."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, num_heads_q: int | None, tables: Any, interleaved: bool) -> Tensor:
        for part, (cos, sin, positions) in zip(_parts(_writable(packed), num_heads_q), tables):
            _rotate(part, cos, sin, positions, interleaved=interleaved, inplace=True)
        _save(ctx, tables)
        ctx.options = num_heads_q, interleaved
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        num_heads_q, interleaved = ctx.options
        # a copy: the incoming gradient may be shared with others
        grad = grads[0].clone()
        for part, (cos, sin, positions) in zip(_parts(grad, num_heads_q), _saved(ctx)):
            part.copy_(_Rotation.apply(part.clone(), cos, sin, positions, (interleaved, False, True)))
        return grad, None, None, None


def _writable(x: Tensor) -> Tensor:
    """x, to be written in place.

    Where x is a view autograd does not see the writing, as in flash-attn: it would forbid it for a part of a split or
    an unbind, ``q, k, v = qkv.unbind(2)``, although its neighbours do not change.
    """
    return x.data if x._is_view() else x


def _save(ctx: Any, tables: list[tuple[Tensor, Tensor, Any]]) -> None:
    tensors = [t for table in tables for t in table if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.slices = [None if isinstance(table[2], Tensor) else table[2] for table in tables]


def _saved(ctx: Any) -> list[tuple[Tensor, Tensor, Any]]:
    tensors = iter(ctx.saved_tensors)
    return [(next(tensors), next(tensors), next(tensors) if cut is None else cut) for cut in ctx.slices]


def _differentiable(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | slice, interleaved: bool, inplace: bool
) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Rotation.apply(x, cos, sin, positions, (interleaved, inplace, False))
        return out
    return _rotate(x, cos, sin, positions, interleaved=interleaved, inplace=inplace)


def _in_place_parts(
    packed: Tensor,
    num_heads_q: int | None,
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor | slice]],
    interleaved: bool,
) -> Tensor:
    if torch.is_grad_enabled() and packed.requires_grad:
        out: Tensor = _RotationOfParts.apply(packed, num_heads_q, [part[1:] for part in parts], interleaved)
        return out
    for part, cos, sin, positions in parts:
        _rotate(part, cos, sin, positions, interleaved=interleaved, inplace=True)
    return packed


def _parts(packed: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """What is rotated of ``kv`` or of ``qkv``."""
    if packed.dim() == 5 and packed.shape[2] == 2:
        return (packed[:, :, 0],)
    return _queries_and_keys(packed, num_heads_q)


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views ``[B, L, Hq, D]`` and ``[B, L, Hk, D]``."""
    if isinstance(qkv, Tensor) and qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if num_heads_q is None:
        check_layout("[B, tokens, 3, heads, head_dim]", 5, qkv=qkv)
        raise FlashArgumentError(f"qkv must be [B, tokens, 3, heads, head_dim], got shape {tuple(qkv.shape)}")
    check_layout("[B, tokens, num_heads_q + 2 * num_heads_k, head_dim]", 4, qkv=qkv)
    heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or heads_k < 0:
        raise FlashArgumentError(
            f"qkv must be [B, tokens, num_heads_q + 2 * num_heads_k, head_dim] with num_heads_q = {num_heads_q}, got "
            f"shape {tuple(qkv.shape)}"
        )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
