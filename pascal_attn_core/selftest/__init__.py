"""Whether every route and kernel is right on this machine: what ``pascal-attn selftest`` and the ComfyUI report show.

``check(device)`` compares each with float64 on small calls. How fast they are is measured by the command line.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ..machine.device import MIB
from ..machine.facts import Clocks, ask_clocks, describe_facts, line, look_around
from .cases import AUTO, DTYPES, Check, run_checks
from .kernels import KernelCheck, check_kernels, why_no_kernels

T = TypeVar("T")
_MOST_PROBLEMS = 12


@dataclasses.dataclass
class Selftest:
    """The findings.

    Attributes:
        facts: of the machine, one line each.
        why_no_kernels: why no fused kernel runs here, empty where they do.
        speed: one entry per shape, as of :func:`.speed.run_speed`.
        clocks: of the card when it had been busy, None where they cannot be asked for.
        cut: the parts that the time did not suffice for.
        seconds: that it took.
    """

    device: str
    facts: list[str]
    why_no_kernels: list[str] = dataclasses.field(default_factory=list)
    kernels: list[KernelCheck] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    speed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    clocks: Clocks | None = None
    cut: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """All that was wrong, one line each."""
        wrong = [kernel.text for kernel in self.kernels if not kernel.is_right]
        wrong += [check.text for check in self.checks if not check.is_right]
        return wrong + [f"timing {entry['text']}: {entry['failed']}" for entry in self.speed if entry["failed"]]

    @property
    def is_right(self) -> bool:
        """Whether something was computed, and nothing was wrong."""
        return any(not check.refused for check in self.checks) and not self.problems

    @property
    def is_unfinished(self) -> bool:
        """Whether the time was over before anything could be wrong or right."""
        return bool(self.cut) and not self.is_right and not self.problems

    @property
    def verdict(self) -> str:
        """Whether all was right, how fast it is, and what to use here."""
        outcomes = [kernel.is_right for kernel in self.kernels]
        outcomes += [check.is_right for check in self.checks if not check.refused]
        refusals = sum(bool(check.refused) for check in self.checks)
        refused = f", {refusals} refused" if refusals else ""
        ratio = self.over_torch(AUTO)
        faster = "" if ratio is None else f"; auto takes {ratio:.2f} of the time of torch's own function (median)"
        cut = f"; not reached in the time: {', '.join(self.cut)}" if self.cut else ""
        word = "PASS" if self.is_right else "UNFINISHED" if self.is_unfinished else "FAIL"
        return f"{word} {sum(outcomes)}/{len(outcomes)}{refused}{faster}{cut}; use {self.advice}"

    @property
    def advice(self) -> str:
        """The configuration for this machine."""
        wrong = {check.route for check in self.checks if not check.is_right and check.route != AUTO}
        fused = bool(wrong & {"fused", "fused-tensor"}) or any(not check.is_right for check in self.kernels)
        if "tiled" in wrong:
            return "torch's own attention, and report this: the tiled route is wrong here"
        if wrong & {"torch", "math"}:
            return 'route="tiled" (PASCAL_ATTN_ROUTE=tiled), and report this'
        if fused:
            return "fused=False (PASCAL_ATTN_FUSED=0), and report this"
        if self.is_unfinished:
            return "more --seconds"
        return "route auto (the default)" if self.is_right else "route auto, and report this"

    def over_torch(self, route: str) -> float | None:
        """The median over shapes of a route's time in units of torch's own."""
        ratios = [
            result["ratio"]
            for entry in self.speed
            for result in entry["results"]
            if result["name"] == f"ours-{route}" and result["ratio"]
        ]
        return statistics.median(ratios) if ratios else None

    def collect(
        self, part: str, items: Iterable[T], left: Callable[[str], float], progress: Callable[[str], None]
    ) -> list[T]:
        """All items of a part; it is noted where the time did not suffice for all of them."""
        found: list[T] = []
        for item in items:
            found.append(item)
            progress(f"{part} {len(found)}")
        if left(part) <= 0:
            self.cut.append(f"some {part}")
        return found


def check(
    device: torch.device,
    left: Callable[[str], float] = lambda part: float("inf"),
    progress: Callable[[str], None] = lambda text: None,
) -> Selftest:
    """Check every kernel and every route on ``device``.

    Args:
        left: the seconds that a part (``"kernels"``, ``"checks"``) may still use; asked before each check, none is
            begun without any. What it raises ends the test.
        progress: called with a few words after each check.
    """
    start = time.monotonic()
    found = Selftest(str(device), describe_facts(look_around()), why_no_kernels(device))
    if not found.why_no_kernels:
        found.kernels = found.collect("kernels", check_kernels(device, lambda: left("kernels")), left, progress)
    found.checks = found.collect("checks", run_checks(device, lambda: left("checks")), left, progress)
    found.clocks, found.seconds = ask_clocks(device), time.monotonic() - start
    return found


# ---- as text ---------------------------------------------------------------------------------------------------------


def document(found: Selftest) -> dict[str, Any]:
    """Everything as plain values."""
    facts: dict[str, Any] = dict(vars(found))
    clocks = found.clocks and found.clocks._asdict()
    for name in ("kernels", "checks"):
        facts[name] = [{**check._asdict(), "is_right": check.is_right} for check in facts[name]]
    return {**facts, "clocks": clocks, "problems": found.problems, "verdict": found.verdict}


def describe(found: Selftest) -> str:
    """The block to paste."""
    clocks = [line("clocks", f"{found.clocks.text} after the load")] if found.clocks else []
    lines = [*found.facts, *clocks, *_kernel_lines(found), *_check_lines(found), *_speed_lines(found)]
    problems = found.problems
    lines += [line("" if number else "wrong", problem) for number, problem in enumerate(problems[:_MOST_PROBLEMS])]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(line("", f"and {len(problems) - _MOST_PROBLEMS} more (--json has all)"))
    return "\n".join([*lines, line("took", f"{found.seconds:.0f} s"), found.verdict])


def _kernel_lines(found: Selftest) -> list[str]:
    if found.why_no_kernels:
        return [line("kernels", f"none: {'; '.join(found.why_no_kernels)}")]
    right = [check for check in found.kernels if check.is_right]
    origins = Counter(check.origin for check in right)
    text = f"{len(right)} of {len(found.kernels)} right"
    if right:
        worst = max(check.error or 0.0 for check in right)
        text += f" ({', '.join(f'{count} {origin}' for origin, count in origins.items())}), error at most {worst:.0e}"
    return [line("kernels", text)]


def _check_lines(found: Selftest) -> list[str]:
    """For each route and dtype: how many calls were right, the largest error, and how many it refuses."""
    lines = [line("routes", "correct calls, largest error against float64, calls refused: " + ", ".join(DTYPES))]
    for route in dict.fromkeys(check.route for check in found.checks):
        cells = []
        for dtype in DTYPES:
            checks = [check for check in found.checks if (check.route, check.dtype) == (route, dtype)]
            computed = [check for check in checks if not check.refused]
            right = sum(check.is_right for check in computed)
            worst = max((check.error for check in computed if check.error is not None), default=0.0)
            cells.append(f"{right}/{len(computed)} {worst:.0e} {len(checks) - len(computed):2d} refused")
        lines.append(line("", f"  {route:13s}" + "  ".join(f"{cell:21s}" for cell in cells).rstrip()))
    return lines


def _speed_lines(found: Selftest) -> list[str]:
    if not found.speed:
        return []
    names = list(dict.fromkeys(result["name"] for entry in found.speed for result in entry["results"]))
    shown = [name.removeprefix("ours-") for name in names]
    lines = [f"{'ms, share of float32 peak':34s}" + "".join(f"{name:>13s}" for name in shown) + "  extra MiB of auto"]
    for entry in found.speed:
        by_name = {result["name"]: result for result in entry["results"]}
        cells = [_cell(by_name.get(name), entry["peak"]) for name in names]
        extra = by_name.get(f"ours-{AUTO}", {}).get("extra_bytes")
        memory = "" if extra is None else f"  {extra / MIB:.1f}"
        lines.append(f"{entry['shape']:7s}{entry['text']:27s}" + "".join(f"{cell:>13s}" for cell in cells) + memory)
    ratios = {route: found.over_torch(route) for route in ("fused-tensor", "fused", "tiled", AUTO)}
    words = [f"{route} {ratio:.2f}" for route, ratio in ratios.items() if ratio is not None]
    lines.append(line("of torch", f"median time relative to torch-fused: {', '.join(words) or 'unknown'}"))
    return lines


def _cell(result: dict[str, Any] | None, peak: float) -> str:
    if result is None or result["seconds"] is None:
        return "-"
    milliseconds = 1e3 * result["seconds"]
    text = f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"
    return f"{text} {result['flops'] / peak:.0%}" if peak and result["flops"] else text
