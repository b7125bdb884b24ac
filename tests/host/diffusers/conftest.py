"""Fixtures of the diffusers tests: tiny pipelines, call counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of tiny pipelines, which imports diffusers."""
    from attn_support import tiny_pipelines

    return tiny_pipelines


@pytest.fixture(autouse=True)
def _backend_stays() -> Iterator[None]:
    """``set_attention_backend`` of any model also sets that of all models, for the whole process."""
    dispatch = pytest.importorskip("diffusers").models
    registry = getattr(getattr(dispatch, "attention_dispatch", None), "_AttentionBackendRegistry", None)
    before = getattr(registry, "_active_backend", None)
    yield
    if registry is not None and registry._active_backend is not before:
        registry.set_active_backend(before)


@pytest.fixture
def stock_calls() -> Callable[..., Any]:
    """``stock_calls(function) -> (result, calls of torch's scaled_dot_product_attention)``."""
    from tools.families.proof import Calls

    def run(function: Callable[[], Any]) -> tuple[Any, Calls]:
        with Calls() as calls:
            return function(), calls

    return run


@pytest.fixture(params=["processor", "patch"])
def put_on(request: pytest.FixtureRequest) -> Callable[..., Callable[[], None]]:
    """``put_on(pipe, model or module, config=None)``: ours by each of the two ways; returns what takes it off."""
    from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention

    def put(target: Any, config: Any = None) -> Callable[[], None]:
        if request.param == "patch":
            return patch_attention(target, config).remove
        set_processor = getattr(target, "set_attn_processor", None) or target.set_processor
        set_processor(PascalAttnProcessor(config))
        return lambda: set_processor(None)

    return put


@pytest.fixture
def routed() -> Iterator[list[dict[str, Any]]]:
    """One dict per call that reaches our sdpa: the keywords it came with."""
    from tools.families.proof import counted

    with counted() as calls:
        yield calls


@pytest.fixture
def assert_same() -> Callable[[Tensor, Tensor], None]:
    """Raises unless two float32 results differ by rounding only: 1e-4 of their size, through a whole network."""

    def check(ours: Tensor, stock: Tensor) -> None:
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4 * stock.abs().max().item())

    return check
