"""The fused route from end to end on a CPU: everything but the driver is real, the kernels are emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pascal_attn_core import routes
from pascal_attn_core.fused import kernels
from pascal_attn_core.fused.launches import Launch
from pascal_attn_core.routes import fused as route

from .emulation import CARD, emulate


def emulated_card(
    monkeypatch: pytest.MonkeyPatch, execute: Callable[[Launch], object] = lambda launch: emulate([launch])
) -> list[Launch]:
    """Let the CPU be a GTX 1080 Ti for the fused route, which has not been timed against torch's kernel; returns the
    list of all launches from now on, each in the parts that are queued."""
    queued: list[Launch] = []

    def run(launches: Iterable[Launch], index: int) -> None:
        for launch in launches:
            for part in kernels.parts(launch, CARD.num_sms):
                queued.append(part)
                execute(part)

    monkeypatch.setattr(route, "takes_device", lambda device: True)
    monkeypatch.setattr(route, "device_info", lambda device: CARD)
    monkeypatch.setattr(route, "ensure", lambda variants, index: None)
    monkeypatch.setattr(route, "_index", lambda call: 0)
    monkeypatch.setattr(kernels, "machine_reasons", lambda index: ())
    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(routes, "fused_over_torch", lambda call, budget_bytes: None)
    monkeypatch.setattr(routes, "_tiled_is_faster", lambda call: False)
    return queued
