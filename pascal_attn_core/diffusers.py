"""Diffusers: exact O(N)-memory attention in any pipeline, with the model's own processors at work.

    import pascal_attn_core.diffusers as pascal

    with pascal.patch_pipeline(pipe):                            # until the block ends
        pipe(prompt)

    pipe.set_attn_processor(pascal.PascalAttnProcessor())        # until another processor is set

Importing this module adds one method, ``set_attn_processor``, to ``DiffusionPipeline`` (and ``ModularPipeline``) and to
those models that diffusers gives none, and teaches the ``set_processor`` of its attention modules to keep the processor
that a ``PascalAttnProcessor`` is set over; for every other processor that method does what it did. :func:`uninstall`
takes all of it back.

diffusers has attention backends too, chosen by name from a closed list; there is no public way to add one, so this is
not one.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import diffusers as _diffusers
import torch.nn.functional as F
from diffusers.models import attention_processor as _attention_processor
from torch import nn

from ._diffusers_modules import redirect_module, release_module, set_lasting_redirect
from ._diffusers_processors import RedirectedProcessor, redirect_processor
from ._diffusers_redirect import TORCH_SDPA, SdpaRedirect
from ._diffusers_sites import (
    computes_attention,
    default_processor_class,
    left_alone,
    models_of,
    processor_of,
    sites_of,
    upgrade_of,
)
from .config import AttentionConfig
from .patching import Patch, PatchGroup

__all__ = ["PascalAttnProcessor", "PipelinePatch", "install", "patch_pipeline", "uninstall"]

log = logging.getLogger("pascal_attn")

# Methods of diffusers that set processors as one step of something else: what was ours before stays ours around them.
_SETS_PROCESSORS = {
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "load_ip_adapter",
    "unload_ip_adapter",
    "_load_ip_adapter_weights",
    "load_attn_procs",
    "set_attention_slice",
}


class PascalAttnProcessor(RedirectedProcessor):
    """An attention processor for ``set_attn_processor``: the model's own processor with our attention inside.

        pipe.set_attn_processor(PascalAttnProcessor())
        model.set_attn_processor(PascalAttnProcessor(AttentionConfig(budget_mib=16)))
        unet.set_attn_processor({name: PascalAttnProcessor() for name in unet.attn_processors})

    When it is set on an attention module, it takes on the processor found there: rotary embeddings, IP-Adapter weights,
    fused projections, masks and norms stay that processor's work, and what is then found on the module is an instance
    of that processor's class as well as of this one. Linear attention is left alone. It stays when diffusers sets other
    processors as a step of ``load_ip_adapter``, ``fuse_qkv_projections``, ``enable_attention_slicing`` and their
    opposites; any other processor set afterwards replaces it, and ``None`` gives back the one it was set over.

    Args:
        config: how to compute; None = the default.
    """

    __slots__ = ()

    def __init__(self, config: AttentionConfig | None = None):
        if config is not None and not isinstance(config, AttentionConfig):
            raise TypeError(f"config must be an AttentionConfig or None, got {config!r}")
        self._original = None
        self._redirect = SdpaRedirect(config, lasting=True)

    @property
    def config(self) -> AttentionConfig | None:
        """The config given; None = the default."""
        return self._redirect.config

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "PascalAttnProcessor must be set with set_attn_processor() or set_processor(), got assigned to "
            f".processor of {type(attn).__name__}, whose own processor it would need; or use patch_pipeline()"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _restored, (self._original, self._redirect)

    def __repr__(self) -> str:
        inner = "" if self._original is None else f" around {type(self._original).__name__}"
        return f"<PascalAttnProcessor{inner}, config={self.config}>"


class PipelinePatch(Patch):
    """What :func:`patch_pipeline` returns.

    Attributes:
        left_alone: one sentence per kind of attention that is not ours, such as ``"2 x SanaLinearAttnProcessor2_0:
            linear attention"``.
    """

    def __init__(self, name: str, undo: Callable[[], list[str] | None], *, sites: int, left_alone: list[str]):
        super().__init__(name, undo, sites=sites)
        self.left_alone = left_alone
        if left_alone:
            log.info("%s: left alone: %s", name, "; ".join(left_alone))


def patch_pipeline(pipe_or_model: Any, config: AttentionConfig | None = None) -> PipelinePatch:
    """Send every attention call of a pipeline or model through :func:`pascal_attn_core.sdpa`.

    Of a pipeline it reaches all components that are diffusers models (unet, transformer, vae, controlnet ...), not the
    text encoders of Transformers. Processors stay the same objects, and those set while the patch is in force are
    served too. Patches may be removed in any order; of several the newest decides. A :class:`PascalAttnProcessor` set
    on a module decides over a patch.

    Args:
        pipe_or_model: a ``DiffusionPipeline``, a ``ModularPipeline`` or any ``torch.nn.Module``.
        config: how to compute; None = the default.
    Returns:
        A Patch: ``.sites`` attention modules are redirected until ``.remove()``; ``.left_alone`` names those that are
        not.
    Raises:
        TypeError: neither a pipeline nor a module.
        ValueError: it holds no attention that calls ``scaled_dot_product_attention``.
    """
    _warn_if_sdpa_is_replaced()
    models = models_of(pipe_or_model)
    redirect = SdpaRedirect(config)
    with PatchGroup(f"attention of {type(pipe_or_model).__name__}") as group:
        sites = list(sites_of(models))
        _require_sites(sites, pipe_or_model, models)
        for module in sites:
            group.add(_patch_module(module, redirect))
    return PipelinePatch(group.name, group._undo_all, sites=len(sites), left_alone=left_alone(models))


def install() -> None:
    """Make the changes to diffusers' classes; done by importing this module. Twice is harmless."""
    for cls in _pipeline_classes():
        if not hasattr(cls, "set_attn_processor"):
            cls.set_attn_processor = _set_attn_processor
    model_class: Any = _diffusers.ModelMixin
    if "set_attn_processor" not in vars(model_class):
        model_class.set_attn_processor = _MethodOfModels()
    for cls in _attention_classes():
        if not hasattr(cls.set_processor, "_pascal_original"):
            cls.set_processor = _taught(cls.set_processor)


