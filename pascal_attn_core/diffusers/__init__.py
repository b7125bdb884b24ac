"""Diffusers: exact O(N)-memory attention in any pipeline; the model's own processors keep running.

    import pascal_attn_core.diffusers as pascal

    with pascal.patch_attention(pipe):                           # until the block ends
        pipe(prompt)

    pipe.set_attn_processor(pascal.PascalAttnProcessor())        # until pipe.set_attn_processor(None)

Importing this module adds ``set_attn_processor`` to ``DiffusionPipeline`` (and ``ModularPipeline``), and that method
with the property ``attn_processors`` to the models that have none in diffusers. It replaces ``set_processor`` of
diffusers' attention modules, so that a ``PascalAttnProcessor`` runs the processor that it is set over and stays around
processors set later, and ``set_attention_backend``, which then warns if a ``PascalAttnProcessor`` is in force. Modules
on which no ``PascalAttnProcessor`` is set behave as before. :func:`install` returns the Patch of this, whose
``remove()`` reverts all of it.

diffusers also has attention backends, chosen by name from a fixed list. There is no public way to add one, so this
module does not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import diffusers as _diffusers
import torch.nn.functional as F
from diffusers.models import attention, attention_processor
from torch import nn

from ..config import AttentionConfig, config_of, log_once
from ..patching.interception import SDPA_NAME, TORCH_SDPA
from ..patching.patch import NothingToPatch, Patch, PatchGroup, replaced
from . import processors, sites
from .modules import lasting_redirect, redirect_module, redirected, release_module, set_lasting_redirect
from .processors import RedirectedProcessor, redirect_processor
from .redirect import SdpaRedirect, redirects_of
from .sites import computes_attention, counted, left_alone, models_of, processor_of, sites_of

__all__ = ["PascalAttnProcessor", "install", "patch_attention", "patch_pipeline"]

if TYPE_CHECKING:
    from .pipeline import WholePatch

log = logging.getLogger("pascal_attn")

_PACKAGE = __name__.rpartition(".")[0]


class PascalAttnProcessor(RedirectedProcessor):
    """An attention processor for ``set_attn_processor``: runs the model's own processor, with its attention call
    computed by :func:`pascal_attn_core.sdpa`.

        pipe.set_attn_processor(PascalAttnProcessor())
        model.set_attn_processor(PascalAttnProcessor(AttentionConfig(budget_mib=16)))
        unet.set_attn_processor({name: PascalAttnProcessor() for name in unet.attn_processors})

    Set on an attention module, it runs the processor found there, which still handles rotary embeddings, IP-Adapter
    weights, fused projections, masks and norms. The processor of the module is then an instance of both classes. Linear
    attention is left alone.

    It stays until it is taken off. Any processor that is set while it is on, by you, by a pipeline or by
    ``load_ip_adapter`` and the like, is wrapped: its own code runs, with our attention inside. Attention modules that
    are added to the model later have none; set it again. Three things take it off: setting ``None``, which restores
    the processor that it runs; setting that same object, saved from ``model.attn_processors`` earlier; and
    ``install().remove()``.

    Args:
        config: how to compute; None = the default.
    """

    __slots__ = ()

    def __init__(self, config: AttentionConfig | None = None):
        config_of(config)  # or raises
        self._original = None
        self._redirect = SdpaRedirect(config, lasting=True)

    @property
    def config(self) -> AttentionConfig | None:
        """The config given; None = the default."""
        return self._redirect.config

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "PascalAttnProcessor must be set with set_attn_processor() or set_processor(), not assigned to .processor "
            f"of {type(attn).__name__}, because it needs the module's own processor; or use patch_attention()"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _restored, (self._original, self._redirect)

    def __repr__(self) -> str:
        inner = "" if self._original is None else f" around {type(self._original).__name__}"
        return f"<PascalAttnProcessor{inner}, config={self.config}>"


def patch_attention(pipe_or_model: Any, config: AttentionConfig | None = None) -> Patch:
    """Send every attention call of a pipeline or model through :func:`pascal_attn_core.sdpa`.

    For a pipeline it covers all components that are diffusers models (unet, transformer, vae, controlnet ...), not the
    text encoders of Transformers. Processors stay the same objects; those set while the patch is in force are
    redirected too. Patches may be removed in any order; if there are several, the newest applies. A
    :class:`PascalAttnProcessor` set on a module takes precedence over a patch.

    Args:
        pipe_or_model: a ``DiffusionPipeline``, a ``ModularPipeline`` or any ``torch.nn.Module``.
        config: how to compute; None = the default.
    Returns:
        A Patch: ``.sites`` attention modules are redirected until ``.remove()``; ``.left_alone`` names those that are
        not, with the reason, such as ``"SanaLinearAttnProcessor2_0: linear attention"``.
    Raises:
        TypeError: neither a pipeline nor a module.
        ValueError: it holds no attention that calls ``scaled_dot_product_attention``.
    """
    config_of(config)  # or raises
    _warn_if_sdpa_is_replaced()
    models = models_of(pipe_or_model)
    redirect = SdpaRedirect(config)
    with PatchGroup(f"attention of {type(pipe_or_model).__name__}") as group:
        places = _required_sites(pipe_or_model, models)
        for module in places.values():
            redirect_module(module, redirect)
            group.add(functools.partial(release_module, module, redirect))
    left = left_alone(models)
    if left:
        log.info("%s: left alone: %s", group.name, "; ".join(counted(left.values())))
    return group.patch(places=[name or "(the model)" for name in places], refused=left)


def patch_pipeline(pipe_or_model: Any, config: AttentionConfig | None = None, *, eight_bit: bool = False) -> WholePatch:
    """Patch attention, feed-forward layers and decoding of a pipeline in one call. Within rounding the image is the
    same, unless ``eight_bit``.

    It is :func:`patch_attention`, ``patch_ffn`` and ``patch_vae(when="needed")`` with their defaults: attention of all
    models by :func:`pascal_attn_core.sdpa`, feed-forward layers of the denoisers in slices and decoding in bands where
    they would not fit. What a pipeline does not have is left out, and named in the report.

    Args:
        pipe_or_model: a ``DiffusionPipeline``, a ``ModularPipeline``, or a module.
        config: how attention is computed; None = the default.
        eight_bit: not exact: the denoisers' linear layers (``patch_linear_int8``: errors of 1 to 2 % per layer are
            typical) and attention (``patch_attention_int8``: 0.1 to 1.3 %) in 8 bits. Each layer is measured, and stays
            exact above the limit.
    Returns:
        A Patch: ``parts`` has the Patch of each part by name, ``report()`` the states of all, and ``remove()`` undoes
        all of them.
    Raises:
        TypeError: neither a pipeline nor a module.
        ValueError: it has no part that can be patched.
    """
    if not isinstance(eight_bit, bool):
        raise TypeError(f"eight_bit must be a bool, got {eight_bit!r}")
    from .pipeline import patch_parts  # it brings in feed-forward, VAEs and 8 bits, which attention does not need

    return patch_parts(pipe_or_model, functools.partial(patch_attention, config=config), eight_bit=eight_bit)


_installation: Patch | None = None


def install() -> Patch:
    """Apply the changes to diffusers' classes, until ``remove()`` of the Patch; importing this module does it. A second
    call returns the same Patch. Its ``remove()`` also takes every PascalAttnProcessor off the modules that it is on;
    another Patch stays, but attention added to its models afterwards is not redirected."""
    global _installation
    if _installation is None or not _installation.active:
        with PatchGroup("classes of diffusers") as group:
            _install(group)
        _installation = group.patch()
    return _installation


def _install(group: PatchGroup) -> None:
    for cls in _classes(_diffusers, "DiffusionPipeline", "ModularPipeline"):
        if not hasattr(cls, "set_attn_processor"):
            group.add(replaced(cls, "set_attn_processor", _set_attn_processor))
    for name, ours in _ADDED_TO_MODELS.items():
        if name not in vars(_diffusers.ModelMixin):
            group.add(replaced(_diffusers.ModelMixin, name, _MemberOfModels(name, ours)))
    mixins = _classes(attention, "AttentionModuleMixin")
    for cls in (attention_processor.Attention, *mixins):
        group.add(replaced(cls, "set_processor", _keeps_ours(cls.set_processor)))
    for cls in (_diffusers.ModelMixin, *mixins):
        if hasattr(cls, "set_attention_backend"):
            group.add(replaced(cls, "set_attention_backend", _warns(cls.set_attention_backend)))
    group.add(_take_off_everywhere)


def _classes(module: Any, *names: str) -> list[Any]:
    """The classes of these names that this version of diffusers has."""
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _take_off_everywhere() -> list[str]:
    for module in list(redirected):
        _assign(module, None)
    return []


class _MemberOfModels:
    """A member of ``ModelMixin``: diffusers' own where the model's class has one, ``ours`` where it has none."""

    def __init__(self, name: str, ours: Any):
        self.name, self.ours = name, ours

    def __get__(self, model: Any, owner: Any) -> Any:
        bases = owner.__mro__[owner.__mro__.index(_diffusers.ModelMixin) + 1 :]
        member = next((vars(base)[self.name] for base in bases if self.name in vars(base)), self.ours)
        return member.__get__(model, owner)


def _attn_processors(self: nn.Module) -> dict[str, Any]:
    """The processors of all attention modules of a model by the names that ``set_attn_processor`` takes in a dict
    (added by pascal_attn_core.diffusers)."""
    return {name: module.processor for name, module in _with_processors(self).items()}


def _with_processors(model: nn.Module) -> dict[str, Any]:
    modules = {f"{name}.processor": module for name, module in model.named_modules() if name}
    return {n: m for n, m in modules.items() if hasattr(m, "get_processor") or processor_of(m) is not None}


def _set_attn_processor(self: Any, processor: Any) -> None:
    """Set the attention processor of all attention of a pipeline or model (added by pascal_attn_core.diffusers).

    Args:
        processor: a PascalAttnProcessor for all attention of all models, the VAE's included; None takes it off. For a
            single model also any other, or a dict with the keys of its ``attn_processors``.
    Raises:
        TypeError: a dict or another processor for a pipeline. Or no processor: a name, say.
        ValueError: there is no attention that can be redirected, or a dict has other keys than ``attn_processors``.
    """
    if isinstance(processor, PascalAttnProcessor):
        _warn_if_sdpa_is_replaced()
        places = _required_sites(self, models_of(self))
        for module in places.values():
            _assign(module, processor)
        log.info("PascalAttnProcessor: set at %d places of %s", len(places), type(self).__name__)
    elif processor is None:
        for model in models_of(self).values():
            for module in model.modules():
                _assign(module, None)
    elif not isinstance(self, nn.Module) or not (callable(processor) or isinstance(processor, dict)):
        raise TypeError(
            "processor must be a PascalAttnProcessor or None; any other attention processor, or a dict of them: set it "
            f"on one model; got {processor!r}"
        )
    elif isinstance(processor, dict):
        _set_dict(self, processor)
    else:
        attention_modules: Any = (module for module in self.modules() if hasattr(module, "set_processor"))
        for module in attention_modules:
            module.set_processor(processor)


def _set_dict(model: nn.Module, given: dict[str, Any]) -> None:
    modules = _with_processors(model)
    if len(given) != len(modules):
        raise ValueError(
            f"a dict must have one processor for each attention module of {type(model).__name__}: its number of "
            f"processors must be {len(modules)}, got {len(given)}"
        )
    unknown = sorted(set(given) - set(modules))
    if unknown:
        raise ValueError(f"the keys must be those of attn_processors, got {', '.join(unknown)}")
    for name, processor in given.items():
        module = modules[name]
        module.set_processor(processor) if hasattr(module, "set_processor") else _assign(module, processor)


def _assign(module: Any, processor: Any) -> None:
    """Put ``processor`` on a module: ours, another one, or None, which takes ours off."""
    current = processor_of(module)
    if current is None and isinstance(processor, PascalAttnProcessor):
        set_lasting_redirect(module, processor._redirect)  # it calls SDPA itself
        return
    processor, redirect = _effective(module, processor)
    if processor is not None and processor is not current:
        module.processor = processor
    set_lasting_redirect(module, redirect)


def _bound(processor: PascalAttnProcessor, attn: nn.Module) -> Any:
    """The form of ``processor`` on ``attn``: itself if it already runs some processor, else around ``attn``'s."""
    if processor._original is not None:
        return processor
    current = processor_of(attn)
    if current is None:
        default = sites.default_processor_class(attn)
        if default is None:
            raise ValueError(f"{type(attn).__name__} has no processor yet that PascalAttnProcessor could run")
        current = default()
    if not computes_attention(current):
        return current
    return _around(getattr(current, "_original", current), processor._redirect)


