"""The attention calls of one model clone: those that come to its override, in a chain with those of other packs, and
those that bypass it; and the state of the model call that they are in."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core.call import PLAIN
from ...pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa
from ...pascal_attn_core.vae.banded import Banded
from ..comfy import host
from ..comfy.by_name import Attention, caught
from ..comfy.layout import HostCall, NotOurs, empty_containers, has_containers, signature
from ..comfy.others import AUTO, runs_first
from ..engine.compare import Difference, with_host
from ..engine.engine import Engine
from ..engine.runs import block_name

Answer = Callable[[Attention, "Attention | None", tuple, dict[str, Any]], Any]


class _Local(threading.local):
    word = "call"
    ordinal = 0
    place = ""
    inside = False  # below an attention call that has been decided already
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


# ---- the override ----------------------------------------------------------------------------------------------------


def make_override(owner: Any, answer: Answer, previous: Attention | None, earlier: str = AUTO) -> Any:
    """``override(func, *args, **kwargs)`` as ComfyUI calls it, with the attributes that ComfyUI reads. Another pack's
    override that may change the result, by the choice ``earlier`` of ``others``, gets every call first.

    A closure, not an object with ``__call__``: up to ComfyUI 0.12 a clone of the model copies objects deeply.

    Args:
        owner: the engine or the 8-bit layers behind it.
        answer: ``answer(func, rest, args, kwargs)``: ours to a call of ``func``, the host's own function, or that of
            ``rest``, the override that gets what ours leaves.
        previous: the override that the clone had.
    """
    first, rest = _split(previous, earlier)

    def alone(func: Attention, *args: Any, **kwargs: Any) -> Any:
        return answer(func, rest, args, kwargs)

    def attention_by_pascal_attn(func: Attention, *args: Any, **kwargs: Any) -> Any:
        return alone(func, *args, **kwargs) if first is None else first(_passed_on(alone, func), *args, **kwargs)

    override: Any = attention_by_pascal_attn
    override.pascal_attn = (override, owner, previous, first and alone)  # itself: functools.wraps copies marks
    # For ComfyUI's estimate of a step's memory.
    takes_all = first is None and isinstance(owner, Engine)
    override.memory_efficient = takes_all or getattr(previous, "memory_efficient", False)
    # Given tensors in containers, ComfyUI unpacks them for an override without this attribute; it is there only so
    # that an override further back which wants them still gets them.
    takes_containers = getattr(previous, "container_function", None)
    if takes_containers is not None:
        override.container_function = (
            takes_containers if first else lambda *args, **kwargs: override(host.attention_function(), *args, **kwargs)
        )
    return override


def _passed_on(override: Attention, func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what an override that runs first is given in place of ``func``, the host's own function."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        return override(func, *args, **kwargs)

    if not torch.compiler.is_compiling():
        attention.__name__ = getattr(func, "__name__", "attention")
    return attention


def by_engine(
    engine: Engine, scope: Scope, func: Attention, previous: Attention | None, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Answer a call by an engine, or by those before us. What either calls is part of this call."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:  # nothing is named or counted in a graph
        out = in_host_layout(engine, "", func, args, kwargs)
        if out is not None:
            return out
    else:
        block = block_name(kwargs.get("transformer_options")) or scope.next_name()
    local = scope.local
    before, local.inside = local.inside, True
    try:
        if not is_compiling:
            out = in_host_layout(engine, block, func, args, kwargs)
        return pass_to(func, previous, args, kwargs) if out is None else out
    finally:
        local.inside = before


def pass_to(func: Callable[..., Any], previous: Callable[..., Any] | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The call as it came, to the override before ours, else to the host's own function."""
    if has_containers(args, kwargs):
        takes_containers = getattr(previous, "container_function", None)
        if takes_containers is not None:
            return takes_containers(*args, **kwargs)
        args, kwargs = empty_containers(args, kwargs)
    return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)


def owner_of(override: Any) -> Any:
    """The engine or the 8-bit layers behind one of our overrides, None for any other."""
    itself, owner, *_ = getattr(override, "pascal_attn", (None, None))
    return owner if itself is override else None


def engine_of(override: Any) -> Engine | None:
    owner = owner_of(override)
    return owner if isinstance(owner, Engine) else None


def previous_of(override: Any, kind: type = Engine) -> Any:
    """The override to which one of ours with an owner of this kind passes calls; any other is returned as it is."""
    return override.pascal_attn[2] if isinstance(owner_of(override), kind) else override


def _split(previous: Attention | None, choice: str) -> tuple[Attention | None, Attention | None]:
    """The overrides before one of ours: another pack's that every call goes to first, by the choice of ``others``, and
    the one that gets what ours leaves."""
    if engine_of(previous) is not None:
        *_, others_own, alone = previous.pascal_attn  # type: ignore[union-attr]
        return (None, previous) if alone is None else (others_own, alone)
    return (previous, None) if runs_first(previous, choice) else (None, previous)


# ---- calls that bypass it --------------------------------------------------------------------------------------------


def make_wrapper(engine: Engine, scope: Scope, word: str, *, catches: bool) -> Callable[..., Any]:
    """For ``add_wrapper_with_key``: numbers the attention calls below, and catches those that bypass the override."""

    def wrapper(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with scope.around(engine, word, catches=catches):
            return executor(*args, **kwargs)

    return wrapper


def _attend(engine: Engine, scope: Scope, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of ``scaled_dot_product_attention`` that has bypassed the override."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if scope.local.inside or any(type(tensor) not in (*PLAIN, Banded) for tensor in tensors):
        return TORCH_SDPA(*args, **kwargs)
    block, given = scope.next_name(), bind_sdpa(args, kwargs)
    if isinstance(given, str) or given.dropout_p:
        engine.leave(block, given if isinstance(given, str) else "it has dropout")
        return TORCH_SDPA(*args, **kwargs)
    with scope.inside():
        given = given._replace(is_causal=bool(given.is_causal), enable_gqa=bool(given.enable_gqa))
        out = engine.attend(given, block)
    return TORCH_SDPA(*args, **kwargs) if out is None else out


def _attend_by_name(engine: Engine, scope: Scope, function: Attention, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of a function of the host that has bypassed the override."""
    if scope.local.inside:
        return function(*args, **kwargs)
    with scope.inside():
        out = in_host_layout(engine, scope.next_name(), function, args, kwargs)
        return function(*args, **kwargs) if out is None else out


def in_host_layout(engine: Engine, block: str, function: Attention, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call of the host's attention function, its result in the host's layout; None where it is left to others.

    function: what the host would call; a few rows of the first call of each kind are compared with its answer.
    """
    kind = None
    try:
        kind = signature(args, kwargs)
        if engine.is_left(block, kind):
            return None
        call = HostCall.of(args, kwargs)
    except NotOurs as reason:
        engine.leave(block, str(reason), kind)
        return None
    except Exception as error:  # an unforeseen call is the host's, whatever is wrong with it
        engine.leave_unread(block, error)
        return None

    def compare(ours: Tensor) -> Difference | None:
        return with_host(function, args, kwargs, call.returned(ours))

    out = engine.attend(call.given, block, kind, compare)
    if out is None:
        return None
    if has_containers(args, kwargs):
        empty_containers(args, kwargs)
    return call.returned(out)
