"""What takes the place of attention in the modules of a model; see ``_sites`` for where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ...pascal_attn_core.patching.function_copy import copy_over
from ..comfy import host as _host
from ..comfy.layout import four_dimensions
from ..comfy.memory_required import Instead
from ..comfy.objects import Make, replaced_by_others
from ..comfy.sites import ARGUMENT, HOST_FUNCTIONS, calls_unannounced, helpers, modules_with_attention, names_of
from ..engine.compare import Difference, difference, whole
from ..engine.engine import Engine
from ..reporting.gain import status_line
from .override import OVERRIDE, in_host_layout
from .scope import Scope

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
            _host.say(run.line(), engine.unique_id, status_line(run, _host.attention_name()))


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


def named_attention(engine: Engine, scope: Scope, block: str, via: str = "") -> Make:
    """For a method that looks ComfyUI's attention up by its global name, or whose helper functions do: a copy to which
    that name means ours. A method that another pack has replaced is left as it is."""

    def make(previous: Callable[..., Any]) -> Callable[..., Any]:
        module: Any = getattr(previous, "__self__", None)
        method: Any = getattr(previous, "__func__", None)
        plain = (
            isinstance(module, nn.Module) and isinstance(method, FunctionType) and not hasattr(method, "__wrapped__")
        )
        if plain and method is getattr(type(module), method.__name__, None):
            assert isinstance(method, FunctionType)
            previous = MethodType(_with_ours(engine, scope, block, method, via or engine.part), module)

        @functools.wraps(previous)
        def method_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            return previous(*args, **kwargs)

        return method_with_pascal_attn

    return make


def softcapped(engine: Engine, scope: Scope, block: str) -> Make:
    """For a ``forward`` that computes attention with a softcap by hand: with ours in its middle. Other arguments than
    the known ones, and calls that are left to the host, go to the forward that was there."""

    def make(previous: Any) -> Callable[..., Any]:
        module = getattr(previous, "__self__", None)

        @functools.wraps(previous)
        def forward_with_pascal_attn(
            hidden_states: Tensor, attention_mask: Tensor | None = None, freqs_cis: Any = None, **others: Any
        ) -> Any:
            def host() -> Any:
                return previous(hidden_states, attention_mask=attention_mask, freqs_cis=freqs_cis, **others)

            if module is None or getattr(previous, "__func__", None) is not type(module).forward or others:
                engine.leave(block, "its forward is not known", via=engine.part)
                return host()
            batch, tokens, _ = hidden_states.shape

            def projected(projection: nn.Module, heads: int) -> Tensor:
                return projection(hidden_states).view(batch, tokens, heads, module.head_dim).transpose(1, 2)

            def returned(out: Tensor) -> Tensor:
                return module.o_proj(out.transpose(1, 2).reshape(batch, tokens, module.inner_size))

            def compare(out: Tensor) -> Difference | None:
                if tokens > 512:
                    return None
                return difference("ComfyUI's own", returned(out), host()[0].float(), hidden_states.dtype)

            with scope.inside():
                query, key = projected(module.q_proj, module.num_heads), projected(module.k_proj, module.num_kv_heads)
                query, key = previous.__func__.__globals__["apply_rope"](query, key, freqs_cis)
                value = projected(module.v_proj, module.num_kv_heads)
                options = {"scale": module.scale, "softcap": module.softcap, "via": engine.part, "block": block}
                grouped = module.num_kv_heads != module.num_heads
                mask = None if attention_mask is None else four_dimensions(attention_mask)
                out = engine.attend(query, key, value, mask, enable_gqa=grouped, compare=compare, **options)
            return host() if out is None else (returned(out), None)

        return forward_with_pascal_attn

    return make


def _with_ours(
    engine: Engine, scope: Scope, block: str, function: FunctionType, via: str, depth: int = 2
) -> FunctionType:
    """A copy of a function, and of helpers that it calls, to which the names of the host's attention mean ours."""

    def ours(name: str, look_up: Callable[[], Attention]) -> Attention:
        return _by_name(engine, scope, block, look_up, name, via)

    replaced: dict[str, Any] = {}
    for name in names_of(function) & HOST_FUNCTIONS & set(function.__globals__):
        replaced[name] = ours(name, functools.partial(function.__globals__.__getitem__, name))
    for name, module in modules_with_attention(function):
        known = [host for host in HOST_FUNCTIONS if hasattr(module, host)]
        replaced[name] = Instead(module, {h: ours(h, functools.partial(getattr, module, h)) for h in known})
    for name, helper in helpers(function) if depth else ():
        if calls_unannounced(helper, depth - 1):
            copy = _with_ours(engine, scope, block, helper, via, depth - 1)
            replaced[name] = _while_it_is_there(function.__globals__, name, helper, copy)
    return copy_over(function, replaced)


def _while_it_is_there(where: dict[str, Any], name: str, helper: Attention, copy: Attention) -> Attention:
    """``copy`` as long as ``name`` means ``helper``: another pack may replace it later."""

    def helper_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        now = where.get(name)
        return copy(*args, **kwargs) if now is helper else now(*args, **kwargs)  # type: ignore[misc]

    return helper_with_pascal_attn


def _ours(engine: Engine, scope: Scope, block: str, original: Attention | None, via: str = "") -> Attention | None:
    """Ours in the words of ComfyUI's attention functions, in front of one of them."""
    if original is None:
        return None

    def attention_by_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        if scope.is_inside or OVERRIDE in (kwargs.get("transformer_options") or ()):
            return original(*args, **kwargs)  # decided already, or announced to the override
        with scope.inside():
            out = in_host_layout(engine, block, original, args, kwargs, via=via or engine.part)
            return original(*args, **kwargs) if out is None else out

    return attention_by_pascal_attn


def _by_name(
    engine: Engine, scope: Scope, block: str, look_up: Callable[[], Attention], name: str, via: str
) -> Attention:
    """Ours for a global name; the original is looked up when it is called."""

    def looked_up(*args: Any, **kwargs: Any) -> Any:
        original = look_up()
        if name == "optimized_attention_for_device":
            return _ours(engine, scope, block, original(*args, **kwargs), via)
        attention = _ours(engine, scope, block, original, via)
        assert attention is not None
        return attention(*args, **kwargs)

    return looked_up
