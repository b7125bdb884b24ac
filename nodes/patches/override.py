"""The attention override of one model clone, in a chain with those of other packs before and after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..comfy import host
from ..comfy.by_name import OVERRIDE as OVERRIDE
from ..comfy.by_name import Attention
from ..comfy.layout import empty_containers, has_containers
from ..engine.engine import Engine
from ..engine.runs import Place, block_name
from .scope import Scope, in_host_layout


def make_override(engine: Engine, scope: Scope, previous: Attention | None, *, runs_first: bool = False) -> Attention:
    """``override(func, *args, **kwargs)`` as ComfyUI calls it: ours where we take the call, else ``previous``, else
    ``func``, the host's own function. With ``runs_first`` every call goes to ``previous`` first, and ours gets those
    that it passes on.

    A closure, not an object with ``__call__``: up to ComfyUI 0.12 a clone of the model copies objects deeply.
    """
    behind = previous is not None and runs_first

    def attention_by_pascal_attn(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if previous is None or not behind:
            return _answer(engine, scope, func, previous, args, kwargs)

        def passed_on(*args: Any, **kwargs: Any) -> Any:
            return _answer(engine, scope, func, None, args, kwargs)

        if not torch.compiler.is_compiling():
            passed_on.__name__ = getattr(func, "__name__", "attention")
            engine.run.came_before += 1
        return previous(passed_on, *args, **kwargs)

    stores_scores = behind and not getattr(previous, "memory_efficient", False)
    return marked(attention_by_pascal_attn, engine, previous, stores_scores=stores_scores, behind=behind)


def marked(override: Any, owner: Any, previous: Attention | None, *, stores_scores: bool, behind: bool = False) -> Any:
    """An override with its owner and the one before it, and the attributes that ComfyUI reads."""
    override.pascal_attn = (override, owner, previous)  # itself, since functools.wraps of another pack copies marks
    override.memory_efficient = not stores_scores  # for ComfyUI's estimate of a step's memory
    # Given tensors in containers, ComfyUI unpacks them for an override without this attribute; it is there only so
    # that an override further back which wants them still gets them.
    takes_containers = getattr(previous, "container_function", None)
    if takes_containers is not None:
        override.container_function = takes_containers if behind else functools.partial(_in_containers, override)
    return override


def _in_containers(override: Attention, *args: Any, **kwargs: Any) -> Any:
    return override(host.attention_function(), *args, **kwargs)


def _answer(
    engine: Engine, scope: Scope, func: Attention, previous: Attention | None, args: tuple, kwargs: dict[str, Any]
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
    """The engine or the 8-bit layers behind an override of ours, None for any other."""
    itself, owner, _ = getattr(override, "pascal_attn", (None, None, None))
    return owner if itself is override else None


def engine_of(override: Any) -> Engine | None:
    owner = owner_of(override)
    return owner if isinstance(owner, Engine) else None


def previous_of(override: Any, kind: type = Engine) -> Any:
    """The override to which one of ours with an owner of this kind passes calls; any other is returned as it is."""
    return override.pascal_attn[2] if isinstance(owner_of(override), kind) else override
