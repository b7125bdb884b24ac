"""How fast each route is on the shapes of real models, interleaved with torch's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from ... import AttentionConfig
from ...machine.device import device_info
from ...routes.timing_table import milliseconds
from ...selftest.cases import in_one_line
from ..bench.candidates import needed_operations, race, route_candidates
from ..bench.contest import Settings
from ..bench.shapes import SHAPES, Shape

MODELS = ("sd15", "sdxl", "flux", "wan", "gqa", "decode", "vae")
_LEAST_TOKENS = 512
_ROUNDS = 3
_CALLS_PER_CANDIDATE = _ROUNDS + 4  # rounds, warm-up, the measured call and its float64 rows


def model_shapes(device: torch.device) -> list[Shape]:
    """One attention call of each model, in float32, on a GPU in float16 too."""
    by_name = {shape.name: shape for shape in SHAPES}
    by_name["wan"] = replace(by_name["wan"], seq_len_q=4096, seq_len_kv=4096, what="Wan video, 4,096 tokens")
    shapes = [by_name[name] for name in MODELS]
    return shapes if device.type == "cpu" else shapes + [replace(shape, dtype="float16") for shape in shapes]


def run_speed(device: torch.device, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Time all routes on each shape; one that would take too long here gets fewer heads, then fewer tokens.

    Args:
        left: the seconds that may still be used; none is begun without any.
    Yields:
        shape: its name; text: what was timed; share_of: peak operations per second of the card's plain float32 units,
        0 if unknown; results: as of ``pascal-attn bench``.
    """
    shapes = model_shapes(device)
    speed: dict[str, float] = {}
    for number, shape in enumerate(shapes):
        seconds = left() / (len(shapes) - number)
        if seconds <= 0:
            return
        if shape.dtype not in speed:
            speed[shape.dtype] = product_speed(device, shape.dtype)
        candidates = [c for c in route_candidates(AttentionConfig()) if c.name != "ours-math"]
        fitted = fit(shape, speed[shape.dtype], seconds / (len(candidates) * _CALLS_PER_CANDIDATE))
        settings = Settings(_ROUNDS, seconds / len(candidates), error_rows=64)
        peak = device_info(device).fp32_flops if fitted.dtype == "float32" else 0.0
        results, failed = [], ""
        try:
            results = [asdict(result) for result in race(fitted.make(device), candidates, settings)]
        except Exception as failure:  # the test goes on: whatever it is belongs into the report
            failed = in_one_line(failure)
        yield {"shape": shape.name, "text": fitted.text, "peak": peak, "failed": failed, "results": results}


def product_speed(device: torch.device, dtype: str) -> float:
    """Operations per second of a large matrix product, roughly."""
    size = 512 if device.type == "cpu" else 2048
    one = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    seconds = min(milliseconds(lambda: one @ one, device) for _ in range(3)) / 1e3
    return 2 * size**3 / max(seconds, 1e-9)


def fit(shape: Shape, flops: float, seconds: float) -> Shape:
    """The shape with as few heads, and then tokens, that a call takes about ``seconds`` at ``flops`` operations per
    second."""

    def takes(candidate: Shape) -> float:
        return needed_operations(candidate.make("meta")) / flops

    while takes(shape) > seconds:
        if shape.batch > 1:
            shape = replace(shape, batch=(shape.batch + 1) // 2)
        elif shape.num_kv_heads > 1:
            groups, heads = shape.num_heads // shape.num_kv_heads, (shape.num_kv_heads + 1) // 2
            shape = replace(shape, num_heads=groups * heads, num_kv_heads=heads)
        elif shape.seq_len_q == shape.seq_len_kv > _LEAST_TOKENS:
            tokens = max(_LEAST_TOKENS, shape.seq_len_q // 2)
            shape = replace(shape, seq_len_q=tokens, seq_len_kv=tokens)
        else:
            break
    return shape
