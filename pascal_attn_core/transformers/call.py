"""One attention call of Transformers, translated to :func:`pascal_attn_core.sdpa`.

Transformers restricts a call in five ways: no mask and ``is_causal``, a tensor, a position bias, a ``BlockMask``, or
the mask object that our own mask function returned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import PLAIN, Arguments, check_call, prepared, without_autocast
from ..call.flex_rules import is_block_mask
from ..call.lazy_mask import LazyMask
from ..config import log_once
from ..routes.math import probabilities
from .mask import HostMask


@dataclass(frozen=True, eq=False)
class Masked:
    """Keys, values and everything that restricts them, as arguments of :func:`sdpa`."""

    key: Tensor
    value: Tensor
    mask: Any = None
    is_causal: bool = False
    alignment: str = "upper_left"
    window: tuple[int, int] | None = None
    first_key: int = 0

    @staticmethod
    def of(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool | None
    ) -> Masked:
        """The call that Transformers describes: None and causal means that query 0 sees key 0."""
        seq_len_q, seq_len_kv = query.shape[2], key.shape[2]
        if mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if seq_len_q == 1 or not causal:
                return Masked(key, value)
            return Masked(key[:, :, :seq_len_q], value[:, :, :seq_len_q], is_causal=True)
        if is_block_mask(mask):
            return Masked(key, value, mask)
        if mask.shape[-1] > seq_len_kv:  # a mask made for a longer cache than this layer's
            mask = mask[..., :seq_len_kv]
        if isinstance(mask, HostMask):
            return _from_host_mask(query, key, value, mask if mask.device == query.device else mask.to(query.device))
        if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
            mask = mask[:, :, :1]
        return Masked(key, value, mask)

    def options(self) -> dict[str, Any]:
        """Causal rule and window as keywords of :func:`sdpa`."""
        return {"is_causal": self.is_causal, "alignment": self.alignment, "window": self.window}

    def with_bias(self, bias: Tensor | None) -> Masked:
        """The call with a float bias ``[B or 1, Hq, L, S]`` added to the scores."""
        if bias is None:
            return self
        bias = bias[..., self.first_key : self.first_key + self.key.shape[2]]
        return replace(self, mask=bias if self.mask is None else _add_bias(bias, self.mask))


def _from_host_mask(query: Tensor, key: Tensor, value: Tensor, mask: HostMask) -> Masked:
    """The band as causal rule and window where sdpa can express it, the rest per tile."""
    seq_len_q = query.shape[2]
    if mask.shape[2:] != (seq_len_q, key.shape[2]):
        raise ValueError(
            f"attention_mask must be made for (L, S) = {(seq_len_q, key.shape[2])}, got {tuple(mask.shape[2:])}"
        )
    # Keys that no query sees: the end of a static cache, or the keys before a window.
    first, last = mask.band.key_range(0, seq_len_q, key.shape[2])
    last = max(first, last)
    key, value, mask = key[:, :, first:last], value[:, :, first:last], mask.part((0, seq_len_q), (first, last))
    seq_len_kv, (left, right, offset) = last - first, mask.band
    if left is not None and seq_len_q - 1 + offset - left <= 0:
        left = None
    if right is not None and offset + right >= seq_len_kv - 1:
        right = None
    said = offset in (0, seq_len_kv - seq_len_q) or (left is None and right is None)
    if not said:
        return Masked(key, value, _lazy(mask, query), first_key=first)
    is_causal = right == 0
    alignment = "upper_left" if offset == 0 or (left is None and right is None) else "lower_right"
    sides = (-1 if left is None else left, -1 if right is None or is_causal else right)
    window = None if sides == (-1, -1) else sides
    rest = mask.changed(pattern=mask.pattern._replace(left=None, right=None))
    return Masked(key, value, _lazy(rest, query), is_causal, alignment, window, first)


def _lazy(mask: HostMask, query: Tensor) -> Any:
    """The mask as sdpa takes it: nothing, padding ``[B, 1, 1, S]``, or itself (a tensor while a graph is traced)."""
    if mask.band.is_everything and not mask.pattern.rest:
        return None if mask.padding is None else mask.padding[:, None, None, :]
    return mask.dense() if _is_traced(query) else mask


def _add_bias(bias: Tensor, mask: Any) -> Any:
    """A float bias and a mask of any kind together."""
    sizes = torch.broadcast_shapes(bias.shape, tuple(mask.shape))
    if (bias.requires_grad and torch.is_grad_enabled()) or _is_traced(bias):
        # Gradients of the bias need a tensor; the bias itself is one of that size.
        allowed = mask.dense() if isinstance(mask, LazyMask) else mask
        return torch.where(allowed, bias, -torch.inf) if allowed.dtype == torch.bool else bias + allowed

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        indices = (batch, head, query, key)
        part = _pick(bias, indices)
        allowed = mask.rule(*indices) if isinstance(mask, LazyMask) else _pick(mask, indices)
        return torch.where(allowed, part, -torch.inf) if allowed.dtype == torch.bool else part + allowed

    return LazyMask(shape=tuple(sizes), rule=rule, device=bias.device, dtype=bias.dtype)


def _pick(tensor: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    """The elements of a tensor at these indices, broadcast along its dimensions of size 1."""
    return tensor[tuple(i if n > 1 else torch.zeros_like(i) for i, n in zip(indices, tensor.shape))]


def with_query_sinks(result: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Outputs or weights ``[B, Hq, L, ...]`` with one more logit per query ``[B, Hq, L, 1]`` in the softmax's
    denominator only; lse ``[B, Hq, L]`` is that without it."""
    share = torch.sigmoid(lse.unsqueeze(-1) - sinks.to(lse.dtype))
    return result * share.to(result.dtype)


def refuse_what_we_do_not_know(kwargs: dict[str, Any]) -> None:
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"the model selects keys by {name}: set attn_implementation='sdpa' or 'eager'")
    if kwargs.get("cache") is not None or kwargs.get("read_index") is not None:
        raise NotImplementedError("continuous batching is not supported: set attn_implementation='sdpa'")


def _is_traced(query: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(query) not in PLAIN


def weights(query: Tensor, all_keys: Tensor, masked: Masked, options: dict[str, Any]) -> Tensor:
    """The attention weights ``[B, Hq, L, S]`` before dropout: for callers that ask for them."""
    text = "output_attentions=True stores weights of L*S elements for every layer and computes them twice"
    log_once(logging.WARNING, text)
    call = check_call(prepared(Arguments(query, masked.key, masked.value, masked.mask, **options)))
    with without_autocast(query):
        probs = probabilities(call).flatten(1, 2).to(query.dtype)
    after = all_keys.shape[2] - masked.first_key - probs.shape[3]
    return torch.nn.functional.pad(probs, (masked.first_key, after))
