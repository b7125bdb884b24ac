"""Rotary position embedding: flash-attn's ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``.

Sums are computed in float32 (float64 for float64) and rounded once. Gradients flow to what is rotated; the tables of
cosines and sines are constants, as in flash-attn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import PACKED, TOKENS, FlashArgumentError, check_layout, check_whole_numbers, unpacked
from ..signatures import called_as

_PLACES = "seqlen_offsets=0 cu_seqlens=None max_seqlen=None"
# Cosines and sines of each token, ``[..., tokens, 1, rotary_dim / 2]``.
_Table = tuple[Tensor, Tensor]


@called_as(f"x cos sin {_PLACES} interleaved=False inplace=False conjugate=False")
def apply_rotary(x: Tensor, interleaved: bool, inplace: bool, conjugate: bool, **table: Any) -> Tensor:
    """Rotate the first ``rotary_dim`` numbers of each head; autograd does not look inside (as in flash-attn).

    Args:
        x: ``[B, L, H, D]``, or with ``cu_seqlens`` ``[total, H, D]``; D may be of any size.
        cos, sin: ``[positions, rotary_dim / 2]`` with rotary_dim <= D.
        seqlen_offsets: the position of the first token: a number, or whole numbers ``[B]``. Tokens at a position after
            the table are not rotated where the offsets are a tensor (as in flash-attn; checking would make a GPU wait).
        cu_seqlens: ``[B + 1]``, where each sequence starts; ``max_seqlen`` must come with it.
        interleaved: pairs are numbers 0 and 1, 2 and 3 ...; otherwise 0 and rotary_dim / 2 ...
        inplace: write into x and return it.
        conjugate: rotate back.
    Raises:
        TypeError, ValueError: arguments that do not fit together; x has not been touched.
    """
    cos, sin = _table_of(x, **table)
    with torch.no_grad():
        return _rotated(x, [(cos, -sin if conjugate else sin)], _How(_whole, interleaved, inplace))


@called_as(f"x cos sin interleaved=False inplace=False {_PLACES}")
def apply_rotary_emb(x: Tensor, interleaved: bool, inplace: bool, **table: Any) -> Tensor:
    """:func:`apply_rotary` with gradients: returns x rotated, of its shape and dtype."""
    return _differentiable(x, [_table_of(x, **table)], _How(_whole, interleaved, inplace))


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmb:
    """``ApplyRotaryEmb.apply`` is :func:`apply_rotary_emb`, for code that calls the autograd function by its name."""

    apply = staticmethod(apply_rotary_emb)


@called_as(
    "qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 num_heads_q=None", refused="cos_k sin_k"
)
def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seqlen_offsets: int | Tensor, num_heads_q: int | None
) -> Tensor:
    """Rotate the queries and keys within ``qkv``, in place.

    Args:
        qkv: ``[B, L, 3, H, D]``, or with ``num_heads_q`` ``[B, L, num_heads_q + 2 * num_heads_k, D]``.
        cos_k, sin_k: must be None: xPos is not provided.
        others: see :func:`apply_rotary`.
    Returns:
        qkv.
    """
    cut = functools.partial(unpacked, num_heads_q=num_heads_q)
    tables = [_table_of(cut(qkv)[0], cos, sin, seqlen_offsets)] * 2
    return _differentiable(qkv, tables, _How(cut, interleaved, inplace=True))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys within ``kv [B, L, 2, H, D]``, in place; returns kv. Arguments as :func:`apply_rotary`."""
    check_layout(("B", "tokens", 2, "heads", "head_dim"), kv=kv)
    tables = [_table_of(kv[:, :, 0], cos, sin, seqlen_offsets)]
    return _differentiable(kv, tables, _How(functools.partial(torch.unbind, dim=2), interleaved, inplace=True))


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables that grow as longer sequences come.

    Args:
        dim: rotary_dim, even.
        base: of the frequencies base ** (-2 i / dim). For NTK scaling pass the scaled base.
        interleaved: see :func:`apply_rotary`.
        scale_base: must be None: xPos is not provided.
        pos_idx_in_fp32: for programs written for flash-attn before 2.8; positions are always exact.
    """

    inv_freq: Tensor

    @called_as(
        "self dim base=10000.0 interleaved=False scale_base=None device=None * pos_idx_in_fp32=True",
        ignored="pos_idx_in_fp32",
        refused="scale_base",
    )
    def __init__(self, dim: int, base: float, interleaved: bool, device: Any) -> None:
        super().__init__()
        if dim % 2:
            raise FlashArgumentError(f"dim must be even, got {dim}")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / self.base**exponents

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Tables ``[seqlen, dim / 2]`` for at least ``seqlen`` positions, on ``device`` and in ``dtype``."""
        cached: Any = self._cos_cached
        fits = cached is not None and seqlen <= cached.shape[0] and (cached.device, cached.dtype) == (device, dtype)
        if fits and not (self.training and cached.is_inference()):
            return
        # Frequencies and positions stay in float32 (float64 tables: float64): a bfloat16 model has bfloat16 buffers.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        places = torch.arange(seqlen, device=device, dtype=exact)
        angles = places[:, None] * frequencies.to(device=device, dtype=exact)
        self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

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
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)


