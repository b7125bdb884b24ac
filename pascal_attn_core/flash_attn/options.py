"""Shared by all of flash-attn's functions: their options, checked once, and the call of ``sdpa`` in flash-attn's
layout."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import sdpa, sdpa_with_lse
from ..call import accumulate_dtype
from ..call.lazy_mask import LazyMask, mask_rule
from ..config import AttentionConfig, config_of
from ..machine.device import CPU_LIKE

TOKENS = "B", "tokens", "heads", "head_dim"
PACKED = "total", "heads", "head_dim"


class FlashArgumentError(ValueError, RuntimeError):
    """An invalid argument of a flash-attn function.

    A ``ValueError`` as everywhere in this package, and the ``RuntimeError`` that flash-attn raises there.
    """


class FlashOptions(NamedTuple):
    """The options of one call: those that ``sdpa`` takes too, and ALiBi's slopes ``[Hq]`` or ``[B, Hq]``."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    alignment: str = "lower_right"
    window: tuple[int, int] | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    deterministic: bool = False
    config: AttentionConfig | None = None

    def rules(self) -> dict[str, Any]:
        """The options that ``sdpa`` takes too, by its names."""
        return {**dict(zip(self._fields[:6], self)), "enable_gqa": True}

    def check_slopes(self, batch: int, heads: int) -> None:
        if self.slopes is not None and self.slopes.shape not in ((heads,), (batch, heads)):
            shape = list(self.slopes.shape)
            raise FlashArgumentError(f"alibi_slopes must be [{heads}] or [{batch}, {heads}], got {shape}")

    def part(self, first: int, last: int) -> FlashOptions:
        """The options of the sequences ``first ... last - 1``."""
        if self.slopes is None or self.slopes.dim() == 1:
            return self
        return self._replace(slopes=self.slopes[first:last])


def flash_options(
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> FlashOptions:
    """flash-attn's options.

    Raises:
        TypeError, ValueError: an invalid option.
    """
    if not 0.0 <= dropout_p < 1.0:
        raise FlashArgumentError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    if softcap == math.inf:
        raise FlashArgumentError(f"softcap must be finite (0 = off), got {softcap}")
    if not (alibi_slopes is None or isinstance(alibi_slopes, Tensor)):
        raise TypeError(f"alibi_slopes must be a tensor, got {type(alibi_slopes).__name__}")
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise FlashArgumentError("alibi_slopes must not require a gradient, none is computed: pass them detached")
    try:
        left, right = (max(operator.index(side), -1) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two whole numbers (left, right), got {window_size!r}") from None
    window = None if left == right == -1 else (left, right)
    cap = float(softcap) if softcap is not None and softcap > 0 else None
    rules = float(dropout_p), bool(causal), softmax_scale, "lower_right", window, cap
    return FlashOptions(*rules, alibi_slopes, bool(deterministic))


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, *, mask: Any = None, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention in flash-attn's layout.

    Args:
        q: ``[B, L, Hq, D]``; k ``[B, S, Hkv, D]``; v ``[B, S, Hkv, Dv]``.
        mask: as ``sdpa`` takes it; not beside slopes.
    Returns:
        (out ``[B, L, Hq, Dv]``, contiguous; lse ``[B, Hq, L]`` or None).
    """
    check_layout(TOKENS, q=q)
    check_layout((q.shape[0], *TOKENS[1:]), k=k, v=v)
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    mask = mask if options.slopes is None else alibi_mask(options, q, k)
    config, needs_grad = options.config, torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if options.deterministic and needs_grad and q.device.type not in CPU_LIKE:
        # torch's fused kernels sum gradients in the order in which blocks finish
        config = config_of(options.config)
        config = replace(config, route="tiled") if config.route == "auto" else config
    attention = sdpa_with_lse if with_lse else sdpa
    result = attention(query, key, value, mask, **options.rules(), config=config)
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out.transpose(1, 2).contiguous(), lse


def alibi_mask(options: FlashOptions, q: Tensor, k: Tensor) -> LazyMask | None:
    """-slope * \\|i + S - L - j\\| as a rule, never a matrix."""
    if options.slopes is None:
        return None
    batch, tokens, heads = q.shape[:3]
    options.check_slopes(batch, heads)
    rows = options.slopes.detach().to(accumulate_dtype(q.dtype)).expand(batch, heads)
    offset = torch.full((), k.shape[1] - tokens, dtype=torch.int64, device=q.device)
    shape = (batch, heads, tokens, k.shape[1])
    return LazyMask(shape, _alibi, device=q.device, dtype=rows.dtype, tensors=(rows, offset))


@mask_rule
def _alibi(batch: Tensor, head: Tensor, query: Tensor, key: Tensor, slopes: Tensor, offset: Tensor) -> Tensor:
    """slopes ``[B, Hq]``; offset: S - L, the lower-right alignment."""
    return slopes[batch, head] * -(query + offset - key).abs()


def check_layout(layout: Sequence[int | str], **tensors: Any) -> None:
    """Raises TypeError or ValueError where one of the named tensors is no tensor of this layout, which has the size of
    each dimension, or a word for one that may have any."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor {_words(layout)}, got {type(tensor).__name__}")
        sizes = zip(layout, tensor.shape)
        if len(layout) != tensor.dim() or any(size != found for size, found in sizes if not isinstance(size, str)):
            raise FlashArgumentError(f"{name} must be {_words(layout)}, got {list(tensor.shape)}")


def unpacked(qkv: Tensor, num_heads_q: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: views of ``[B, L, 3, H, D]``, or of ``[B, L, num_heads_q + 2 * num_heads_k, D]``."""
    if num_heads_q is None or not isinstance(qkv, Tensor) or qkv.dim() == 5:
        check_layout(("B", "tokens", 3, "heads", "head_dim"), qkv=qkv)
        q, k, v = qkv.unbind(2)
        return q, k, v
    check_layout(("B", "tokens", "num_heads_q + 2 * num_heads_k", "head_dim"), qkv=qkv)
    heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or heads_k < 1:
        raise FlashArgumentError(
            f"qkv must be [B, tokens, num_heads_q + 2 * num_heads_k, head_dim] with num_heads_q = {num_heads_q}, got "
            f"{list(qkv.shape)}"
        )
    q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    return q, k, v


def _words(layout: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, layout))}]"


def check_whole_numbers(layout: Sequence[int | str], **tensors: Any) -> None:
    """:func:`check_layout` for tensors of whole numbers."""
    check_layout(layout, **tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"{name} must be whole numbers, got {tensor.dtype}")
