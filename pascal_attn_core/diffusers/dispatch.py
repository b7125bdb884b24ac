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

from ..parallel import context_parallel_sdpa
from ..patching.function_copy import Instead, copy_over
from .code import calls_sdpa_of_torch
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
    backend = kwargs.get("backend")
    is_flex = backend is not None and takes_its_own_backend(backend)
    if is_flex or (backend is not None and backend is native_backend()):
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
        replaced = {"torch": _TORCH, _TEMPLATES: _attend_in_parallel}
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


def _attend_in_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    _parallel_config: Any,
    **operators: Any,
) -> Tensor:
    """Takes the place of diffusers' ``_templated_context_parallel_attention``.

    It goes by what ``enable_parallelism`` has set up. The templates of diffusers gather the keys of all processes
    before a ring begins. They take no causal rule and no GQA, need a backend that returns lse, and apply this process's
    part of a mask to the keys of every other. Here the keys travel, and masks are gathered.

    Args:
        query: ``[B, L, Hq, D]``, this process's tokens; key ``[B, S, Hkv, D]``; value ``[B, S, Hkv, Dv]``.
        operators: the forward and backward pass of diffusers' backend, which are not needed.
    """
    redirect, sharing = this_thread.redirect, _parallel_config.context_parallel_config
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if dropout_p or return_lse:
        raise ValueError(f"dropout_p must be 0 and return_lse False across processes, got {dropout_p} and {return_lse}")
    groups: dict[str, Any] = {
        "ring": sharing._ring_mesh.get_group() if sharing.ring_degree > 1 else None,
        "ulysses": sharing._ulysses_mesh.get_group() if sharing.ulysses_degree > 1 else None,
        "uneven": getattr(sharing, "ring_anything", False) or getattr(sharing, "ulysses_anything", False),
    }
    arguments = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return context_parallel_sdpa(*arguments, **groups, config=redirect.config).transpose(1, 2)


_TORCH = Instead(torch, {"nn": Instead(torch.nn, {"functional": FUNCTIONAL})})
