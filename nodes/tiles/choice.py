"""Keys per tile for a workload on a card, and one sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...pascal_attn_core import AttentionConfig
from ...pascal_attn_core.call import check_call
from ...pascal_attn_core.machine.device import MIB, DeviceInfo
from ...pascal_attn_core.tiled.plan import plan_call
from ...pascal_attn_core.tiled.tiles import TilePlan, recommended_tile_size_for

GIB = 1 << 30
_SHARE_OF_FREE = 2  # a call may take 1 / 2 of what is free, where that is less than its budget


class Shape(NamedTuple):
    """One attention call of a model, self-attention of ``tokens`` tokens, as ComfyUI's models lay it out.

    Attributes:
        dtype: ``"float16"``.
        budget_mib: extra memory of the call; 0 = the device's default.
    """

    dtype: str
    tokens: int
    heads: int
    head_dim: int
    budget_mib: int = 0

    def tensor(self, device: torch.device | str) -> Tensor:
        """An empty query, key or value: ``[1, H, N, D]``, a view of ``[1, N, H*D]``."""
        size = 1, self.tokens, self.heads, self.head_dim
        return torch.empty(size, dtype=getattr(torch, self.dtype), device=device).transpose(1, 2)

    @property
    def config(self) -> AttentionConfig:
        """The tiled route under this budget."""
        return AttentionConfig(route="tiled", budget_mib=self.budget_mib or None)

    def text(self) -> str:
        """``"4096 tokens, 24 heads of 64 in float16"``."""
        heads = f"{self.heads} head{'' if self.heads == 1 else 's'}"
        return f"{self.tokens} tokens, {heads} of {self.head_dim} in {self.dtype}"


@dataclass(frozen=True)
class Card:
    """The device that computes: its facts, and free and all memory in bytes, 0 if unknown."""

    info: DeviceInfo
    free_bytes: int = 0
    total_bytes: int = 0

    def text(self) -> str:
        """``"NVIDIA GeForce GTX 1080 Ti with 2.75 MiB of L2 cache and 9.8 of 11.0 GiB free"``."""
        cache = "L2 cache" if self.info.is_gpu else "shared cache"
        known = f"{self.info.l2_bytes / MIB:.4g} MiB of {cache}" if self.info.l2_bytes else f"{cache} of unknown size"
        free = f" and {self.free_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB free" if self.total_bytes else ""
        return f"{self.info.name or self.info.kind} with {known}{free}"


def plan_for(card: Card, shape: Shape) -> TilePlan:
    """The tiles that the tiled route would choose for the call.

    Raises:
        ValueError: not even the smallest tile fits the budget.
    """
    query = shape.tensor("meta")
    call = check_call(query, query, query)
    most = card.free_bytes // _SHARE_OF_FREE if card.total_bytes else None
    return plan_call(call, card.info, shape.config, most_bytes=most)


def sentence(card: Card, shape: Shape, plan: TilePlan, measured: str = "") -> str:
    """The choice in plain words, with its numbers; ``measured``: what a measurement says instead of the plan."""
    constant = recommended_tile_size_for(card.info.l2_bytes if card.info.is_gpu else 0)
    heads = f"{plan.units} head{'' if plan.units == 1 else 's'}"
    chosen = measured or (
        f"the tiled route takes {plan.kv_block} keys per tile ({heads} x {plan.q_block} queries x {plan.kv_block} keys "
        f"at a time, {plan.extra_bytes / MIB:.1f} MiB)"
    )
    return (
        f"{card.text()}: for {shape.text()} {chosen}; the square tile that its L2 cache alone would allow is "
        f"{constant} x {constant}."
    )
