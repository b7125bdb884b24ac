"""What takes the place of attention in the modules of a VAE or text encoder; see ``_sites`` for where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ..pascal_attn_core.function_copy import copy_over
from . import _host
from ._compare import Difference, whole
from ._engine import Engine
from ._objects import Make, replaced_by_others
from ._override import in_host_layout
from ._scope import Scope
from ._sites import ARGUMENT, host_names

Attention = Callable[..., Any]


def status(engine: Engine, blocks: int, name: str) -> str:
    """What a node says of itself when it has patched ``blocks`` modules of ``name``, "VAE" or "text encoder"."""
    if not blocks:
        return f"this {name} ({engine.subject}) has no attention: nothing to patch"
    plural = "" if blocks == 1 else "s"
    return f"{blocks} attention block{plural} of {engine.subject}, {engine.describe()}"


def warn_if_replaced(engine: Engine, model: nn.Module, names: Iterable[str]) -> None:
    """Say so if no call came here and other functions than ours are in the loaded model."""
    if engine.run.count() == 0 and (others := replaced_by_others(model, names)):
        engine.warn(f"no attention call reached the patch: another node replaced {', '.join(others)} after it")


@contextmanager
def in_run(engine: Engine) -> Iterator[None]:
    """Attention below is one run of the report; the outermost says on the node what it came to."""
    engine.begin()
    try:
        yield
    finally:
        run = engine.end()
        if run is not None:
            _host.say(run.line(), engine.unique_id)


def whole_call(
    engine: Engine, scope: Scope, watch: Callable[[tuple, dict[str, Any], Any], None], *, catches: bool
) -> Make:
    """For the function that does all of a decoding or encoding: ``watch(args, kwargs, result)`` looks at what went in
    and came out; ``catches``: calls of ``scaled_dot_product_attention`` that no replacement sees go to the engine."""

    def make(previous: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(previous)
        def with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            catching = scope.catching(engine) if catches else nullcontext()
            with in_run(engine), scope.numbering("call"), catching:
                result = previous(*args, **kwargs)
                watch(args, kwargs, result)
                return result

        return with_pascal_attn

    return make


def channels_first(engine: Engine, scope: Scope, block: str) -> Make:
    """For ``attention(q, k, v)`` of VAEs: one head over tensors ``[B, C, *positions]``."""

    def make(previous: Attention) -> Attention:
        def attention_by_pascal_attn(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with scope.inside():
                out = None
                if args or kwargs or query.dim() < 3:
                    engine.leave(block, "its arguments are not known", via=engine.part)
                else:
                    tokens = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (query, key, value))

                    def as_given(ours: Tensor) -> Tensor:
                        return ours.squeeze(1).transpose(1, 2).reshape(*value.shape[:2], *query.shape[2:])

                    def compare(ours: Tensor) -> Difference | None:
                        return whole(previous, (query, key, value), as_given(ours))

                    out = engine.attend(*tokens, block=block, via=engine.part, compare=compare)
                return previous(query, key, value, *args, **kwargs) if out is None else as_given(out)

        return attention_by_pascal_attn

    return make


def given_attention(engine: Engine, scope: Scope, block: str, position: int) -> Make:
    """For a ``forward`` whose argument ``optimized_attention``, at ``position``, is the function to use."""

    def make(previous: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(previous)
        def forward_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], _ours(engine, scope, block, args[position]), *args[position + 1 :])
            elif ARGUMENT in kwargs:
                kwargs[ARGUMENT] = _ours(engine, scope, block, kwargs[ARGUMENT])
            return previous(*args, **kwargs)

        return forward_with_pascal_attn

    return make


def named_attention(engine: Engine, scope: Scope, block: str) -> Make:
    """For a ``forward`` that looks ComfyUI's attention up by its global name: a copy to which that name means ours.
    A forward that another pack has replaced is left as it is."""

    def make(previous: Callable[..., Any]) -> Callable[..., Any]:
        module, forward = getattr(previous, "__self__", None), getattr(previous, "__func__", None)
        if isinstance(module, nn.Module) and isinstance(forward, FunctionType) and forward is type(module).forward:
            replaced = {name: _by_name(engine, scope, block, forward, name) for name in host_names(type(module))}
            previous = MethodType(copy_over(forward, replaced), module)

        @functools.wraps(previous)
        def forward_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            return previous(*args, **kwargs)

        return forward_with_pascal_attn

    return make


def _ours(engine: Engine, scope: Scope, block: str, original: Attention | None) -> Attention | None:
    """Ours in the words of ComfyUI's attention functions, in front of one of them."""
    if original is None:
        return None

    def attention_by_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        with scope.inside():
            out = in_host_layout(engine, block, original, args, kwargs, via=engine.part)
            return original(*args, **kwargs) if out is None else out

    return attention_by_pascal_attn


def _by_name(engine: Engine, scope: Scope, block: str, forward: FunctionType, name: str) -> Attention:
    """Ours for a global name; the original is looked up when it is called."""

    def looked_up(*args: Any, **kwargs: Any) -> Any:
        original = forward.__globals__[name]
        if name == "optimized_attention_for_device":
            return _ours(engine, scope, block, original(*args, **kwargs))
        attention = _ours(engine, scope, block, original)
        assert attention is not None
        return attention(*args, **kwargs)

    return looked_up
