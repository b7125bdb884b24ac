"""State of one model call: names for its attention calls, and the calls that bypass the override."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core.call import PLAIN, Options
from ...pascal_attn_core.patching.interception import TORCH_SDPA, SdpaArguments, SdpaMode, bind_sdpa
from ...pascal_attn_core.vae.banded import Banded
from ..comfy.by_name import Attention, caught
from ..comfy.layout import HostCall, NotOurs, empty_containers, has_containers, signature
from ..engine.compare import Difference, with_host, with_torch
from ..engine.engine import Engine
from ..engine.runs import Place, block_name


class _Local(threading.local):
    word = "call"
    ordinal = 0
    place = ""
    inside = False
    catching = False


class Scope:
    """State of the model call in progress, per thread."""

    def __init__(self) -> None:
        self.local = _Local()

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

    def at(self, place: str) -> AbstractContextManager[None]:
        """Attention calls below are those of the module of this name."""
        return self._with(place=place)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is below an attention call that has been decided already."""
        return self.local.inside

    @contextmanager
    def around(self, engine: Engine, word: str, *, catches: bool) -> Iterator[None]:
        """Attention calls below that have no name of their own are ``"<word> 1"``, ``"<word> 2"`` ...

        Args:
            catches: calls that bypass the override, of the host's functions and of ``scaled_dot_product_attention``, go
                to the engine; nested, once.
        """
        is_first = catches and not self.local.catching
        with ExitStack() as stack, self._with(word=word, ordinal=0, catching=catches or self.local.catching):
            if is_first:
                stack.enter_context(caught(functools.partial(_attend_by_name, engine, self)))
                stack.enter_context(SdpaMode(functools.partial(_attend, engine, self)))
            yield

    def next_name(self) -> str:
        local = self.local
        local.ordinal += 1
        return local.place or f"{local.word} {local.ordinal}"


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


def _attend_by_name(engine: Engine, scope: Scope, function: Attention, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of a function of the host that has bypassed the override."""
    if scope.is_inside:
        return function(*args, **kwargs)
    via = "by name" if engine.part == "diffusion model" else engine.part
    place = Place(block_name(kwargs.get("transformer_options")) or scope.next_name(), via)
    with scope.inside():
        out = in_host_layout(engine, place, function, args, kwargs)
        return function(*args, **kwargs) if out is None else out


def in_host_layout(engine: Engine, place: Place, function: Attention, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call of the host's attention function, its result in the host's layout; None where it is left to others.

    function: what the host would call; a few rows of the first call of each kind are compared with its answer.
    """
    kind = None
    try:
        kind = signature(args, kwargs)
        if engine.is_left(place, kind):
            return None
        call = HostCall.of(args, kwargs)
    except NotOurs as reason:
        engine.leave(place, str(reason), kind)
        return None
    except Exception as error:  # an unforeseen call is the host's, whatever is wrong with it
        engine.leave_unread(place, error)
        return None

    def compare(ours: Tensor) -> Difference | None:
        return with_host(function, args, kwargs, call.returned(ours))

    options = Options(scale=call.scale, enable_gqa=call.enable_gqa)
    out = engine.attend(call.query, call.key, call.value, call.mask, options, place, kind, compare)
    if out is None:
        return None
    if has_containers(args, kwargs):
        empty_containers(args, kwargs)
    return call.returned(out)
