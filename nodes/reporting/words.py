"""Figures as people read them."""

from __future__ import annotations

import torch

from ..engine.runs import CallKind


def size_text(num_bytes: float) -> str:
    """``"63 MiB"``, ``"1.25 GiB"``: three digits at most."""
    power = 1 + (num_bytes >= 999 * 1024) + (num_bytes >= 999 * 1024**2)
    return f"{num_bytes / 1024**power:.3g} {('KiB', 'MiB', 'GiB')[power - 1]}"


def duration_text(seconds: float) -> str:
    """``"3.21 ms"``, ``"12.3 s"``, ``"4.1 min"``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} min"


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
    return f"q{list(kind.query)} k{list(kind.key)} {kind.dtype}, mask {kind.mask}" if kind.query else ""
