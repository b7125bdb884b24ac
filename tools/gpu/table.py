"""The results of a sweep as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(jobs: Sequence[dict[str, Any]], most: int = 15) -> list[str]:
    """For the jobs in which the shipped geometry loses most: its time, and that of the best candidate in units of
    it."""
    ranked = sorted(jobs, key=lambda job: job["best_over_shipped"] or 0.0)
    lines = [f"{'job':30s}{'shipped ms':>11s}{'best':>6s}"]
    for job in ranked[:most]:
        seconds = job["shipped_seconds"]
        shipped = job["shipped_note"] or "-" if seconds is None else f"{1e3 * seconds:.2f}"
        best = "-" if job["best_over_shipped"] is None else f"{job['best_over_shipped']:.2f}"
        which = "shipped" if job["best"] == job["shipped"] else job["best"]
        lines.append(f"{job['job']:30s}{shipped:>11s}{best:>6s}  {which}")
    if len(ranked) > most:
        lines.append(f"and {len(ranked) - most} more, which the file has")
    return lines