# ---- how it is computed ----------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """How a tensor is rotated; cut: the tensor -> views of its parts that are rotated, one for each table."""

    cut: Callable[[Tensor], Sequence[Tensor]]
    interleaved: bool
    inplace: bool


def _table_of(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Any = None, max_seqlen: Any = None
) -> _Table:
    """The cosines and sines of each token, 1 and 0 outside of the tables; the arguments are checked."""
    offsets = seqlen_offsets
    check_layout(TOKENS if cu_seqlens is None else PACKED, x=x)
    check_layout(("positions", "rotary_dim / 2"), cos=cos)
    check_layout(cos.shape, sin=sin)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise FlashArgumentError(f"cos must be [positions, at most {x.shape[-1] // 2}], got {list(cos.shape)}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise FlashArgumentError("cos and sin must not require a gradient: none is computed; pass cos.detach()")
    batch, tokens = x.shape[:2]
    if cu_seqlens is not None:
        check_whole_numbers(("B + 1",), cu_seqlens=cu_seqlens)
        if max_seqlen is None:
            raise FlashArgumentError("max_seqlen must be given with cu_seqlens, got None")
        batch, tokens = cu_seqlens.shape[0] - 1, max_seqlen
    if isinstance(offsets, Tensor):
        check_whole_numbers((batch,), seqlen_offsets=offsets)
    elif offsets < 0:
        raise FlashArgumentError(f"seqlen_offsets must not be negative, got {offsets}")
    last = tokens if isinstance(offsets, Tensor) else tokens + offsets
    if last > cos.shape[0]:
        raise FlashArgumentError(f"cos must have {last} positions, got {cos.shape[0]}")
    if cu_seqlens is not None:
        rows = _positions(cu_seqlens.long(), x.shape[0], offsets, cos.shape[0])
    elif isinstance(offsets, Tensor):
        rows = offsets[:, None].long() + torch.arange(tokens, device=offsets.device)
    else:
        return cos[offsets:last].unsqueeze(-2), sin[offsets:last].unsqueeze(-2)
    rows = rows.to(cos.device)
    outside = ((rows < 0) | (rows >= cos.shape[0]))[..., None]
    rows = rows.clamp(0, max(cos.shape[0] - 1, 0))
    return cos[rows].masked_fill(outside, 1).unsqueeze(-2), sin[rows].masked_fill(outside, 0).unsqueeze(-2)


def _positions(ends: Tensor, total: int, offsets: int | Tensor, outside: int) -> Tensor:
    """The position of each token ``[total]`` of sequences that end at ``ends [B + 1]``; from ``outside`` on after the
    last."""
    place = torch.arange(total, device=ends.device)
    sequence = torch.bucketize(place, ends[1:], right=True)
    first = offsets.long() if isinstance(offsets, Tensor) else torch.full_like(ends[1:], offsets)
    first = torch.nn.functional.pad(first, (0, 1), value=outside)
    return place - ends[sequence] + first[sequence]


def _rotated(x: Tensor, tables: list[_Table], how: _How) -> Tensor:
    """x with its parts rotated: x itself where it is rotated in place, else a copy."""
    out = x if how.inplace else x.clone()
    # Where x is a view, autograd does not see the writing, as in flash-attn: it would forbid it for a part of a split
    # or an unbind, ``q, k, v = qkv.unbind(2)``, although its neighbours do not change.
    base = out.data if how.inplace and out._is_view() else out
    dtype = torch.promote_types(x.dtype, torch.float32)
    for part, table in zip(how.cut(base), tables):
        cos, sin = (values.to(dtype) for values in table)
        targets = _pairs(part[..., : 2 * cos.shape[-1]], how.interleaved)
        first, second = (target.to(dtype, copy=True) for target in targets)
        targets[0].copy_(first * cos - second * sin)
        targets[1].copy_(first * sin + second * cos)
    return out


def _differentiable(x: Tensor, tables: list[_Table], how: _How) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Rotation.apply(x, how, tables)
        return out
    return _rotated(x, tables, how)


class _Rotation(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _How, tables: list[_Table]) -> Tensor:
        ctx.save_for_backward(*itertools.chain(*tables))
        ctx.how = how
        # Not marked as changed in place: a leaf may be rotated too, as in flash-attn.
        return _rotated(x, tables, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = [(cos, -sin) for cos, sin in zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2])]
        return _Rotation.apply(grads[0], ctx.how._replace(inplace=False), back), None, None


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second number of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _whole(x: Tensor) -> tuple[Tensor]:
    return (x,)


def rotary_emb(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conjugate: bool) -> None:
    """``rotary_emb.apply_rotary`` of flash-attn's first versions: (x1, x2) rotated into (out1, out2),
    all ``[..., D / 2]``; cos and sin broadcast to them. ``conjugate``: the other way round."""
    a, b, cos, sin = (t.float() for t in (x1, x2, cos, sin))
    sin = -sin if conjugate else sin
    rotated = a * cos - b * sin, a * sin + b * cos  # before x1 and x2 are written, which may be the outputs
    out1.copy_(rotated[0])
    out2.copy_(rotated[1])
