"""What hosts add to modules: hooks that exchange weights around each call, and layers that cast theirs.

Nothing here names a host: the package that knows one registers how its additions are recognised, with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
Slot = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class WeightHooks:
    """Hooks that replace a module's ``forward``, and may exchange its weights before and after each call.

    Attributes:
        names: the instance attributes that they set beside ``forward``; a module that has one of them is hooked.
        slots: yields, for any module, the dicts and keys where the forwards below its hooks are stored, innermost
            first; nothing for a module without hooks.
    """

    names: tuple[str, ...]
    slots: Callable[[nn.Module], Iterator[Slot]]


@dataclass(frozen=True)
class CastingLayers:
    """Layers that fetch, cast and patch their weights inside ``forward``.

    Attributes:
        name: the attribute, of the instance or its class, that they are recognised by.
        cache_prefixes: how the names of the instance attributes begin in which they cache weights between calls;
            attributes that begin with an underscore count as such in any case.
    """

    name: str
    cache_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bookkeeping:
    """Modules of Python code whose lists of what is loaded change between calls and never affect a result.

    Attributes:
        modules: their full names.
    """

    modules: tuple[str, ...]


_ORDINARY = frozenset(key for key in nn.Module().__dict__ if key != "training")
_hooks: tuple[WeightHooks, ...] = ()
_casting: tuple[CastingLayers, ...] = ()
_hook_names = frozenset({"forward"})
_bookkeeping: frozenset[str] = frozenset()


def register(*additions: WeightHooks | CastingLayers | Bookkeeping) -> None:
    """Let every FFN patch recognise what a host adds to modules; equal registrations count once.

    Raises:
        TypeError: one of ``additions`` is none of the three.
    """
    global _hooks, _casting, _hook_names, _bookkeeping
    for addition in additions:
        if isinstance(addition, WeightHooks):
            _hooks = (*(other for other in _hooks if other != addition), addition)
        elif isinstance(addition, CastingLayers):
            _casting = (*(other for other in _casting if other != addition), addition)
        elif isinstance(addition, Bookkeeping):
            _bookkeeping |= set(addition.modules)
        else:
            raise TypeError(f"expected WeightHooks, CastingLayers or Bookkeeping, got {type(addition).__name__}")
    _hook_names = frozenset({"forward"}.union(*(hooks.names for hooks in _hooks)))


def hook_names() -> frozenset[str]:
    """The instance attributes that hosts' hooks set, ``forward`` among them."""
    return _hook_names


def is_hooked(module: nn.Module) -> bool:
    """Whether a host has put a hook on this very module."""
    return any(name in module.__dict__ for hooks in _hooks for name in hooks.names)


def forward_slots(module: nn.Module) -> Iterator[Slot]:
    """The dicts and keys where the module's forward may be stored: below all hooks first, then ``forward`` itself."""
    for hooks in _hooks:
        yield from hooks.slots(module)
    yield module.__dict__, "forward"


def own_names() -> frozenset[str]:
    """Instance attributes that no comparison of a module's own state looks at: torch's, and those of hooks."""
    return hook_names() | _ORDINARY


def is_bookkeeping(module: str | None) -> bool:
    """Whether a host keeps only lists in the module of Python code that has this name."""
    return module in _bookkeeping


def casts_weights(module: nn.Module) -> bool:
    """Whether the layer brings its weights to the input's device and dtype in each call."""
    return any(hasattr(module, layers.name) for layers in _casting)


def settings_of(layer: nn.Module) -> dict[str, Any]:
    """The plain values that a weight-casting layer is configured with, without what it does to its weights."""
    caches = ("_", *(prefix for layers in _casting for prefix in layers.cache_prefixes))
    skipped = own_names() | {"training"}
    state = layer.__dict__.items()
    return {
        key: value
        for key, value in state
        if isinstance(value, PLAIN) and key not in skipped and not key.startswith(caches)
    }


def casting_layers(module: nn.Module) -> list[nn.Module]:
    """The weight-casting layers inside a module."""
    return [child for child in module.modules() if casts_weights(child)]


def movable_parameters(module: nn.Module) -> set[int]:
    """Identities of the parameters whose memory a host's hook may exchange around each call: offloading, casting."""
    hooked = [child for child in module.modules() if is_hooked(child)]
    return {id(parameter) for child in hooked for parameter in child.parameters(recurse=False)}
