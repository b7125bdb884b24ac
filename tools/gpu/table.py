"""The results of a sweep as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(jobs: Sequence[dict[str, Any]], most: int = 15) -> list[str]:
    """For the jobs in which the shipped geometry loses most: its time, and that of the fastest of torch's kernels and
    of the best candidate in units of it."""
    ranked = sorted(jobs, key=lambda job: job["best_over_shipped"] or 0.0)
    lines = [f"{'job':30s}{'shipped ms':>11s}{'torch':>7s}{'best':>6s}"]
    for job in ranked[:most]:
        ratios = [lane["over_shipped"] for lane in job["torch"] if "over_shipped" in lane]
        shipped = (
            job["shipped_note"] or "-" if job["shipped_seconds"] is None else f"{1e3 * job['shipped_seconds']:.2f}"
        )
        torch, best = (_ratio(value) for value in (min(ratios, default=None), job["best_over_shipped"]))
        which = "shipped" if job["best"] == job["shipped"] else job["best"]
        lines.append(f"{job['job']:30s}{shipped:>11s}{torch:>7s}{best:>6s}  {which}")
    if len(ranked) > most:
        lines.append(f"and {len(ranked) - most} more, which the file has")
    return lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
