"""State of one model call: names for its attention calls, and the calls that bypass the override."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...pascal_attn_core.call import PLAIN, Options
from ...pascal_attn_core.patching.interception import TORCH_SDPA, SdpaArguments, SdpaMode, bind_sdpa
from ...pascal_attn_core.vae.banded import Banded
from ..engine.compare import with_torch
from ..engine.engine import Engine
from ..engine.runs import Place


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
    def _with(self, **values: Any) -> Iterator[None]:
        local = self.local
        before = {name: getattr(local, name) for name in values}
        vars(local).update(values)
        try:
            yield
        finally:
            vars(local).update(before)

    def inside(self) -> AbstractContextManager[None]:
        """Attention calls below are part of the one being worked on."""
        return self._with(inside=True)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is below an attention call that has been decided already."""
        return self.local.inside

    @contextmanager
    def around(self, engine: Engine, word: str, *, catches: bool) -> Iterator[None]:
        """Attention calls below that have no name of their own are ``"<word> 1"``, ``"<word> 2"`` ...

        Args:
            catches: calls of ``scaled_dot_product_attention`` go to the engine; nested, once.
        """
        catches = catches and not self.local.catching
        mode = SdpaMode(functools.partial(_attend, engine, self)) if catches else nullcontext()
        with self._with(word=word, ordinal=0, catching=catches or self.local.catching), mode:
            yield

    def next_name(self) -> str:
        local = self.local
        local.ordinal += 1
        return f"{local.word} {local.ordinal}"


def make_wrapper(engine: Engine, scope: Scope, word: str, *, catches: bool) -> Callable[..., Any]:
    """For ``add_wrapper_with_key``: numbers the attention calls below, and catches those that bypass the override."""

    def wrapper(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with scope.around(engine, word, catches=catches):
            return executor(*args, **kwargs)

    return wrapper


def _attend(engine: Engine, scope: Scope, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of ``scaled_dot_product_attention`` that has bypassed the override."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if scope.is_inside or any(type(tensor) not in (*PLAIN, Banded) for tensor in tensors):
        return TORCH_SDPA(*args, **kwargs)
    place, call = Place(scope.next_name(), "SDPA"), bind_sdpa(args, kwargs)
    why = call if isinstance(call, str) else "it has dropout" if call.dropout_p else ""
    if why:
        engine.leave(place, why)
        return TORCH_SDPA(*args, **kwargs)
    assert isinstance(call, SdpaArguments)
    with scope.inside():
        options = Options(0.0, bool(call.is_causal), call.scale, bool(call.enable_gqa))
        out = engine.attend(*call[:4], options, place, compare=functools.partial(with_torch, call))
    return TORCH_SDPA(*args, **kwargs) if out is None else out
