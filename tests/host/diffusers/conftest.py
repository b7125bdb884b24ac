"""Fixtures of the diffusers tests: tiny pipelines, call counters, wrong attention to compare with."""

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

from pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa, torch_sdpa

REDIRECT = "pascal_attn_core.diffusers.redirect.sdpa"


class StockCalls:
    """The calls of torch's scaled_dot_product_attention: how many, and how many of them had a mask."""

    def __init__(self) -> None:
        self.count = self.masked = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        call = bind_sdpa(args, kwargs)
        assert not isinstance(call, str)
        self.count += 1
        self.masked += call.attn_mask is not None
        return TORCH_SDPA(*args, **kwargs)


def uniform_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Wrong on purpose: every key counts the same."""
    return value.mean(dim=-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])


def maskless_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **kw: Any) -> Tensor:
    """Wrong on purpose: the mask is dropped."""
    return torch_sdpa(query, key, value)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module of tiny pipelines, loaded by path: the tests are no package."""
    path = pathlib.Path(__file__).with_name("tiny_pipelines.py")
    spec = importlib.util.spec_from_file_location("tiny_pipelines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stock_calls() -> Callable[..., Any]:
    """``stock_calls(function) -> (result, StockCalls)``."""

    def run(function: Callable[[], Any]) -> tuple[Any, StockCalls]:
        calls = StockCalls()
        with SdpaMode(calls):
            return function(), calls

    return run


@pytest.fixture(params=["processor", "patch"])
def put_on(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``put_on(pipe, model or module, config=None)``: ours by each of the two ways; returns the Patch, if it is one."""
    from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention

    def put(target: Any, config: Any = None) -> Any:
        if request.param == "patch":
            return patch_attention(target, config)
        set_processor = getattr(target, "set_attn_processor", None) or target.set_processor
        return set_processor(PascalAttnProcessor(config))

    return put


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """One dict per call that reaches our sdpa: the keywords it came with."""
    from pascal_attn_core.diffusers import redirect

    calls: list[dict[str, Any]] = []
    original = redirect.sdpa

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(REDIRECT, counted)
    return calls


@pytest.fixture
def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``with wrong_attention("uniform"):`` our sdpa computes something else."""
    kinds = {"uniform": uniform_attention, "maskless": maskless_attention}

    @contextmanager
    def use(kind: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(REDIRECT, kinds[kind])
            yield

    return use


@pytest.fixture
def assert_same() -> Callable[[Tensor, Tensor], None]:
    """Raises unless two float32 results differ by rounding only: 1e-4 of their size, through a whole network."""

    def check(ours: Tensor, stock: Tensor) -> None:
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4 * stock.abs().max().item())

    return check
