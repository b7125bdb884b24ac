"""Modules whose calls are redirected while a Patch or a PascalAttnProcessor is on them, whatever their processor."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch
from torch import nn

from .processors import RedirectedProcessor, name_of, redirect_processor
from .redirect import REDIRECTS, SdpaRedirect, redirects_of, this_thread
from .sites import forward_reaches_sdpa, processor_of, upgrade_of

log = logging.getLogger("pascal_attn")
#: the attribute in which it keeps its processor, a redirect, and what stands in for the processor under that redirect
STAND_IN = "_pascal_stand_in"
#: the modules that are redirected now
redirected: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def redirect_module(module: nn.Module, redirect: SdpaRedirect) -> None:
    """Let ``redirect`` decide over the earlier ones. The class of ``module`` changes in place: weights, state-dict keys
    and hooks stay."""
    cls: Any = type(module)
    others = module.__dict__.get(REDIRECTS)
    module.__dict__[REDIRECTS] = tuple(sorted((*(others or ()), redirect), key=lambda other: other.lasting))
    if others is None:
        module.__class__ = redirected_module_class(cls)
    redirected.add(module)


def release_module(module: nn.Module, redirect: SdpaRedirect) -> list[str]:
    """Remove ``redirect``, wherever it lies among the others. Returns a sentence if other code has changed the module's
    class meanwhile: ours then stays below it and does nothing."""
    if REDIRECTS not in module.__dict__:
        return []
    module.__dict__[REDIRECTS] = tuple(other for other in module.__dict__[REDIRECTS] if other is not redirect)
    if module.__dict__[REDIRECTS]:
        return []
    module.__dict__.pop(STAND_IN, None)
    redirected.discard(module)
    original = type(module).__dict__.get("_pascal_original_class")
    if original is None:
        return [f"{type(module).__name__} has been given another class since: ours stays underneath it without effect"]
    module.__class__ = original
    del module.__dict__[REDIRECTS]
    return []


def lasting_redirect(module: nn.Module) -> SdpaRedirect | None:
    """The redirect of the PascalAttnProcessor that was set on ``module``; None if there is none."""
    return next((redirect for redirect in redirects_of(module) if redirect.lasting), None)


def set_lasting_redirect(module: nn.Module, redirect: SdpaRedirect | None) -> None:
    """Replace the redirect that a processor has set on ``module``; None removes it."""
    before = lasting_redirect(module)
    if before is redirect:
        return
    if before is not None:
        release_module(module, before)
    if redirect is not None:
        redirect_module(module, redirect)


@functools.cache
def redirected_module_class(cls: Any) -> type[nn.Module]:
    """The subclass of ``cls`` whose calls run under the redirect in force. It carries the name of ``cls``: diffusers
    and accelerate recognise modules by class name."""
    original_call = cls.__call__
    # else the module itself calls SDPA, whatever its processor does
    attends_by_processor = not forward_reaches_sdpa(cls)
    has_stand_ins = attends_by_processor and not hasattr(cls, "processor")

    # not forward: hooks of accelerate and diffusers replace an instance's forward, and so stay inside
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        redirects = self.__dict__.get(REDIRECTS)  # none where another thread has just removed the last one
        if not redirects:
            return original_call(self, *args, **kwargs)
        redirect, compiling = redirects[-1], torch.compiler.is_compiling()
        if compiling and attends_by_processor and isinstance(processor_of(self), RedirectedProcessor):
            return original_call(self, *args, **kwargs)  # the processor redirects by itself
        stand_in = _stand_in(self, redirect) if has_stand_ins and not compiling else None
        if stand_in is None:
            with redirect.mode:
                return original_call(self, *args, **kwargs)
        before, this_thread.acting = this_thread.acting, (self, stand_in)
        try:
            return original_call(self, *args, **kwargs)
        finally:
            this_thread.acting = before

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _blank_module, (cls,), {name: value for name, value in state.items() if name != STAND_IN}

    members = {"__call__": __call__, "__reduce_ex__": __reduce_ex__, "_pascal_original_class": cls}
    if has_stand_ins:
        members["processor"] = _PROCESSOR
    return type(cls.__name__, (cls,), {**members, **name_of(cls)})


def _blank_module(cls: Any) -> nn.Module:
    kind: Any = redirected_module_class(cls)
    module = kind.__new__(kind)
    redirected.add(module)
    return module


def _stand_in(module: nn.Module, redirect: SdpaRedirect) -> Any:
    """The substitute for the processor of ``module`` during a call; None if there is no processor, or a third party's:
    then the whole call must run under the mode."""
    processor = processor_of(module)
    kept = module.__dict__.get(STAND_IN)
    if kept is None or kept[0] is not processor or kept[1] is not redirect:
        is_ours = isinstance(processor, RedirectedProcessor)
        own: Any = processor._original if is_ours else processor
        stand_in = processor if is_ours else None  # around a third party's, which runs under a mode of its own
        if type(own).__module__.startswith("diffusers."):
            stand_in = redirect_processor(own, redirect, runs_as=upgrade_of(own.__class__))
        kept = module.__dict__[STAND_IN] = (processor, redirect, stand_in)
    return kept[2]


def _get_processor(module: Any) -> Any:
    if not torch.compiler.is_compiling():
        acting = this_thread.acting
        if acting is not None and acting[0] is module:
            return acting[1]
    if "processor" in module.__dict__:
        return module.__dict__["processor"]
    raise AttributeError("processor")  # nn.Module.__getattr__ looks further, among the submodules


_PROCESSOR = property(
    _get_processor,
    lambda module, processor: module.__dict__.update(processor=processor),
    lambda module: module.__dict__.__delitem__("processor"),
)
