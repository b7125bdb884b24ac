"""Shared by all of flash-attn's functions: their options, checked once, and the call of ``sdpa`` in flash-attn's
layout."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import sdpa, sdpa_with_lse
from ..call import Options, accumulate_dtype
from ..call.lazy_mask import LazyMask, mask_rule
from ..config import AttentionConfig, default_config
from ..machine.device import CPU_LIKE


class FlashArgumentError(ValueError, RuntimeError):
    """An invalid argument of a flash-attn function.

    A ``ValueError`` as everywhere in this package, and the ``RuntimeError`` that flash-attn raises there.
    """


@dataclass(frozen=True, eq=False)
class FlashOptions:
    """The options of one call, in the terms of ``sdpa``.

    Attributes:
        window: (left, right), -1 = no bound; None = no window.
        softcap: None = off.
        slopes: ALiBi's, ``[B or 1, Hq]``; None = off.
        config: how to compute; None = the default.
        alignment: of the causal rule, "lower_right", or "upper_left" as in flash-attn 1.
    """

    dropout_p: float = 0.0
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    deterministic: bool = False
    config: AttentionConfig | None = None
    alignment: str = "lower_right"

    @staticmethod
    def of(
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: Sequence[int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        *,
        batch: int,
        heads: int,
    ) -> FlashOptions:
        """flash-attn's options for ``batch`` sequences and ``heads`` query heads.

        Raises:
            TypeError, ValueError: an invalid option.
        """
        if not 0.0 <= dropout_p < 1.0:
            raise FlashArgumentError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
        if softcap == math.inf:
            raise FlashArgumentError(f"softcap must be finite (0 = off), got {softcap}")
        cap = float(softcap) if softcap is not None and softcap > 0 else None
        slopes = None if alibi_slopes is None else _slopes(alibi_slopes, batch, heads)
        return FlashOptions(
            float(dropout_p), softmax_scale, bool(causal), _window(window_size), cap, slopes, bool(deterministic)
        )

    def given(self, *, enable_gqa: bool) -> Options:
        """The options as ``sdpa`` takes them; the rule of the slopes is its mask."""
        return Options(
            dropout_p=self.dropout_p,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=enable_gqa,
            alignment=self.alignment,
            window=self.window,
            softcap=self.softcap,
        )

    def part(self, first: int, last: int) -> FlashOptions:
        """The options of the sequences ``first ... last - 1``."""
        if self.slopes is None or self.slopes.shape[0] == 1:
            return self
        return replace(self, slopes=self.slopes[first:last])


def attend(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention in flash-attn's layout.

    Args:
        q: ``[B, L, Hq, D]``; k ``[B, S, Hkv, D]``; v ``[B, S, Hkv, Dv]``.
    Returns:
        (out ``[B, L, Hq, Dv]``, contiguous; lse ``[B, Hq, L]`` or None).
    """
    check_layout("[B, tokens, heads, head_dim]", 4, q=q, k=k, v=v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise FlashArgumentError(f"q, k and v must have one batch size, got {[t.shape[0] for t in (q, k, v)]}")
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    attention = sdpa_with_lse if with_lse else sdpa
    given = options.given(enable_gqa=q.shape[2] != k.shape[2])._asdict()
    result = attention(query, key, value, alibi_mask(options.slopes, q, k), **given, config=_config(options, q, k, v))
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out.transpose(1, 2).contiguous(), lse


def alibi_mask(slopes: Tensor | None, q: Tensor, k: Tensor) -> LazyMask | None:
    """-slope * \\|i + S - L - j\\| as a rule, never a matrix. slopes ``[B or 1, Hq]``."""
    if slopes is None:
        return None
    batch, tokens, heads = q.shape[:3]
    offset = k.shape[1] - tokens
    rows = slopes.detach().to(accumulate_dtype(q.dtype)).expand(batch, heads)
    last = torch.full((), offset, dtype=torch.int64, device=q.device)
    shape = (batch, heads, tokens, k.shape[1])
    return LazyMask(shape, _alibi, device=q.device, dtype=rows.dtype, tensors=(rows, last))


@mask_rule
def _alibi(batch: Tensor, head: Tensor, query: Tensor, key: Tensor, slopes: Tensor, offset: Tensor) -> Tensor:
    """slopes ``[B, Hq]``; offset: S - L, the lower-right alignment."""
    return slopes[batch, head] * -(query + offset - key).abs()


def check_layout(layout: str, dims: int, **tensors: Tensor | None) -> None:
    """Raises TypeError or ValueError where one of the named tensors is no tensor of ``dims`` dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor {layout}, got {type(tensor).__name__}")
        if tensor.dim() != dims:
            raise FlashArgumentError(f"{name} must be {layout}, got shape {tuple(tensor.shape)}")


def _config(options: FlashOptions, *tensors: Tensor) -> AttentionConfig | None:
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if options.deterministic and needs_grad and tensors[0].device.type not in CPU_LIKE:
        # torch's fused kernels sum gradients in the order in which blocks finish
        config = (options.config or default_config()).in_fixed_order()
        return replace(config, route="tiled") if config.route == "auto" else config
    return options.config


def _window(window_size: Sequence[int]) -> tuple[int, int] | None:
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two whole numbers (left, right), got {window_size!r}") from None
    left, right = max(left, -1), max(right, -1)
    return None if left == right == -1 else (left, right)


def _slopes(slopes: Tensor, batch: int, heads: int) -> Tensor:
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a tensor, got {type(slopes).__name__}")
    if slopes.shape not in ((heads,), (batch, heads)):
        raise FlashArgumentError(f"alibi_slopes must be [{heads}] or [{batch}, {heads}], got {list(slopes.shape)}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise FlashArgumentError("alibi_slopes must not require a gradient, none is computed: pass them detached")
    return slopes.reshape(-1, heads)