def _around(original: Any, redirect: SdpaRedirect) -> Any:
    cls: Any = type(original)
    return redirect_processor(original, redirect, base=PascalAttnProcessor, runs_as=sites.upgrade_of(cls))


def _restored(original: Any, redirect: SdpaRedirect) -> Any:
    return PascalAttnProcessor(redirect.config) if original is None else _around(original, redirect)


def _effective(module: nn.Module, processor: Any) -> tuple[Any, SdpaRedirect | None]:
    """The effect of setting ``processor`` on ``module``: the processor to put there, and the redirect of ours that is
    in force then, None if ours is off."""
    current, redirect = processor_of(module), lasting_redirect(module)
    is_ours = isinstance(current, PascalAttnProcessor)
    if processor is None or (is_ours and processor is current._original):
        return current._original if is_ours else current, None
    if not isinstance(processor, PascalAttnProcessor):
        if redirect is not None and computes_attention(processor) and processors.can_be_derived(processor):
            return _around(processor, redirect), redirect
        return processor, redirect  # where there is a redirect, the module's serves it
    if redirect is not None and processor._original is None and hasattr(type(processor), "_shown"):
        return current, redirect  # made by diffusers of the class that it found: load_ip_adapter, on self-attention
    _warn_if_sdpa_is_replaced()
    processor = _bound(processor, module)
    return processor, processor._redirect if isinstance(processor, PascalAttnProcessor) else None


