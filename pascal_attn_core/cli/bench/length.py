"""Memory against sequence length: counted on tensors without data, so that any length fits any machine."""

from __future__ import annotations

from pathlib import Path

import torch

from ... import AttentionConfig
from ...call import check_call
from ...machine.device import MIB, DeviceInfo
from ...observe.memory import measure
from ...routes.tiled import TiledRoute
from ...tiled.plan import plan_call
from ..charts import COLOURS, Bar, bar_chart

HEADS, HEAD_DIM = 8, 64
LENGTHS = tuple(1 << power for power in range(10, 16))
#: whose plans are shown beside what this machine's processor takes; both have the same budget, other tiles
CARDS = {
    "GTX 1080 Ti": DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61"),
    "MI50": DeviceInfo("hip", "MI50", None, 60, 4 << 20, 16 << 30, "gfx906"),
}
COLUMNS = ("torch math", "tiles, CPU", *(f"tiles, {name}" for name in CARDS))


def memory_by_length(lengths: tuple[int, ...] | None = None, budget_mib: float | None = None) -> dict[str, list[float]]:
    """Peak extra memory in MiB of self-attention ``[1, 8, L, 64]`` in float32 for each length.

    Args:
        lengths: in tokens; None = LENGTHS.
    Returns:
        "tokens", and for each of COLUMNS: torch's plain attention and our tiles on a CPU, both counted as they run on
        tensors without data, and what the plan of our tiles has for other devices, which no run exceeds.
    """
    config, tiled_route = AttentionConfig(route="tiled", budget_mib=budget_mib), TiledRoute()
    figures: dict[str, list[float]] = {name: [] for name in ("tokens", *COLUMNS)}
    for tokens in LENGTHS if lengths is None else lengths:
        query, key, value = (torch.empty(1, HEADS, tokens, HEAD_DIM, device="meta") for _ in range(3))
        plain = measure(torch._scaled_dot_product_attention_math, query, key, value)
        tiled = measure(lambda q, k, v: tiled_route.forward(check_call(q, k, v), config).out, query, key, value)
        planned = [plan_call(check_call(query, key, value), card, config).extra_bytes for card in CARDS.values()]
        row = [plain.extra_bytes, tiled.extra_bytes, *planned]
        figures["tokens"].append(tokens)
        for name, num_bytes in zip(COLUMNS, row):
            figures[name].append(num_bytes / MIB)
    return figures


def draw_memory_by_length(figures: dict[str, list[float]], path: Path) -> None:
    """Bars of each kind of attention for each length, on the same scale."""
    shown = {
        "torch math": "torch's math attention",
        "tiles, GTX 1080 Ti": "tiles on a GPU",
        "tiles, CPU": "tiles on a CPU",
    }
    bars = [
        Bar(f"{tokens:,.0f} tokens, {label}", figures[name][i])
        for i, tokens in enumerate(figures["tokens"])
        for name, label in shown.items()
    ]
    title = f"Self-attention, {HEADS} heads of {HEAD_DIM}, float32, forward"
    footer = "A fused kernel, torch's or ours, stores no scores at all."
    bar_chart(path, [("peak extra memory", "MiB", bars)], title=title, footer=footer, colours=COLOURS[1:4])
