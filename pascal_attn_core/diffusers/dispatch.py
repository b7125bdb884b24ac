"""diffusers' ``dispatch_attention_fn``, as the copy of a processor calls it (see ``code``).

It passes a call to a backend by name. For torch's own backends, scaled_dot_product_attention and flex attention, a copy
of the two functions calls ours where they call torch's; whatever they do about names, layouts and masks remains
diffusers' code. All else runs as it is, under the mode of the redirect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..patching.function_copy import Instead, copy_over
from .code import calls_sdpa_of_torch
from .redirect import FUNCTIONAL, this_thread

_REGISTRY = "_AttentionBackendRegistry"


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
    backend = kwargs.get("backend")
    is_flex = backend is not None and takes_its_own_backend(backend)
    is_ours = is_flex or (backend is not None and backend is native_backend())
    if is_ours and kwargs.get("parallel_config") is None:  # across processes diffusers' templates share a call out
        registry: Any = getattr(function, "__globals__", {}).get(_REGISTRY)
        name = type(native_backend())(backend)  # as the registry names it
        copy = _with_ours(function, registry, name, getattr(registry, "_backends", {}).get(name), is_flex)
        if copy is not None:
            return copy(*args, **kwargs)
    with this_thread.redirect.mode:
        return function(*args, **kwargs)


def takes_its_own_backend(backend: Any) -> bool:
    """Whether a processor bound to ``backend``, a name or a member of diffusers' enumeration, keeps it: flex attention
    has masks of its own kind (NABLA of Kandinsky 5), which no other backend takes."""
    return "flex" in str(getattr(backend, "value", backend)).lower().split("_")


@functools.lru_cache(maxsize=4)
def _with_ours(function: Callable, registry: Any, name: Any, backend: Any, is_flex: bool) -> Callable | None:
    """A copy of ``function`` that finds only a copy of ``backend``, by ``name``, in its registry; None where they are
    of another kind."""
    if not (isinstance(registry, type) and isinstance(function, FunctionType) and isinstance(backend, FunctionType)):
        return None
    if is_flex:
        module = backend.__globals__.get("flex_attention")
        if not hasattr(module, "BlockMask"):
            return None
        from ..flex import create_block_mask  # not before: it imports torch._dynamo, as module has done

        own = {"flex_attention": _flex, "create_block_mask": create_block_mask}
        replaced: dict[str, Any] = {"flex_attention": Instead(module, own)}
    elif calls_sdpa_of_torch(backend):
        replaced = {"torch": _TORCH}
    else:
        return None
    copied = {name: copy_over(backend, replaced)}
    return copy_over(function, {_REGISTRY: type(registry.__name__, (registry,), {"_backends": copied})})


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, **options: Any
) -> Any:
    redirect = this_thread.redirect
    if score_mod is None and not options.get("return_lse"):
        options = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        return redirect.attend((query, key, value), {"attn_mask": block_mask, **options})
    from ..flex import flex_attention

    return flex_attention(query, key, value, score_mod, block_mask, **options, config=redirect.config)


_TORCH = Instead(torch, {"nn": Instead(torch.nn, {"functional": FUNCTIONAL})})
