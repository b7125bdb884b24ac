"""What the pack's engine asks of ComfyUI, answered without it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_support.comfy.pack import NAME, load_pack


def node_module(name: str) -> Any:
    """A module of the pack's folder ``nodes``."""
    load_pack()
    return importlib.import_module(f"{NAME}.nodes.{name}")


class StubHost:
    """Attributes: ``interrupt``: raised at the next look at the Cancel button; ``said``: what was written on nodes."""

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None
        self.looks = 0
        self.at_look = 1
        self.said: list[str] = []

    def throw_if_interrupted(self) -> None:
        self.looks += 1
        if self.interrupt is not None and self.looks >= self.at_look:
            raise self.interrupt


@pytest.fixture
def stub_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHost]:
    """The pack's ``host`` without ComfyUI, and no runs from other tests."""
    host, stub = node_module("comfy.host"), StubHost()
    monkeypatch.setattr(host, "throw_if_interrupted", stub.throw_if_interrupted)
    monkeypatch.setattr(host, "compute_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(host, "prompt_id", lambda: "prompt")
    monkeypatch.setattr(host, "attention_name", lambda: "attention_pytorch")
    monkeypatch.setattr(host, "send_status", lambda text, unique_id: stub.said.append(text))
    node_module("engine.runs").forget()
    yield stub
    node_module("engine.runs").forget()


def make_engine(*, min_keys: int = 0, nan_guard: bool = True, min_queries: int = 1, **config: Any) -> Any:
    """An engine as the nodes make one; keywords are those of ``AttentionConfig``."""
    module = node_module("engine.engine")
    settings = module.PatchSettings(module.AttentionConfig(**config), min_keys, nan_guard, min_queries)
    return module.Engine(settings, "Model", "diffusion model", "1")
