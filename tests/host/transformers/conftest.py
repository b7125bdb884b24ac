"""Fixtures of the Transformers tests: tiny models, our registered name, call counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

NAME = "pascal_chunked"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of tiny models, which imports Transformers."""
    from attn_support import tiny_models

    return tiny_models


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
def differs() -> Callable[[Tensor, Tensor], float]:
    """The largest difference of two results in units of the largest value."""

    def measure(ours: Tensor, stock: Tensor) -> float:
        assert ours.shape == stock.shape
        assert torch.isfinite(ours).all()
        return ((ours - stock).abs().max() / stock.abs().max()).item()

    return measure
