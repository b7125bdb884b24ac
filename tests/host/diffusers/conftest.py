"""Fixtures of the diffusers tests: ours by each of the two ways, call counters."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest


def pytest_pycollect_makemodule() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of tiny pipelines, which imports diffusers."""
    from attn_support import tiny_pipelines

    return tiny_pipelines


@pytest.fixture(autouse=True)
def _backend_stays() -> Iterator[None]:
    """``set_attention_backend`` of any model also sets that of all models, for the whole process."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    before = getattr(registry, "_active_backend", None)
    yield
    if registry is not None and registry._active_backend is not before:
        registry.set_active_backend(before)


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
