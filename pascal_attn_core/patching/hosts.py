"""The things that hosts add to modules: hooks that replace its ``forward`` and exchange weights around each call.

Nothing here names a host: the package that knows one registers how its hooks are recognised, with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

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
    """Layers that fetch, cast and patch their weights inside ``forward``. What they keep between calls is their own
    business.

    Attributes:
        name: the attribute by which they are recognised.
        modules: the Python modules whose code does that, also when it is called from elsewhere.
    """

    name: str
    modules: tuple[str, ...] = ()


_hooks: tuple[WeightHooks, ...] = ()
_casting: tuple[CastingLayers, ...] = ()


def register(*additions: WeightHooks | CastingLayers) -> None:
    """Let every patch of a `forward` recognise what a host adds to modules; equal registrations count once.

    Raises:
        TypeError: one of ``additions`` is neither.
    """
    global _hooks, _casting
    for addition in additions:
        if isinstance(addition, WeightHooks):
            _hooks = (*(other for other in _hooks if other != addition), addition)
        elif isinstance(addition, CastingLayers):
            _casting = (*(other for other in _casting if other != addition), addition)
        else:
            raise TypeError(f"expected WeightHooks or CastingLayers, got {type(addition).__name__}")


def hook_names() -> set[str]:
    """The attributes that hosts' hooks set on a module."""
    return {name for hooks in _hooks for name in hooks.names}


def is_hooked(module: nn.Module) -> bool:
    """Whether a host has put a hook on this very module."""
    return any(name in module.__dict__ for hooks in _hooks for name in hooks.names)


def casts_weights(module: nn.Module) -> bool:
    """Whether the layer brings its weights to the input's device and dtype in each call."""
    return any(hasattr(module, layers.name) for layers in _casting)


def is_hosts(module: str) -> bool:
    """Whether the code of a Python module of this name brings weights."""
    return any(f"{module}.".startswith(f"{name}.") for layers in _casting for name in layers.modules)


def forward_slots(module: nn.Module) -> Iterator[Slot]:
    """The dicts and keys where the module's forward may be stored: below all hooks first, then ``forward`` itself."""
    for hooks in _hooks:
        yield from hooks.slots(module)
    yield module.__dict__, "forward"
