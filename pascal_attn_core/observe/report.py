"""Records which route each call takes, and why, while a recording is active; and shows calls to those who ask. Neither
ever changes what runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ..call import TiledStats
from ..call.lazy_mask import LazyMask


@dataclass(frozen=True)
class CallKey:
    """Calls of one kind are counted together.

    Attributes:
        query, key: shapes of those tensors; dtype: theirs, ``"float16"``.
        mask: ``"none"``, or the mask's dtype and shape, and ``causal`` / ``window`` where they apply.
        why: one sentence: why this route.
    """

    route: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: str
    mask: str
    why: str


@dataclass
class Report:
    """Everything recorded between the start and the end of one :func:`record` block."""

    calls: dict[CallKey, TiledStats] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of calls seen."""
        return sum(stats.count for stats in self.calls.values())

    def routes(self) -> dict[str, int]:
        """Number of calls by route."""
        counts: Counter[str] = Counter()
        for key, stats in self.calls.items():
            counts[key.route] += stats.count
        return dict(counts.most_common())

    def text(self) -> str:
        """One line per kind of call, most frequent first."""
        rows = sorted(self.calls.items(), key=lambda item: -item[1].count)
        by_route = ", ".join(f"{n} {route}" for route, n in self.routes().items())
        lines = [f"{self.total} attention calls" + (f": {by_route}" if by_route else "")]
        for key, stats in rows:
            share = f", {stats.bounded_blocks / stats.blocks:.0%} bounded" if stats.blocks else ""
            halved = f", budget halved {stats.budget_halvings}x" if stats.budget_halvings else ""
            lines.append(
                f"{stats.count:6d} x {key.route:5s} q{list(key.query)} k{list(key.key)} {key.dtype} mask {key.mask}"
                f"{share}{halved}: {key.why}"
            )
            if stats.devices:
                lines.append(f"         shared: {shares_text(stats.devices)}")
            lines += [f"         {count} x {remark}" for remark, count in stats.remarks.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


_lock = threading.Lock()
active: tuple[Report, ...] = ()  # those that are being recorded


@contextmanager
def record() -> Iterator[Report]:
    """Count every call of :func:`pascal_attn_core.sdpa` in this process, in any thread, until the block ends.

    with record() as report:
        pipe(prompt)
    print(report.text())
    """
    global active
    report = Report()
    with _lock:
        active = (*active, report)
    try:
        yield report
    finally:
        with _lock:
            active = tuple(r for r in active if r is not report)


def note(key: CallKey, counted: TiledStats) -> None:
    """Add one call to every report being recorded."""
    with _lock:
        for report in active:
            stats = report.calls.setdefault(key, TiledStats())
            stats.count += 1
            stats.add(counted)


def shares_text(devices: dict[str, int]) -> str:
    """``"cuda:0 58%, cuda:1 42%"``."""
    total = max(1, sum(devices.values()))
    return ", ".join(f"{device} {heads / total:.0%}" for device, heads in devices.items())


def mask_kind(attn_mask: Tensor | LazyMask | None, *, is_causal: bool, left: int | None, right: int | None) -> str:
    """``"none"``, ``"bool [1, 1, 1, 77]"``, ``"causal"``, ``"float32 [1, 8, 64, 64] window (8, 8)"``."""
    parts = []
    if attn_mask is not None:
        parts.append(f"{str(attn_mask.dtype).removeprefix('torch.')} {list(attn_mask.shape)}")
    if is_causal:
        parts.append("causal")
    if left is not None or (right is not None and not is_causal):
        parts.append(f"window ({-1 if left is None else left}, {-1 if right is None else right})")
    return " ".join(parts) or "none"
