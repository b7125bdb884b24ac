"""The things that hosts add to modules: hooks that replace a module's ``forward`` and exchange its weights around each
call (offloading, casting, caches), and layers that bring their weights themselves.

The attributes that the hooks of accelerate and diffusers leave are named here and nowhere else. Neither library is
imported: a model that another program has hooked may be patched as well. A package that knows casting layers registers
them with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

Slot = tuple[dict[str, Any], str]


_casting: dict[str, tuple[str, ...]] = {}


def register(attribute: str, modules: tuple[str, ...]) -> None:
    """Let every patch of a ``forward`` recognise a host's layers that fetch, cast and patch their weights inside it: by
    an attribute, and by the Python modules whose code does that, also when it is called from elsewhere. What they keep
    between calls is their own business."""
    _casting[attribute] = modules


def casts_weights(module: nn.Module) -> bool:
    """Whether the layer brings its weights to the input's device and dtype in each call."""
    return any(hasattr(module, attribute) for attribute in _casting)


def is_hosts(module: str) -> bool:
    """Whether the code of a Python module of this name brings weights."""
    return any(f"{module}.".startswith(f"{name}.") for names in _casting.values() for name in names)


def forward_slots(module: nn.Module) -> Iterator[Slot]:
    """The dicts and keys where the module's forward may be stored: below all hooks first, then ``forward`` itself."""
    if "_old_forward" in module.__dict__:  # below accelerate's hook
        yield module.__dict__, "_old_forward"
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):  # the innermost hook first
        yield vars(reference), "forward" if reference.original_forward is None else "original_forward"
    yield module.__dict__, "forward"
