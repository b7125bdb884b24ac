"""Figures of ``pascal-attn bench`` and ``replay`` as text."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from typing import Any

import torch

from ...machine.device import MIB
from ..charts import short_number
from .contest import Result

COLUMNS = ("", "ms", "vs torch", "TFLOP/s", "extra MiB", "operators", "error", "")


def result_row(result: Result, peak_flops: float = 0.0) -> list[str]:
    """One line of a table under :data:`COLUMNS`. peak_flops: most operations per second of the device, 0 = unknown."""
    return [
        result.name,
        "-" if result.seconds is None else short_number(result.seconds * 1e3),
        "-" if result.ratio is None else short_number(result.ratio),
        _throughput(result.flops, peak_flops),
        "-" if result.extra_bytes is None else f"{result.extra_bytes / MIB:.2f}",
        "-" if result.launches is None else f"{result.launches:,}",
        "-" if result.error is None else f"{result.error:.1e}",
        ", ".join(filter(None, (result.ran, result.note))),
    ]


def _throughput(flops: float | None, peak_flops: float) -> str:
    if flops is None:
        return "-"
    share = f" ({flops / peak_flops:.0%})" if peak_flops else ""
    return f"{flops / 1e12:.{1 if flops >= 1e13 else 3}f}{share}"


def geometric_means(reports: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per candidate: the geometric mean of its ratios to the baseline, and over how many shapes."""
    ratios: dict[str, list[float]] = {}
    for report in reports:
        for result in report["results"]:
            if result["ratio"]:
                ratios.setdefault(result["name"], []).append(result["ratio"])
    return {
        name: {"ratio": math.exp(math.fsum(map(math.log, values)) / len(values)), "shapes": len(values)}
        for name, values in ratios.items()
    }


def versions(*others: str) -> dict[str, str]:
    """The versions of Python, torch, this package and those of ``others`` that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("pascal-attention", *others):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
