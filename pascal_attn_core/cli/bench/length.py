"""Memory against sequence length: counted on tensors without data, so that any length fits any machine."""

from __future__ import annotations

from pathlib import Path

import torch

from ...call import check_call
from ...config import AttentionConfig
from ...machine.device import MIB, device_info
from ...observe.memory import measure
from ...routes.tiled import TiledRoute
from ...tiled.plan import plan_call
from ..charts import COLOURS, Bar, bar_chart

HEADS, HEAD_DIM = 8, 64
LENGTHS = tuple(1 << power for power in range(10, 16))


def memory_by_length(lengths: tuple[int, ...] | None = None, budget_mib: float | None = None) -> dict[str, list[float]]:
    """Peak extra memory in MiB of self-attention ``[1, 8, L, 64]`` in float32, exact, for each length.

    Args:
        lengths: in tokens; None = LENGTHS.
    Returns:
        "tokens", and for each "math" (torch's plain attention), "tiled" (what is used) and "planned" (what its plan
        predicts).
    """
    config, tiled_route = AttentionConfig(route="tiled", budget_mib=budget_mib), TiledRoute()
    figures: dict[str, list[float]] = {"tokens": [], "math": [], "tiled": [], "planned": []}
    for tokens in LENGTHS if lengths is None else lengths:
        query, key, value = (torch.empty(1, HEADS, tokens, HEAD_DIM, device="meta") for _ in range(3))
        call = check_call(query, key, value)
        figures["tokens"].append(tokens)
        plain = measure(torch._scaled_dot_product_attention_math, query, key, value)
        figures["math"].append(plain.extra_bytes / MIB)
        tiled = measure(lambda q, k, v: tiled_route.forward(check_call(q, k, v), config).out, query, key, value)
        figures["tiled"].append(tiled.extra_bytes / MIB)
        figures["planned"].append(plan_call(call, device_info("cpu"), config).extra_bytes / MIB)
    return figures


def draw_memory_by_length(figures: dict[str, list[float]], path: Path) -> None:
    """Bars of both attentions for each length, on the same scale."""
    bars = [
        Bar(f"{tokens:,.0f} tokens, {label}", figures[name][i])
        for i, tokens in enumerate(figures["tokens"])
        for name, label in (("math", "torch math"), ("tiled", "tiled"))
    ]
    title = f"Self-attention, {HEADS} heads of {HEAD_DIM}, float32, forward"
    bar_chart(path, [("peak extra memory", "MiB", bars)], title=title, colours=COLOURS[1:3])
