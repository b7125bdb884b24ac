"""Attention for inspection: the softmax rows of chosen queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call import Arguments, AttentionCall, check_call, prepared, without_autocast
from .call.lazy_mask import LazyMask
from .plots import plot_rows
from .routes.math import probabilities
from .tiled.masks import Band

__all__ = ["AttentionMap", "attention_map"]


def attention_map(
    query: Tensor,
    key: Tensor,
    *,
    rows: Sequence[int] | Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention probabilities of chosen queries over all keys: exact softmax rows, without the full matrix.

        weights = attention_map(query, key, rows=[0, 17, -1], is_causal=True)     # [*batch, Hq, 3, S]
        weights.plot("rows.png")                                                  # a heat map, by matplotlib

    Args:
        query: ``[*batch, Hq, L, D]``; key ``[*batch, Hkv, S, D]``.
        rows: indices of query tokens, -L ... L - 1, in any order.
        others: as in :func:`pascal_attn_core.sdpa`. With ``sinks`` a row sums to less than 1.
    Returns:
        ``[*batch, Hq, len(rows), S]`` in float32 (float64 for float64), zero in a row that sees no key.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments, or a row that does not exist.
    """
    more: dict[str, Any] = {"alignment": alignment, "window": window, "softcap": softcap, "sinks": sinks}
    given = Arguments(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, **more)
    call = check_call(prepared(given))
    chosen = _row_numbers(rows, call)
    mask, band = _mask_rows(call, chosen), _band_rows(call, chosen)
    if mask is not None and band is not None:
        mask = mask.masked_fill(~band, False if mask.dtype == torch.bool else -torch.inf)
    mask = band if mask is None else mask
    part = check_call(
        call.query.index_select(-2, chosen), call.key, call.key, mask,
        scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    with without_autocast(query):
        weights = probabilities(part).flatten(-4, -3).reshape(*part.out_shape[:-1], call.seq_len_kv)
    if torch.compiler.is_compiling():
        return weights
    shown = weights.as_subclass(AttentionMap)
    shown.rows = chosen.tolist()
    return shown


class AttentionMap(Tensor):
    """The result of :func:`attention_map`: a tensor with a ``plot`` method. Results computed from it are plain tensors.

    Attributes:
        rows: the query index of each row.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    rows: list[int]

    def plot(self, path: str | Path | None = None) -> Any:
        """A heat map of the rows, written to ``path`` too if it is given: see
        :func:`pascal_attn_core.plots.plot_rows`."""
        return plot_rows(self.as_subclass(Tensor), path, rows=self.rows)


def _row_numbers(rows: Sequence[int] | Tensor, call: AttentionCall) -> Tensor:
    try:
        numbers = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):  # a slice, words, lists of several lengths
        raise TypeError(f"rows must be whole numbers in one dimension, got {rows!r}") from None
    if numbers.dim() != 1 or (numbers.numel() and (numbers.is_floating_point() or numbers.dtype == torch.bool)):
        raise TypeError(f"rows must be whole numbers in one dimension, got {rows!r}")
    length = call.seq_len_q
    if any(not -length <= row < length for row in numbers.tolist()):
        raise ValueError(f"rows must be from {-length} to {length - 1}, got {numbers.tolist()}")
    numbers = numbers.long().to(call.query.device)
    return torch.where(numbers < 0, numbers + length, numbers)


def _mask_rows(call: AttentionCall, rows: Tensor) -> Tensor | None:
    mask = call.attn_mask
    if mask is None:
        return None
    if isinstance(mask, LazyMask):
        batch, heads, _, keys = (torch.arange(size, device=rows.device) for size in mask.shape)
        rows = rows if mask.shape[2] > 1 else rows[:1] * 0
        values = mask.at(
            batch[:, None, None, None], heads[None, :, None, None], rows[None, None, :, None], keys[None, None, None]
        )
        return values[(0,) * max(0, 4 - call.query.dim())]
    return mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask.index_select(-2, rows)


def _band_rows(call: AttentionCall, rows: Tensor) -> Tensor | None:
    if Band.of(call).is_everything:
        return None
    distance = torch.arange(call.seq_len_kv, device=rows.device) - rows[:, None] - call.offset
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if call.left is not None:
        allowed &= distance >= -call.left
    if call.right is not None:
        allowed &= distance <= call.right
    return allowed
