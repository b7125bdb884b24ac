"""Processors that do what a model's own processor does, with the attention call redirected.

The processor keeps its own code. It is replaced by an instance of a subclass of its class that shares its ``__dict__``,
so weights of an IP-Adapter, its scale and the like are the same in both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .code import with_other_attention
from .dispatch import dispatch, native_backend, takes_its_own_backend
from .redirect import FUNCTIONAL, SdpaRedirect, this_thread


class _EqualToOriginal(type):
    """diffusers tests ``processor.__class__ in (AttnProcessor, ...)`` instead of isinstance: a redirected class
    compares equal to the class that it was made from. Its hash is its own: the two remain distinct dictionary keys."""

    _shown: type

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is getattr(cls, "_shown", None)

    __hash__ = type.__hash__


class RedirectedProcessor(metaclass=_EqualToOriginal):
    """Base of the processors made by :func:`redirect_processor`; ``_original`` is the model's own one."""

    __slots__ = ("_original", "_redirect")
    _original: Any
    _redirect: SdpaRedirect


def redirect_processor(
    original: Any, redirect: SdpaRedirect, *, base: Any = RedirectedProcessor, runs_as: type | None = None
) -> Any:
    """A processor that does what ``original`` does, with attention by ``redirect``. ``original`` is not changed.

    Args:
        original: a processor object, an ``nn.Module`` or not.
        base: the RedirectedProcessor that the result is an instance of, besides being one of ``original``'s class.
        runs_as: a class whose ``__call__`` is run instead, for processors that never call SDPA.
    Raises:
        TypeError: ``original`` is a function or has no ``__dict__`` that could be shared.
    """
    shown: Any = type(original)
    if not can_be_derived(original):
        raise TypeError(
            f"the processor must be an object of a class that can be subclassed, got {original!r}; use "
            "patch_attention, which redirects it without a subclass"
        )
    cls = _redirected_processor_class(runs_as or shown, shown, base)
    processor: Any = object.__new__(cls)
    object.__setattr__(processor, "__dict__", vars(original))
    object.__setattr__(processor, "_original", original)
    object.__setattr__(processor, "_redirect", redirect)
    return processor


def can_be_derived(processor: Any) -> bool:
    """Whether an object of a subclass can share the processor's attributes; not so for a plain function, say."""
    return hasattr(processor, "__dict__") and not callable(getattr(type(processor), "__get__", None))


def name_of(cls: type) -> dict[str, str]:
    """Members that give a class made at run time the name of ``cls``."""
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__}


@functools.cache
def _redirected_processor_class(cls: Any, shown: Any, base: Any) -> type:
    original_call = cls.__call__
    run = _runner(original_call, cls)

    def __call__(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self._redirect, self, attn, *args, **kwargs)

    def call_as_upgrade(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # the legacy processors multiply by attn.scale, those that run in their place leave the scale to SDPA
        return run(SdpaRedirect(self._redirect.config, scale=getattr(attn, "scale", None)), self, attn, *args, **kwargs)

    call = __call__ if cls is shown else call_as_upgrade
    # attention modules ask for the signature in every call, and drop the keywords that it does not name. A ready-made
    # one is quickest, but an object from outside the graph, which dynamo does not trace once a dict has changed: those
    # that are found on the modules while dynamo traces let inspect.signature() follow __wrapped__
    if base is RedirectedProcessor:
        call.__signature__ = inspect.signature(original_call)  # type: ignore[attr-defined]
    else:
        call.__wrapped__ = original_call  # type: ignore[attr-defined]
    members: dict[str, Any] = {"__slots__": (), "__call__": call, "_shown": shown, **name_of(shown)}
    backend = native_backend()
    if backend is not None and hasattr(cls, "_attention_backend"):
        members["_attention_backend"] = property(_backend_in_force, _store_backend)
    redirected = _EqualToOriginal(shown.__name__, (base, cls), members)
    _register_for_guiders(redirected, shown)
    return redirected


def _runner(original_call: Callable, cls: type) -> Callable:
    """``run(redirect, *args, **kwargs)``: ``original_call(*args, **kwargs)`` with its attention redirected."""
    # the names in a third party's code do not show how it calls attention
    ours_to_copy = cls.__module__.startswith("diffusers.")
    copied = with_other_attention(original_call, cls, FUNCTIONAL, dispatch) if ours_to_copy else None

    def run_under_mode(redirect: SdpaRedirect, *args: Any, **kwargs: Any) -> Any:
        with redirect.mode:
            return original_call(*args, **kwargs)

    def run_copy(redirect: SdpaRedirect, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo finds globals by the module's name: the copy would be the original
            return run_under_mode(redirect, *args, **kwargs)
        before, this_thread.redirect = this_thread.redirect, redirect
        try:
            return copied(*args, **kwargs)  # type: ignore[misc]
        finally:
            this_thread.redirect = before

    return run_copy if copied is not None else run_under_mode


def _register_for_guiders(redirected: type, shown: type) -> None:
    """Skip-layer guidance looks up by class what a skipped processor returns."""
    try:
        from diffusers.hooks._helpers import AttentionProcessorRegistry
    except ImportError:
        return
    try:
        metadata = AttentionProcessorRegistry.get(shown)
    except ValueError:
        return
    AttentionProcessorRegistry.register(redirected, metadata)


def _backend_in_force(processor: Any) -> Any:
    chosen = processor.__dict__.get("_attention_backend") or getattr(type(processor)._shown, "_attention_backend", None)
    return chosen if chosen is not None and takes_its_own_backend(chosen) else native_backend()


def _store_backend(processor: Any, backend: Any) -> None:
    processor.__dict__["_attention_backend"] = backend  # for the original, once it is back
