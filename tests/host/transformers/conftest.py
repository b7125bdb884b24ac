"""Fixtures of the Transformers tests: tiny models, our registered name, call counters, wrong attention."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

NAME = "pascal_chunked"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of tiny models, loaded by path: the tests are no package."""
    path = pathlib.Path(__file__).with_name("tiny_models.py")
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registered() -> Iterator[str]:
    """Our attention under its name, for one test."""
    from pascal_attn_core.transformers import register_with_transformers

    with register_with_transformers(name=NAME):
        yield NAME


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """One dict per call that reaches our sdpa: its mask and its keywords."""
    import pascal_attn_core.transformers as host

    calls: list[dict[str, Any]] = []
    original = host.sdpa

    def counted(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append({"mask": attn_mask, "query": query.shape, "key": key.shape, **kwargs})
        return original(query, key, value, attn_mask, *args, **kwargs)

    monkeypatch.setattr(host, "sdpa", counted)
    return calls


@pytest.fixture
def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``with wrong_attention("maskless"):`` one thing is forgotten: the mask ("maskless"), the causal rule and window
    ("bandless"), "softcap" or "sinks"."""
    import pascal_attn_core.transformers as host

    original = host.sdpa

    def forget(kind: str) -> Callable[..., Tensor]:
        def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *args: Any, **kwargs: Any) -> Tensor:
            if kind == "maskless":
                attn_mask = None
            if kind == "bandless":
                kwargs.update(is_causal=False, window=None)
            if kind in ("softcap", "sinks"):
                kwargs[kind] = None
            return original(query, key, value, attn_mask, *args, **kwargs)

        return sdpa

    @contextmanager
    def use(kind: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(host, "sdpa", forget(kind))
            yield

    return use


@pytest.fixture
def differs() -> Callable[[Tensor, Tensor], float]:
    """The largest difference of two results in units of the largest value."""

    def measure(ours: Tensor, stock: Tensor) -> float:
        assert ours.shape == stock.shape
        assert torch.isfinite(ours).all()
        return ((ours - stock).abs().max() / stock.abs().max()).item()

    return measure
