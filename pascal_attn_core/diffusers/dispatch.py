"""diffusers' ``dispatch_attention_fn``, as the copy of a processor calls it (see ``code``).

It passes a call to a backend by name. For torch's own backend, which every redirected processor asks for, a copy of the
two functions calls ours where they call torch's; whatever they do about names, layouts and masks remains diffusers'
code. All else runs as it is, under the mode of the redirect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..patching.function_copy import copy_over
from .code import calls_sdpa_of_torch
from .parallel import attend_in_parallel
from .redirect import FUNCTIONAL, this_thread

_REGISTRY = "_AttentionBackendRegistry"
_TEMPLATES = "_templated_context_parallel_attention"  # what the backend calls across processes


@functools.lru_cache(maxsize=1)
def native_backend() -> Any:
    """diffusers' name for torch's SDPA among its attention backends; None in versions that have no backends."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName
    except ImportError:
        return None
    return AttentionBackendName.NATIVE


def dispatch(function: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """``function(*args, **kwargs)``, where ``function`` is diffusers' ``dispatch_attention_fn``, under the redirect."""
    native = native_backend()
    if kwargs.get("backend") is native is not None:
        registry: Any = getattr(function, "__globals__", {}).get(_REGISTRY)
        copy = _with_native_copied(function, registry, getattr(registry, "_backends", {}).get(native))
        if copy is not None:
            return copy(*args, **kwargs)
    redirect = this_thread.redirect
    assert redirect is not None
    with redirect.mode:
        return function(*args, **kwargs)


@functools.lru_cache(maxsize=4)
def _with_native_copied(function: Callable, registry: Any, backend: Any) -> Callable | None:
    """A copy of ``function`` that finds only a copy of ``backend`` in its registry; None where they are of another
    kind."""
    if not (isinstance(registry, type) and isinstance(function, FunctionType) and calls_sdpa_of_torch(backend)):
        return None
    copied = {native_backend(): copy_over(backend, {"torch": _TORCH, _TEMPLATES: attend_in_parallel})}
    return copy_over(function, {_REGISTRY: type(registry.__name__, (registry,), {"_backends": copied})})


class _Namespace(SimpleNamespace):
    """A module of which some names are replaced."""

    def __init__(self, module: Any, **replaced: Any):
        super().__init__(**replaced)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_TORCH = _Namespace(torch, nn=_Namespace(torch.nn, functional=FUNCTIONAL))
