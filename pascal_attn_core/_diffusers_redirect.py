"""How one attention call inside a diffusers model reaches our ``sdpa``: nothing of the model is re-implemented.

The object that computes attention (a processor, or a module whose ``forward`` does it) keeps its own code. It gets a
subclass of its own class whose ``__call__`` runs the very same call under :class:`SdpaRedirect`, a thread-local mode
that hands ``scaled_dot_product_attention`` to us and everything else on.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from .config import AttentionConfig
from .dispatch import sdpa

#: torch's own function, even where somebody has put another one at ``F.scaled_dot_product_attention``
TORCH_SDPA = torch._C._nn.scaled_dot_product_attention
#: the attribute in which a redirected module keeps its redirects, a tuple; the last one decides
REDIRECTS = "_pascal_redirects"


class _ThisThread(threading.local):
    inside_sdpa = False


_this_thread = _ThisThread()


class SdpaRedirect(TorchFunctionMode):
    """While active in this thread, ``scaled_dot_product_attention`` means :func:`pascal_attn_core.sdpa`.

    It has no state that a call changes, so one object serves any number of threads.

    Args:
        config: passed on to ``sdpa``.
        scale: the scale of the scores for calls that give none; None = 1/sqrt(head_dim).
        lasting: set by a processor, not by a Patch; it decides over those of patches.
    """

    def __init__(self, config: AttentionConfig | None = None, *, scale: float | None = None, lasting: bool = False):
        super().__init__()
        self.config, self.scale, self.lasting = config, scale, lasting

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is TORCH_SDPA:
            return self._attend(args, kwargs or {})
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the same operation; dynamo cannot trace the method's super() call under a mode
        return func(*args, **kwargs) if kwargs else func(*args)

    def _attend(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.scale is not None:
            kwargs = {"scale": self.scale, **kwargs}
        if torch.compiler.is_compiling():
            return sdpa(*args, config=self.config, **kwargs)
        # the call may be torch's own route of our sdpa, seen by a redirect around the one that is at work
        if _this_thread.inside_sdpa or _scores_are_skipped(*args, **kwargs):
            return TORCH_SDPA(*args, **kwargs)
        _this_thread.inside_sdpa = True
        try:
            return sdpa(*args, config=self.config, **kwargs)
        finally:
            _this_thread.inside_sdpa = False


def _scores_are_skipped(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> bool:
    """Whether a guider of diffusers wants this call for itself: a mode outside ours that returns ``value`` as it is."""
    if query.shape[2:3] != value.shape[2:3]:
        return False
    return any(type(mode).__name__ == "AttentionScoreSkipFunctionMode" for mode in _get_current_function_mode_stack())


def redirect_module(module: nn.Module, redirect: SdpaRedirect) -> None:
    """Let ``redirect`` decide over the earlier ones. The class of ``module`` changes in place: weights, state-dict keys
    and hooks stay."""
    cls: Any = type(module)
    others = module.__dict__.get(REDIRECTS)
    module.__dict__[REDIRECTS] = tuple(sorted((*(others or ()), redirect), key=lambda other: other.lasting))
    if others is None:
        module.__class__ = redirected_module_class(cls)


def release_module(module: nn.Module, redirect: SdpaRedirect) -> list[str]:
    """Take ``redirect`` back, wherever it lies among the others.

    Returns:
        A sentence if the module has got yet another class meanwhile: ours then stays below it and does nothing.
    """
    if REDIRECTS not in module.__dict__:
        return []
    module.__dict__[REDIRECTS] = tuple(other for other in module.__dict__[REDIRECTS] if other is not redirect)
    if module.__dict__[REDIRECTS]:
        return []
    original = type(module).__dict__.get("_pascal_original_class")
    if original is None:
        return [f"{type(module).__name__} has got another class since; left in place without effect"]
    module.__class__ = original
    del module.__dict__[REDIRECTS]
    return []


def set_lasting_redirect(module: nn.Module, redirect: SdpaRedirect | None) -> None:
    """Replace what a processor has set on ``module`` before; None only takes it away."""
    for other in module.__dict__.get(REDIRECTS, ()):
        if other.lasting:
            release_module(module, other)
    if redirect is not None:
        redirect_module(module, redirect)


@functools.cache
def redirected_module_class(cls: Any) -> type[nn.Module]:
    """The subclass of ``cls`` whose calls run under the redirect in force. It carries the name of ``cls``: diffusers
    and accelerate recognise modules by class name."""
    original_call = cls.__call__

    # not forward: hooks of accelerate and diffusers replace an instance's forward, and so stay inside
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        redirects = self.__dict__.get(REDIRECTS)  # none where another thread has just taken the last one away
        if not redirects:
            return original_call(self, *args, **kwargs)
        with redirects[-1]:
            return original_call(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _blank_module, (cls,), state

    members = {"__call__": __call__, "__reduce_ex__": __reduce_ex__, "_pascal_original_class": cls}
    return type(cls.__name__, (cls,), {**members, **_name_of(cls)})


def _blank_module(cls: Any) -> nn.Module:
    redirected: Any = redirected_module_class(cls)
    return redirected.__new__(redirected)


class _EqualToOriginal(type):
    """diffusers asks ``processor.__class__ in (AttnProcessor, ...)`` where it should ask isinstance: a redirected class
    says yes where the class it was made from is meant. Its hash stays its own; no dict takes the one for the other."""

    _shown: type

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is getattr(cls, "_shown", None)

    __hash__ = type.__hash__


class RedirectedProcessor(metaclass=_EqualToOriginal):
    """Base of the processors made by :func:`redirect_processor`; ``_original`` is the model's own one.

    Both share one ``__dict__``: weights of an IP-Adapter, its scale and the like are the same whichever is asked.
    """

    __slots__ = ("_original", "_redirect")
    _original: Any
    _redirect: SdpaRedirect


def redirect_processor(
    original: Any, redirect: SdpaRedirect, *, base: type[RedirectedProcessor], runs_as: type | None = None
) -> Any:
    """A processor that does what ``original`` does with attention by ``redirect``. ``original`` is not touched.

    Args:
        original: a processor object, an ``nn.Module`` or not.
        base: a class that the result is an instance of, besides being one of ``original``'s class.
        runs_as: a class whose ``__call__`` is run instead, for processors that never call SDPA.
    """
    shown: Any = type(original)
    cls = _redirected_processor_class(runs_as or shown, shown, base)
    processor: Any = object.__new__(cls)
    object.__setattr__(processor, "__dict__", vars(original))
    object.__setattr__(processor, "_original", original)
    object.__setattr__(processor, "_redirect", redirect)
    return processor


@functools.cache
def _redirected_processor_class(cls: Any, shown: Any, base: Any) -> type:
    original_call = cls.__call__

    def __call__(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._redirect:
            return original_call(self, attn, *args, **kwargs)

    def call_as_upgrade(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # the legacy processors multiply by attn.scale, those that run in their place leave the scale to SDPA
        with SdpaRedirect(self._redirect.config, scale=getattr(attn, "scale", None)):
            return original_call(self, attn, *args, **kwargs)

    call = __call__ if cls is shown else call_as_upgrade
    # attention modules drop the keywords that this signature does not name
    call.__signature__ = inspect.signature(original_call)  # type: ignore[attr-defined]
    members: dict[str, Any] = {"__slots__": (), "__call__": call, "_shown": shown, **_name_of(shown)}
    backend = native_backend()
    if backend is not None and hasattr(cls, "_attention_backend"):
        members["_attention_backend"] = property(lambda self: backend, _store_backend)
    redirected = _EqualToOriginal(shown.__name__, (base, cls), members)
    _register_for_guiders(redirected, shown)
    return redirected


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


def _store_backend(processor: Any, backend: Any) -> None:
    processor.__dict__["_attention_backend"] = backend  # for the original, once it is back


@functools.lru_cache(maxsize=1)
def native_backend() -> Any:
    """diffusers' name for torch's SDPA among its attention backends; None in versions that have no backends."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName
    except ImportError:
        return None
    return AttentionBackendName.NATIVE


def _name_of(cls: type) -> dict[str, str]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
