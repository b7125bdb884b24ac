"""Attention layers with their projections, under FlashTile's names and with its ``state_dict`` keys:
:func:`get_attention`.

All of them are exact, have gradients in O(N) memory and take any mask; the kinds differ in which keys a query sees and
in how many key/value heads there are. Bool masks mean what they mean in FlashTile and in
``torch.nn.MultiheadAttention``: **True = does not take part**, the opposite of :func:`pascal_attn_core.sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .attention import sdpa
from .attention_map import attention_map
from .call import accumulate_dtype, check_call
from .config import AttentionConfig, check_number, config_of
from .machine.runtime import runtime_of
from .plots import checked_band
from .tiled.plan import plan_call

__all__ = [
    "FlashAttentionV1",
    "FlashAttentionV2",
    "GroupedQueryAttention",
    "MaskedAttention",
    "MultiQueryAttention",
    "NaiveAttention",
    "SelfAttention",
    "SlidingWindowAttention",
    "create_causal_mask",
    "create_padding_mask",
    "get_attention",
]

_MB = 1e6


class SelfAttention(nn.Module):
    """Self-attention with its projections: ``out_proj(attention(q, k, v))``. FlashTile's ``FlashAttentionV2``, and
    ``MaskedAttention``, whose score matrix is never stored here.

    Args:
        embed_dim: features of the input and the output, a multiple of num_heads.
        num_kv_heads: key and value heads; None = num_heads and one projection ``qkv_proj`` for all three, a number =
            ``q_proj``, ``k_proj`` and ``v_proj``, where K and V are never expanded.
        causal: a query sees no later key.
        window_size: with ``causal`` a query sees this many keys, its own and those before it; without, half as many on
            each side of its own; None = all.
        dropout: share of the output's elements that is dropped in training.
        config: how to compute; None = the one from the environment.
        linear: ``bias``, ``device`` and ``dtype`` of the projections. ``block_size`` and ``chunk_size`` are ignored:
            the tiles are chosen per call.
    Raises:
        ValueError: inconsistent sizes.
    """

    returns_weights = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window_size: int | None = None,
        dropout: float = 0.0,
        config: AttentionConfig | None = None,
        **linear: Any,
    ):
        super().__init__()
        self.embed_dim, self.num_heads, self.causal, self.window_size = embed_dim, num_heads, causal, window_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dropout_p, self.config = dropout, config
        if window_size is not None:
            check_number("window_size", window_size, int, 1)
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads ({num_heads}), got {embed_dim}")
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}")
        self.head_dim = embed_dim // num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        widths = {"q": embed_dim, "k": kv_dim, "v": kv_dim} if num_kv_heads is not None else {"qkv": 3 * embed_dim}
        linear = {name: value for name, value in linear.items() if name not in ("block_size", "chunk_size")}
        for name, width in (widths | {"out": embed_dim}).items():
            self.add_module(f"{name}_proj", nn.Linear(embed_dim, width, **linear))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: ``[B, L, embed_dim]``.
            attn_mask: ``[L, L]``, ``[B, L, L]`` or ``[B, heads, L, L]`` (or what broadcasts to it): bool, True = does
                not take part, or float, added to the scores.
        Returns:
            (``[B, L, embed_dim]``, the probabilities ``[B, heads, L, L]`` where the kind returns them, else None).
        """
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be [B, L, {self.embed_dim}], got {list(x.shape)}")
        own: Any = self
        is_packed = hasattr(self, "qkv_proj")
        projected = own.qkv_proj(x).chunk(3, -1) if is_packed else (own.q_proj(x), own.k_proj(x), own.v_proj(x))
        q, k, v = (rearrange(t, "b l (h d) -> b h l d", d=self.head_dim) for t in projected)
        rule: dict[str, Any] = {"attn_mask": _taking_part(attn_mask), "enable_gqa": True, **self._band()}
        weights = None
        if self.returns_weights:
            weights = attention_map(q, k, rows=range(x.shape[1]), **rule).to(v.dtype)
            weights = F.dropout(weights, self.dropout_p, self.training)
            out = weights @ v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        else:
            out = sdpa(q, k, v, config=self.config, **rule)
        out = own.out_proj(rearrange(out, "b h l d -> b l (h d)"))
        return out if self.returns_weights else F.dropout(out, self.dropout_p, self.training), weights

    def _band(self) -> dict[str, Any]:
        if self.window_size is None:
            return {"is_causal": self.causal}
        half = self.window_size // 2
        return {"window": (self.window_size - 1, 0) if self.causal else (half, half)}

    def get_causal_efficiency(self, seq_len: int, block_size: int = 64) -> dict[str, Any]:
        """Tiles of ``block_size`` tokens that the causal rule or the window leaves out, by arithmetic."""
        band = checked_band(seq_len, seq_len, None, block_size, block_size, **self._band())
        starts = range(0, seq_len, block_size)
        seen = (band.key_range(start, min(start + block_size, seq_len), seq_len) for start in starts)
        computed = sum(-(-last // block_size) - first // block_size for first, last in seen if first < last)
        total = len(starts) ** 2
        blocks = {"total_blocks": total, "computed_blocks": computed, "skipped_blocks": total - computed}
        percent = 100 * (total - computed) / max(1, total)
        return blocks | {"compute_savings_percent": percent, "sequence_length": seq_len, "block_size": block_size}

    def get_memory_usage(self, batch_size: int, seq_len: int) -> dict[str, Any]:
        """The memory of a forward pass on the layer's device in its dtype, calculated, in units of 10^6 bytes.

        That are the projections, at most ``attention_mb`` for attention itself (the tiles' plan), and the output;
        ``naive_mb`` is the same with the probabilities stored, and K and V expanded.
        """
        weight: Tensor = self.get_parameter("out_proj.weight")
        sizes = [(batch_size, heads, seq_len, self.head_dim) for heads in (self.num_heads, self.num_kv_heads)]
        q, kv = (torch.empty(size, dtype=weight.dtype, device="meta") for size in sizes)
        call = check_call(q, kv, kv, **self._band(), enable_gqa=True)
        attention = plan_call(call, runtime_of(weight.device).info, config_of(self.config)).extra_bytes / _MB
        projected, output = (q.nbytes + 2 * kv.nbytes) / _MB, q.nbytes / _MB
        ours = projected + attention + output
        naive = 4 * output + call.num_scores * accumulate_dtype(weight.dtype).itemsize / _MB
        compared = {"naive_mb": naive, "ours_mb": ours, "reduction_ratio": naive / max(ours, 1 / _MB)}
        parts = {"qkv_mb": projected, "attention_mb": attention, "output_mb": output, "total_mb": ours}
        parts |= {"total_gb": ours / 1e3, "kv_savings_ratio": self.num_heads / self.num_kv_heads}
        return parts | {"complexity": "O(N)", "comparison_with_naive": compared}


FlashAttentionV1 = SelfAttention
FlashAttentionV2 = SelfAttention
MaskedAttention = SelfAttention


class NaiveAttention(SelfAttention):
    """Attention that also returns its probabilities, so it stores them: O(L^2) memory, for inspection.

    ``dropout`` is a share of the probabilities, as in FlashTile.
    """

    returns_weights = True


class SlidingWindowAttention(SelfAttention):
    """FlashTile's ``SlidingWindowAttention``: causal by default."""

    def __init__(self, embed_dim: int, num_heads: int, window_size: int = 4096, *, causal: bool = True, **options: Any):
        super().__init__(embed_dim, num_heads, window_size=window_size, causal=causal, **options)


class GroupedQueryAttention(SelfAttention):
    """FlashTile's ``GroupedQueryAttention``, where query heads share key/value heads, and with one of those its
    ``MultiQueryAttention``."""

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int = 1, **options: Any):
        super().__init__(embed_dim, num_heads, num_kv_heads=num_kv_heads, **options)


MultiQueryAttention = GroupedQueryAttention


_KINDS: dict[str, type[SelfAttention]] = {
    "naive": NaiveAttention,
    **dict.fromkeys(("flash_v1", "flash_v2", "triton", "triton_flash", "masked"), SelfAttention),
    "sliding_window": SlidingWindowAttention,
    **dict.fromkeys(("gqa", "grouped_query", "mqa", "multi_query"), GroupedQueryAttention),
}


def get_attention(attention_type: str, embed_dim: int, num_heads: int, **options: Any) -> SelfAttention:
    """A layer by the name of its kind: "naive", "flash_v2" ("flash_v1", "triton", "triton_flash"), "sliding_window",
    "gqa" ("grouped_query"), "mqa" ("multi_query") or "masked".

    Raises:
        ValueError: there is no such kind, or inconsistent sizes.
        TypeError: an option that the kind does not have.
    """
    kind = attention_type.lower().replace("-", "_").replace(" ", "_")
    if kind not in _KINDS:
        raise ValueError(f"attention_type must be one of {sorted(_KINDS)}, got {attention_type!r}")
    return _KINDS[kind](embed_dim, num_heads, **options)


def create_padding_mask(lengths: Tensor, max_len: int, device: Any = None) -> Tensor:
    """Bool ``[B, 1, 1, max_len]``, True after the first ``lengths [B]`` tokens: those do not take part."""
    lengths = lengths.to(device=device)
    return (torch.arange(max_len, device=lengths.device) >= lengths[:, None])[:, None, None]


def create_causal_mask(seq_len: int, device: Any = None) -> Tensor:
    """Bool ``[seq_len, seq_len]``, True above the diagonal. ``causal=True`` does the same without storing it."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)


def _taking_part(mask: Tensor | None) -> Tensor | None:
    """A layer's mask as ``sdpa`` takes it: four dimensions, and True = takes part."""
    if mask is None:
        return None
    if mask.dim() not in (2, 3, 4):
        raise ValueError(f"attn_mask must be [L, L], [B, L, L] or [B, heads, L, L], got {list(mask.shape)}")
    mask = mask[:, None] if mask.dim() == 3 else mask
    return ~mask if mask.dtype == torch.bool else mask
