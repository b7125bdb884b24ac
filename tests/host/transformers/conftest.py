"""Fixtures of the Transformers tests: our registered name, call counters."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor


def pytest_pycollect_makemodule() -> None:
    pytest.importorskip("transformers", minversion="4.53", reason="needs transformers 4.53 or newer")


@pytest.fixture
def registered() -> Iterator[str]:
    """Our attention under the name ``tiny_models.NAME``, for one test."""
    from attn_support.tiny_models import NAME

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