def uninstall() -> None:
    """Take back every change to diffusers' classes. Pipelines on which a processor is set keep it."""
    for cls in _pipeline_classes():
        if cls.__dict__.get("set_attn_processor") is _set_attn_processor:
            del cls.set_attn_processor
    model_class: Any = _diffusers.ModelMixin
    if isinstance(vars(model_class).get("set_attn_processor"), _MethodOfModels):
        del model_class.set_attn_processor
    for cls in _attention_classes():
        original = getattr(cls.set_processor, "_pascal_original", None)
        if original is not None:
            cls.set_processor = original


class _MethodOfModels:
    """``set_attn_processor`` of a model: diffusers' own where the model has one, ours where it has none."""

    def __get__(self, model: Any, owner: Any) -> Any:
        bases = owner.__mro__[owner.__mro__.index(_diffusers.ModelMixin) + 1 :]
        for base in bases:
            if "set_attn_processor" in vars(base):
                return vars(base)["set_attn_processor"].__get__(model, owner)
        return _set_attn_processor if model is None else MethodType(_set_attn_processor, model)


def _set_attn_processor(self: Any, processor: Any) -> None:
    """Set the attention processor of all attention of a pipeline or model (added by pascal_attn_core.diffusers).

    Args:
        processor: a PascalAttnProcessor for all attention of all models, the VAE's too. None takes ours off everywhere.
            Any other takes ours off and is then set on the models that are not autoencoders.
    Raises:
        TypeError: a dict; its keys belong to one model that has ``attn_processors``, so set it there.
        ValueError: there is no attention that can be redirected.
    """
    if isinstance(processor, dict):
        raise TypeError("processor must be one processor for all attention, got a dict; set it on one model")
    models = models_of(self)
    if isinstance(processor, PascalAttnProcessor):
        _warn_if_sdpa_is_replaced()
        sites = list(sites_of(models))
        _require_sites(sites, self, models)
        for module in sites:
            _set_on_module(module, processor)
        log.info("PascalAttnProcessor: set at %d places of %s", len(sites), type(self).__name__)
        return
    model: Any
    for model in models:
        for module in model.modules():
            _take_off_module(module)
        if processor is not None and not hasattr(model, "decode"):
            _set_other(model, processor)


def _set_other(model: Any, processor: Any) -> None:
    if hasattr(model, "attn_processors"):
        model.set_attn_processor(processor)
        return
    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(processor)


