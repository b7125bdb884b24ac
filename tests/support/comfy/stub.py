"""This module has what the pack's engine asks of ComfyUI, answered without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.pack import core_module, node_module
from torch import Tensor, nn

__all__ = ["core_module", "node_module"]


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
    monkeypatch.setattr(host, "prompt_id", lambda: "")
    monkeypatch.setattr(host, "attention_name", lambda: "attention_pytorch")
    monkeypatch.setattr(host, "send_status", lambda text, unique_id: stub.said.append(text))
    node_module("engine.runs")._recent.clear()
    yield stub
    node_module("engine.runs")._recent.clear()


class Container:
    """ComfyUI's single-owner container of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def peek(self) -> Tensor:
        assert self.tensor is not None
        return self.tensor

    def take(self) -> Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


class Patcher:
    """The part of ComfyUI's patcher that keeps object patches of a network, and clones."""

    load_device = torch.device("cpu")

    def __init__(self, network: nn.Module, patches: dict[str, Any] | None = None) -> None:
        self.model, self.object_patches = network, dict(patches or {})
        self.callbacks: dict[str, dict[str, list]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    @classmethod
    def around(cls, network: nn.Module) -> Patcher:
        """This class stands for a diffusion model, which has its network inside."""
        return cls(nn.ModuleDict({"diffusion_model": network}))

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def get_model_object(self, name: str) -> Any:
        owner, _, attribute = name.rpartition(".")
        return self.object_patches.get(name) or getattr(self.model.get_submodule(owner), attribute)

    def remove_callbacks_with_key(self, kind: str, key: str) -> None:
        self.callbacks.setdefault(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind: str, key: str, callback: Any) -> None:
        self.callbacks[kind].setdefault(key, []).append(callback)

    def clone(self, network: nn.Module | None = None) -> Patcher:
        copy = Patcher(network or self.model, self.object_patches)
        copy.callbacks = {kind: dict(by_key) for kind, by_key in self.callbacks.items()}
        for callback in [f for by_key in self.callbacks.values() for found in by_key.values() for f in found]:
            callback(self, copy)
        return copy


def vae_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As ComfyUI's VAEs: one head over ``[B, C, *positions]``."""
    tokens = (t.flatten(2).transpose(1, 2)[:, None] for t in (query, key, value))
    return F.scaled_dot_product_attention(*tokens)[:, 0].transpose(1, 2).reshape(query.shape)


def host_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **_: Any) -> Tensor:
    """As ComfyUI's over ``[B, N, H*D]``: key and value are read by the query's batch."""
    batch, head_dim = q.shape[0], q.shape[-1] // heads
    q, k, v = (t.reshape(batch, -1, heads, head_dim).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def make_engine(*, min_keys: int = 0, nan_guard: bool = True, **config: Any) -> Any:
    """An engine as the nodes make one; keywords are those of ``AttentionConfig``."""
    module = node_module("engine.engine")
    settings = module.PatchSettings(module.AttentionConfig(**config), min_keys, nan_guard)
    return module.Engine(settings, "Model", "diffusion model", "1")
