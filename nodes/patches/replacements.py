"""Functions that take the place of attention in the modules of a model; ``comfy.sites`` finds where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ...pascal_attn_core.call import Options
from ...pascal_attn_core.patching.function_copy import Instead, copy_over, names_in
from ...pascal_attn_core.reference.checks import gap
from ..comfy.layout import four_dimensions
from ..comfy.objects import Make, Replacements, replaced_by_others
from ..comfy.sites import ARGUMENT, HOST_FUNCTIONS, calls_directly, calls_unannounced, helpers, modules_with_attention
from ..engine.compare import Difference, whole
from ..engine.engine import Engine
from ..engine.runs import Place
from ..reporting import gain
from .override import OVERRIDE, Attention, in_host_layout
from .scope import Scope

Find = Callable[[str, nn.Module, "Replacement"], Iterable[tuple[str, Make]]]


@contextmanager
def in_run(engine: Engine) -> Iterator[None]:
    """Attention below is one run of the report; the outermost writes on the node what was done."""
    engine.begin()
    try:
        yield
    finally:
        run = engine.end()
        if run is not None:
            gain.say(run)


def whole_call(
    previous: Attention, sites: Sites, watch: Callable[[tuple, dict[str, Any], Any], None], *, catches: bool
) -> Attention:
    """In place of ``previous``, which does all of a decoding or encoding: one run of the report.

    Args:
        watch: ``watch(args, kwargs, result)`` looks at what went in and came out.
        catches: calls of ``scaled_dot_product_attention`` that no replacement sees go to the engine.
    """
    engine, scope = sites.engine, sites.scope

    @functools.wraps(previous)
    def with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        with in_run(engine), scope.around(engine, "call", catches=catches):
            result = previous(*args, **kwargs)
            if engine.run.count() == 0 and (others := replaced_by_others(sites.model, sites.names)):
                engine.warn(f"no attention call reached the patch: another node replaced {', '.join(others)} after it")
            watch(args, kwargs, result)
            return result

    return with_pascal_attn


class Sites:
    """The places where a VAE or a text encoder computes attention, and what replaces it there.

    Args:
        find: ``find(name, module, ours)`` yields what to replace in a module: an attribute, and one of ours for it.

    Attributes:
        names: what is replaced.
        blocks: the modules that it is in.
        direct: modules that call attention where only a mode around the model sees it.
    """

    def __init__(self, engine: Engine, model: nn.Module, find: Find):
        self.engine, self.model, self.scope = engine, model, Scope()
        self.replacements: Replacements = {}
        for name, module in model.named_modules():
            for attribute, make in find(name, module, Replacement(engine, self.scope, name)):
                self.replacements[f"{name}.{attribute}".lstrip(".")] = make
        self.names = list(self.replacements)
        self.blocks = sorted({name.rpartition(".")[0] for name in self.names})
        self.direct = calls_directly(model, self.blocks)

    def status(self, name: str) -> str:
        """The status of a node that has patched a "VAE" or a "text encoder", whichever ``name`` says."""
        engine, blocks = self.engine, len(self)
        if not blocks:
            return f"this {name} ({engine.subject}) has no attention: nothing to patch"
        return f"{blocks} attention block{'' if blocks == 1 else 's'} of {engine.subject}, {engine.describe()}"

    def __len__(self) -> int:
        return len(self.blocks) + len(self.direct)


class Replacement:
    """Attention by the engine at one place in a model.

    Each method is given the function that is there, and returns the one that takes its place for the clone.

    Attributes:
        place: the module's name, and how its calls came: the engine's part, or ``"by name"``.
    """

    def __init__(self, engine: Engine, scope: Scope, block: str, via: str = ""):
        self.engine, self.scope, self.place = engine, scope, Place(block, via or engine.part)

    def channels_first(self, previous: Attention) -> Attention:
        """For ``attention(q, k, v)`` of VAEs: one head over tensors ``[B, C, *positions]``."""

        def attention_by_pascal_attn(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with self.scope.inside():
                out = None
                if args or kwargs or query.dim() < 3:
                    self.engine.leave(self.place, "its arguments are not known")
                else:
                    q, k, v = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (query, key, value))

                    def as_given(ours: Tensor) -> Tensor:
                        return ours.squeeze(1).transpose(1, 2).reshape(*value.shape[:2], *query.shape[2:])

                    def compare(ours: Tensor) -> Difference | None:
                        return whole(previous, (query, key, value), as_given(ours))

                    out = self.engine.attend(q, k, v, place=self.place, compare=compare)
                return previous(query, key, value, *args, **kwargs) if out is None else as_given(out)

        return attention_by_pascal_attn

    def given(self, position: int, previous: Attention) -> Attention:
        """For a ``forward`` whose argument ``optimized_attention``, at ``position``, is the function to use."""

        @functools.wraps(previous)
        def forward_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], self._in_front_of(args[position]), *args[position + 1 :])
            elif ARGUMENT in kwargs:
                kwargs[ARGUMENT] = self._in_front_of(kwargs[ARGUMENT])
            return previous(*args, **kwargs)

        return forward_with_pascal_attn

    def named(self, previous: Attention) -> Attention:
        """For a method that looks ComfyUI's attention up by its global name, or whose helper functions do: a copy to
        which that name means ours. A method that another pack has replaced is left as it is."""
        module: Any = getattr(previous, "__self__", None)
        method: Any = getattr(previous, "__func__", None)
        is_plain = isinstance(method, FunctionType) and not hasattr(method, "__wrapped__")
        if isinstance(module, nn.Module) and is_plain and method == getattr(type(module), method.__name__, None):
            previous = MethodType(self._copy(method), module)

        return functools.update_wrapper(functools.partial(previous), previous)

    def softcapped(self, previous: Any) -> Attention:
        """For a ``forward`` that computes attention with a softcap by hand: with ours in its middle. Other arguments
        than the known ones, and calls that are left to the host, go to the forward that was there."""
        module: Any = getattr(previous, "__self__", None)

        @functools.wraps(previous)
        def forward_with_pascal_attn(
            hidden_states: Tensor, attention_mask: Tensor | None = None, freqs_cis: Any = None, **others: Any
        ) -> Any:
            def host() -> Any:
                return previous(hidden_states, attention_mask=attention_mask, freqs_cis=freqs_cis, **others)

            if module is None or getattr(previous, "__func__", None) is not type(module).forward or others:
                self.engine.leave(self.place, "its forward is not known")
                return host()

            def returned(out: Tensor) -> Tensor:
                return module.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:2], module.inner_size))

            def compare(out: Tensor) -> Difference | None:
                if hidden_states.shape[1] > 512:
                    return None
                found = gap(returned(out), host()[0].float())
                return Difference("ComfyUI's own", found, hidden_states.dtype)

            def rotate(query: Tensor, key: Tensor) -> Any:
                return previous.__func__.__globals__["apply_rope"](query, key, freqs_cis)

            with self.scope.inside():
                out = self._softcapped(module, hidden_states, attention_mask, rotate, compare)
            return host() if out is None else (returned(out), None)

        return forward_with_pascal_attn

    def _softcapped(
        self, module: Any, hidden: Tensor, mask: Tensor | None, rotate: Callable[..., Any], compare: Callable[..., Any]
    ) -> Tensor | None:
        batch, tokens, _ = hidden.shape

        def projected(projection: nn.Module, heads: int) -> Tensor:
            return projection(hidden).view(batch, tokens, heads, module.head_dim).transpose(1, 2)

        query, key = projected(module.q_proj, module.num_heads), projected(module.k_proj, module.num_kv_heads)
        query, key = rotate(query, key)
        return self.engine.attend(
            query,
            key,
            projected(module.v_proj, module.num_kv_heads),
            None if mask is None else four_dimensions(mask),
            Options(scale=module.scale, enable_gqa=module.num_kv_heads != module.num_heads, softcap=module.softcap),
            self.place,
            compare=compare,
        )

    def _copy(self, function: FunctionType, depth: int = 2) -> FunctionType:
        """A copy of a function, and of helpers that it calls, to which the names of the host's attention mean ours."""
        own = function.__globals__
        replaced: dict[str, Any] = {}
        for name in names_in(function.__code__) & HOST_FUNCTIONS & set(own):
            replaced[name] = self._by_name(name, functools.partial(own.__getitem__, name))
        for name, module in modules_with_attention(function):
            known = [host for host in HOST_FUNCTIONS if hasattr(module, host)]
            ours = {host: self._by_name(host, functools.partial(getattr, module, host)) for host in known}
            replaced[name] = Instead(module, ours)
        for name, helper in helpers(function) if depth else ():
            if calls_unannounced(helper, depth - 1):
                replaced[name] = _while_it_is_there(own, name, helper, self._copy(helper, depth - 1))
        return copy_over(function, replaced)

    def _by_name(self, name: str, look_up: Callable[[], Attention]) -> Attention:
        """Ours for a global name; the original is looked up when it is called."""

        def looked_up(*args: Any, **kwargs: Any) -> Any:
            original = look_up()
            if name == "optimized_attention_for_device":
                return self._in_front_of(original(*args, **kwargs))
            return self._in_front_of(original)(*args, **kwargs)

        return looked_up

    def _in_front_of(self, original: Any) -> Any:
        """Ours in the words of ComfyUI's attention functions, in front of one of them; None for None."""
        if original is None:
            return None

        def attention_by_pascal_attn(*args: Any, **kwargs: Any) -> Any:
            if self.scope.is_inside or OVERRIDE in (kwargs.get("transformer_options") or ()):
                return original(*args, **kwargs)  # decided already, or announced to the override
            with self.scope.inside():
                out = in_host_layout(self.engine, self.place, original, args, kwargs)
                return original(*args, **kwargs) if out is None else out

        return attention_by_pascal_attn


def _while_it_is_there(where: dict[str, Any], name: str, helper: Attention, copy: Attention) -> Attention:
    """``copy`` as long as ``name`` means ``helper``: another pack may replace it later."""

    def helper_with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        now = where.get(name)
        return copy(*args, **kwargs) if now is helper else now(*args, **kwargs)  # type: ignore[misc]

    return helper_with_pascal_attn