def _patch_module(module: nn.Module, redirect: SdpaRedirect) -> Callable[[], list[str]]:
    redirect_module(module, redirect)
    return lambda: release_module(module, redirect)


def _set_on_module(module: nn.Module, processor: PascalAttnProcessor) -> None:
    if processor_of(module) is None:
        set_lasting_redirect(module, processor._redirect)
    else:
        module.processor = _bound(processor, module)


def _take_off_module(module: nn.Module) -> None:
    processor = processor_of(module)
    if isinstance(processor, PascalAttnProcessor) and processor._original is not None:
        module.processor = processor._original
    set_lasting_redirect(module, None)


def _bound(processor: PascalAttnProcessor, attn: nn.Module) -> Any:
    """What ``processor`` becomes on ``attn``: itself if it already is some module's, else around the one there."""
    if processor._original is not None:
        return processor
    current = processor_of(attn)
    if current is None:
        default = default_processor_class(attn)
        if default is None:
            raise ValueError(f"{type(attn).__name__} has no processor yet that PascalAttnProcessor could run")
        current = default()
    if not computes_attention(current):
        return current
    return _around(getattr(current, "_original", current), processor._redirect)


def _around(original: Any, redirect: SdpaRedirect) -> Any:
    cls: Any = type(original)
    return redirect_processor(original, redirect, base=PascalAttnProcessor, runs_as=upgrade_of(cls))


def _restored(original: Any, redirect: SdpaRedirect) -> Any:
    return PascalAttnProcessor(redirect.config) if original is None else _around(original, redirect)


def _taught(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_processor(self: nn.Module, processor: Any) -> None:
        current = processor_of(self)
        if isinstance(current, PascalAttnProcessor) and _is_a_step(sys._getframe(1)):
            processor = _kept_around(current, processor)
        elif isinstance(processor, PascalAttnProcessor):
            _warn_if_sdpa_is_replaced()
            processor = _bound(processor, self)
        elif processor is None:
            processor = current._original if isinstance(current, PascalAttnProcessor) else current
        original(self, processor)

    set_processor._pascal_original = original  # type: ignore[attr-defined]
    return set_processor


def _is_a_step(frame: FrameType | None) -> bool:
    """Whether this call comes from a method of diffusers that sets processors as one step of something else."""
    while frame is not None:
        if frame.f_code.co_name in _SETS_PROCESSORS and frame.f_globals.get("__name__", "").startswith("diffusers."):
            return True
        frame = frame.f_back
    return False


def _kept_around(current: PascalAttnProcessor, processor: Any) -> Any:
    if isinstance(processor, PascalAttnProcessor):
        # unbound where diffusers has made another one of the class that it found
        return processor if processor._original is not None else current
    return _around(processor, current._redirect) if computes_attention(processor) else processor


def _pipeline_classes() -> list[Any]:
    found = [getattr(_diffusers, name, None) for name in ("DiffusionPipeline", "ModularPipeline")]
    return [cls for cls in found if cls is not None]


def _attention_classes() -> list[Any]:
    from diffusers.models import attention

    classes = [_attention_processor.Attention, getattr(attention, "AttentionModuleMixin", None)]
    return [cls for cls in classes if cls is not None]


def _require_sites(sites: list[nn.Module], host: Any, models: list[nn.Module]) -> None:
    if sites:
        return
    looked = ", ".join(type(model).__name__ for model in models) or "no diffusers model"
    others = "; ".join(left_alone(models))
    raise ValueError(
        f"{type(host).__name__} must hold attention that calls scaled_dot_product_attention, got none (looked into "
        f"{looked}){'; left alone: ' if others else ''}{others or '; models without attention need no patch'}"
    )


def _warn_if_sdpa_is_replaced() -> None:
    current = F.scaled_dot_product_attention
    if current is not TORCH_SDPA and not str(current.__module__).startswith(__name__.rpartition(".")[0]):
        _warn_once(f"{current.__module__}.{getattr(current, '__qualname__', current)}")


@functools.lru_cache(maxsize=16)
def _warn_once(replacement: str) -> None:
    log.warning(
        "torch.nn.functional.scaled_dot_product_attention has been replaced by %s: attention goes there, and reaches "
        "Pascal Attention only where that calls torch's own",
        replacement,
    )


install()
