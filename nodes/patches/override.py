"""The attention override of one model clone, in a chain with those of other packs before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...pascal_attn_core.call import Options
from ..comfy.layout import HostCall, NotOurs, empty_containers, has_containers, signature
from ..engine.compare import with_host
from ..engine.engine import Engine
from ..engine.runs import Place, block_name
from .scope import Scope

OVERRIDE = "optimized_attention_override"


def make_override(
    engine: Engine, scope: Scope, previous: Callable[..., Any] | None, *, runs_first: bool = False
) -> Callable[..., Any]:
    """``override(func, *args, **kwargs)`` as ComfyUI calls it: ours where we take the call, else ``previous``, else
    ``func``, the host's own function. With ``runs_first`` every call goes to ``previous`` first, and ours gets those
    that it passes on.

    A closure, not an object with ``__call__``: up to ComfyUI 0.12 a clone of the model copies objects deeply.
    """
    if previous is not None and runs_first:
        return _mark(_behind(engine, scope, previous), engine, previous)

    def attention_by_pascal_attn(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _answer(engine, scope, func, previous, args, kwargs)

    _mark(attention_by_pascal_attn, engine, previous)
    # Read by ComfyUI's estimate of a step's memory: no score matrix is stored.
    attention_by_pascal_attn.memory_efficient = True  # type: ignore[attr-defined]
    # Given tensors in containers, ComfyUI unpacks them for an override without this attribute; it is there only so
    # that an override further back which wants them still gets them.
    if previous is not None and hasattr(previous, "container_function"):
        attention_by_pascal_attn.container_function = _with_containers(attention_by_pascal_attn)  # type: ignore[attr-defined]
    return attention_by_pascal_attn


def _behind(engine: Engine, scope: Scope, previous: Callable[..., Any]) -> Callable[..., Any]:
    """``previous`` with ours in place of the host's function."""

    def attention_by_pascal_attn(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def passed_on(*args: Any, **kwargs: Any) -> Any:
            return _answer(engine, scope, func, None, args, kwargs)

        if torch.compiler.is_compiling():
            return previous(passed_on, *args, **kwargs)
        passed_on.__name__ = getattr(func, "__name__", "attention")
        engine.run.came_before += 1
        return previous(passed_on, *args, **kwargs)

    attention_by_pascal_attn.memory_efficient = bool(getattr(previous, "memory_efficient", False))  # type: ignore[attr-defined]
    takes_containers = getattr(previous, "container_function", None)
    if takes_containers is not None:
        attention_by_pascal_attn.container_function = takes_containers  # type: ignore[attr-defined]
    return attention_by_pascal_attn


def _mark(override: Callable[..., Any], engine: Engine, previous: Any) -> Callable[..., Any]:
    # Its own name in the mark: functools.wraps of another pack copies marks.
    override.pascal_attn = (override, engine, previous)  # type: ignore[attr-defined]
    return override


def _answer(
    engine: Engine,
    scope: Scope,
    func: Callable[..., Any],
    previous: Callable[..., Any] | None,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Our answer to a call of ``func``, or that of those before us. What either calls is part of this call."""
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:  # nothing is named or counted in a graph
        out = in_host_layout(engine, Place(), func, args, kwargs)
        if out is not None:
            return out
    else:
        place = Place(block_name(kwargs.get("transformer_options")) or scope.next_name())
    local = scope.local
    before, local.inside = local.inside, True
    try:
        if not is_compiling:
            out = in_host_layout(engine, place, func, args, kwargs)
        return _pass_to(func, previous, args, kwargs) if out is None else out
    finally:
        local.inside = before


def in_host_layout(
    engine: Engine, place: Place, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
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
    out = engine.attend(
        call.query,
        call.key,
        call.value,
        call.mask,
        Options(scale=call.scale, enable_gqa=call.enable_gqa),
        place,
        kind,
        compare=lambda ours: with_host(function, args, kwargs, call.returned(ours)),
    )
    if out is None:
        return None
    if has_containers(args, kwargs):
        empty_containers(args, kwargs)
    return call.returned(out)


def _with_containers(override: Callable[..., Any]) -> Callable[..., Any]:
    def container_function(*args: Any, **kwargs: Any) -> Any:
        from ..comfy.host import attention_function

        return override(attention_function(), *args, **kwargs)

    return container_function


def _pass_to(func: Callable[..., Any], previous: Callable[..., Any] | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The call as it came, to the override before ours, else to the host's own function."""
    if has_containers(args, kwargs):
        takes_containers = getattr(previous, "container_function", None)
        if takes_containers is not None:
            return takes_containers(*args, **kwargs)
        args, kwargs = empty_containers(args, kwargs)
    return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)


def engine_of(override: Any) -> Engine | None:
    """The engine behind an override of ours, None for any other."""
    owner, engine, _ = getattr(override, "pascal_attn", (None, None, None))
    return engine if owner is override else None


def previous_of(override: Any) -> Any:
    """The override to which one of ours passes calls; any other is returned as it is."""
    return override if engine_of(override) is None else override.pascal_attn[2]