def _keeps_ours(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_processor(self: nn.Module, processor: Any) -> None:
        if isinstance(processor, type):
            raise TypeError(f"processor must be an attention processor, got the class {processor.__name__}: call it")
        processor, redirect = _effective(self, processor)
        original(self, processor)
        set_lasting_redirect(self, redirect)

    return set_processor


def _warns(original: Callable) -> Callable:
    """``set_attention_backend`` that warns if some of the attention that it concerns is ours."""

    @functools.wraps(original)
    def set_attention_backend(self: nn.Module, backend: str) -> None:
        original(self, backend)
        redirected = [processor_of(module) for module in self.modules() if redirects_of(module)]
        count = sum(hasattr(processor, "_attention_backend") for processor in redirected)
        if count and not processors.takes_its_own_backend(backend):  # which takes effect, and is ours too
            log.warning(
                "%s: Pascal Attention is set on %d attention module%s: set_attention_backend(%r) has no effect there "
                "until it is taken off (set_attn_processor(None), or remove() of the patch)",
                *(type(self).__name__, count, "s"[: count > 1], backend),
            )

    return set_attention_backend


def _required_sites(host: Any, models: dict[str, Any]) -> dict[str, nn.Module]:
    """The attention modules by name.

    Raises:
        NothingToPatch: there is none.
    """
    found = dict(sites_of(models))
    if found:
        return found
    looked = ", ".join(type(model).__name__ for model in models.values()) or "no diffusers model"
    others = "; ".join(counted(left_alone(models).values()))
    raise NothingToPatch(
        f"{type(host).__name__} must hold attention that calls scaled_dot_product_attention, got none (looked into "
        f"{looked}){'; left alone: ' if others else ''}{others or '; models without attention need no patch'}"
    )


def _warn_if_sdpa_is_replaced() -> None:
    current: Any = F.scaled_dot_product_attention
    defined_in = str(getattr(current, "__globals__", {}).get("__name__", ""))  # ours carry torch's __module__
    if current is not TORCH_SDPA and not defined_in.startswith(f"{_PACKAGE}."):
        replacement = f"{current.__module__}.{getattr(current, '__qualname__', current)}"
        text = (
            f"torch.nn.functional.{SDPA_NAME} has been replaced by %s: attention calls go there, and reach Pascal "
            "Attention only where the replacement calls torch's own function"
        )
        log_once(logging.WARNING, text, replacement)


_ADDED_TO_MODELS = {"set_attn_processor": _set_attn_processor, "attn_processors": property(_attn_processors)}

install()
