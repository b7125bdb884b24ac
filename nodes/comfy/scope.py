"""What lies around one model call: names for its attention calls, and those that pass the override by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..engine.compare import with_torch
from ..engine.engine import Engine

_SDPA = torch._C._nn.scaled_dot_product_attention


class _Local(threading.local):
    word = "call"
    ordinal = 0
    inside = False
    catching = False


class Scope:
    """State of the model call in progress, per thread."""

    def __init__(self) -> None:
        self.local = _Local()  # word, ordinal, inside, catching

    @contextmanager
    def numbering(self, word: str) -> Iterator[None]:
        """Attention calls below that have no name of their own are ``"<word> 1"``, ``"<word> 2"`` ..."""
        local = self.local
        before = local.word, local.ordinal
        local.word, local.ordinal = word, 0
        try:
            yield
        finally:
            local.word, local.ordinal = before

    def next_name(self) -> str:
        """The name of the next attention call, by its number."""
        local = self.local
        local.ordinal += 1
        return f"{local.word} {local.ordinal}"

    @property
    def is_inside(self) -> bool:
        """Whether this thread is below an attention call that has been decided already."""
        return self.local.inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Attention calls below are part of the one being worked on."""
        before = self.local.inside
        self.local.inside = True
        try:
            yield
        finally:
            self.local.inside = before

    @contextmanager
    def catching(self, engine: Engine) -> Iterator[None]:
        """Calls of ``scaled_dot_product_attention`` below go to the engine; nested, once."""
        if self.local.catching:
            yield
            return
        self.local.catching = True
        try:
            with _CatchSDPA(engine, self):
                yield
        finally:
            self.local.catching = False


def make_wrapper(engine: Engine, scope: Scope, word: str, *, catches: bool) -> Callable[..., Any]:
    """For ``add_wrapper_with_key``: numbers the attention calls below, and catches those past the override."""

    def wrapper(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with scope.numbering(word), scope.catching(engine) if catches else nullcontext():
            return executor(*args, **kwargs)

    return wrapper


class _CatchSDPA(TorchFunctionMode):
    """Takes the calls of ``scaled_dot_product_attention`` in this thread that no override has seen."""

    def __init__(self, engine: Engine, scope: Scope):
        super().__init__()
        self.engine, self.scope = engine, scope

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not _SDPA or self.scope.is_inside or not all(t in _PLAIN for t in types):
            return func(*args, **kwargs)
        return _sdpa_of(self.engine, self.scope, func, args, kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_OPTIONS = {*_NAMES, "scale", "enable_gqa"}


def _sdpa_of(engine: Engine, scope: Scope, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    given = dict(zip(_NAMES, args)) | kwargs
    block = scope.next_name()
    why = _why_not(given)
    if why:
        engine.leave(block, why, via="SDPA")
        return func(*args, **kwargs)
    with scope.inside():
        out = engine.attend(
            given["query"],
            given["key"],
            given["value"],
            given.get("attn_mask"),
            scale=given.get("scale"),
            enable_gqa=bool(given.get("enable_gqa", False)),
            is_causal=bool(given.get("is_causal", False)),
            block=block,
            via="SDPA",
            compare=lambda ours: with_torch(func, args, kwargs, ours),
        )
    return func(*args, **kwargs) if out is None else out


def _why_not(given: dict[str, Any]) -> str:
    unknown = sorted(set(given) - _OPTIONS)
    if unknown:
        return f"its argument {', '.join(unknown)} is not known"
    if not {"query", "key", "value"} <= set(given):
        return "an argument is missing"
    if given.get("dropout_p"):
        return "it has dropout"
    return ""
