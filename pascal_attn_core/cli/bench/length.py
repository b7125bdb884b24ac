"""Memory against sequence length: counted on tensors without data, so that any length fits any machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ... import AttentionConfig
from ...call import check_call
from ...machine.device import MIB, DeviceInfo
from ...observe.memory import measure
from ...routes.tiled import TiledRoute
from ...tiled.plan import plan_call
from ..charts import COLOURS, bar_chart

HEADS, HEAD_DIM = 8, 64
LENGTHS = tuple(1 << power for power in range(10, 16))
GPU = DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61")  # another has the same budget
COLUMNS = ("torch's math attention", "tiles on a GPU", "tiles on a CPU")


def memory_by_length(lengths: Sequence[int], budget_mib: float | None = None) -> dict[int, list[float]]:
    """Peak extra memory in MiB of self-attention ``[1, 8, L, 64]`` in float32 for each length, by each of COLUMNS. On a
    CPU the calls run on tensors without data; for a GPU it is what the plan has, which no run exceeds."""
    config, route = AttentionConfig(route="tiled", budget_mib=budget_mib), TiledRoute()
    figures = {}
    for tokens in lengths:
        query, key, value = (torch.empty(1, HEADS, tokens, HEAD_DIM, device="meta") for _ in range(3))
        plain = measure(torch._scaled_dot_product_attention_math, query, key, value)
        tiled = measure(lambda q, k, v: route.forward(check_call(q, k, v), config).out, query, key, value)
        planned = plan_call(check_call(query, key, value), GPU, config)
        figures[tokens] = [each.extra_bytes / MIB for each in (plain, planned, tiled)]
    return figures


def draw_memory_by_length(figures: dict[int, list[float]], path: Path) -> None:
    """Bars of each kind of attention for each length, on the same scale."""
    bars = [
        (f"{tokens:,} tokens, {name}", mib, "") for tokens in figures for name, mib in zip(COLUMNS, figures[tokens])
    ]
    title = f"Self-attention, {HEADS} heads of {HEAD_DIM}, float32, forward"
    footer = "A fused kernel, torch's or ours, stores no scores at all."
    bar_chart(path, [("peak extra memory", "MiB", bars)], title=title, footer=footer, colours=COLOURS[1:4])
