"""Figures as people read them."""

from __future__ import annotations

import torch

from ..engine.runs import CallKind, Run

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: float) -> str:
    """``"63.0 MiB"``, ``"11 GiB"``: three digits at most, but four before the next unit."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.{_digits(num_bytes) if power else 0}f} {_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """``"3.21 ms"``, ``"12.3 s"``, ``"4 min 05 s"``, ``"1 h 03 min"``."""
    if seconds >= 3570:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 99.5:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.{_digits(value)}f} {unit}"


def _digits(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def plural(count: int, noun: str) -> str:
    """``"1 call"``, ``"1,234 calls"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def dtype_text(dtype: torch.dtype) -> str:
    """``"float16"``."""
    return str(dtype).removeprefix("torch.")


def share_text(share: float) -> str:
    """``"37%"``, ``"less than 1%"``."""
    return "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"


def shape_text(kind: CallKind) -> str:
    """``"q[1, 24, 4608, 128] k[1, 24, 4608, 128] bfloat16, mask none"``; "" where it is not known."""
    if not kind.query:
        return ""
    return f"q{list(kind.query)} k{list(kind.key)} {kind.dtype}, mask {kind.mask}"


def title_of(run: Run) -> str:
    """``"Flux, diffusion model"``; what the name says already is not repeated."""
    return run.subject if run.part.lower() in run.subject.lower() else f"{run.subject}, {run.part}"
