"""Functions that take the place of attention in the modules of a model; ``comfy.objects`` finds where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...pascal_attn_core.call import Arguments
from ..comfy.by_name import Attention
from ..comfy.objects import Replacements, replaced_by_others
from ..engine.engine import Engine
from ..reporting import gain
from .override import Scope

Replace = Callable[[Engine, Scope, str, Attention], Attention]
Find = Callable[[nn.Module], Iterable[tuple[str, Replace]]]


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


def whole_call(previous: Attention, sites: Sites, watch: Callable[[tuple, dict[str, Any], Any], None]) -> Attention:
    """In place of ``previous``, which does all of a decoding or encoding: one run of the report.

    Args:
        watch: ``watch(args, kwargs, result)`` looks at what went in and came out.
    """
    engine, scope = sites.engine, sites.scope

    @functools.wraps(previous)
    def with_pascal_attn(*args: Any, **kwargs: Any) -> Any:
        with in_run(engine), scope.around(engine, "call", catches=True):
            result = previous(*args, **kwargs)
            if engine.run.count() == 0 and (others := replaced_by_others(sites.model, sites.names)):
                engine.warn(f"no attention call reached the patch: another node replaced {', '.join(others)} after it")
            watch(args, kwargs, result)
            return result

    return with_pascal_attn


class Sites:
    """The places where a VAE or a text encoder computes attention, and what replaces it there.

    Args:
        find: ``find(module)`` yields what to replace in a module: an attribute, and a function of this file for it.

    Attributes:
        names: what is replaced.
        blocks: the modules that it is in.
    """

    def __init__(self, engine: Engine, model: nn.Module, find: Find):
        self.engine, self.model, self.scope = engine, model, Scope()
        self.replacements: Replacements = {}
        for name, module in model.named_modules():
            for attribute, replace in find(module):
                make = functools.partial(replace, engine, self.scope, name)
                self.replacements[f"{name}.{attribute}".lstrip(".")] = make
        self.names = list(self.replacements)
        self.blocks = sorted({name.rpartition(".")[0] for name in self.names})

    def status(self, name: str) -> str:
        """The status of a node that has patched a "VAE" or a "text encoder", whichever ``name`` says."""
        engine, blocks = self.engine, len(self.blocks)
        if not blocks:
            return f"this {name} ({engine.subject}) has no attention: nothing to patch"
        return f"{blocks} attention block{'' if blocks == 1 else 's'} of {engine.subject}, {engine.describe()}"


def channels_first(engine: Engine, scope: Scope, block: str, previous: Attention) -> Attention:
    """In place of ``previous(q, k, v)`` of a VAE: one head over tensors ``[B, C, *positions]``."""

    def attention_by_pascal_attn(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = None
        with scope.inside():
            if args or kwargs or query.dim() < 3:
                engine.leave(block, "its arguments are not known")
            else:
                q, k, v = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (query, key, value))
                out = engine.attend(Arguments(q, k, v), block)
            if out is None:
                return previous(query, key, value, *args, **kwargs)
            return out.squeeze(1).transpose(1, 2).reshape(*value.shape[:2], *query.shape[2:])

    return attention_by_pascal_attn


def located(engine: Engine, scope: Scope, block: str, previous: Attention) -> Attention:
    """In place of a ``forward`` that calls the host's or torch's attention: the calls have the module's name."""

    @functools.wraps(previous)
    def forward_in_place(*args: Any, **kwargs: Any) -> Any:
        with scope.at(block):
            return previous(*args, **kwargs)

    return forward_in_place
