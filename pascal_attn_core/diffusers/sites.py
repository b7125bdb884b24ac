"""The attention modules of a diffusers model, found by reading code, not by a list of classes."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..patching.selectors import DENOISERS, parts_of
from .code import names_of, reaches_sdpa
from .processors import RedirectedProcessor


def models_of(pipe_or_model: Any) -> dict[str, Any]:
    """The models to search by name: the components of a pipeline that are diffusers models, or hold one (as what peft
    makes of one does), or by "" a module itself; raises TypeError for anything else."""
    import diffusers

    kind, parts = diffusers.ModelMixin, parts_of(pipe_or_model)
    return {name: part for name, part in parts.items() if not name or any(isinstance(m, kind) for m in part.modules())}


def sites_of(models: dict[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Each module of ``models``, once, with its name, that computes attention, through a processor or in its own
    ``forward``."""
    return ((name, module) for name, module in _modules(models) if is_site(module))


def _modules(models: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each module, once, with a name that begins with that of its model."""
    seen: set[int] = set()
    for prefix, model in models.items():
        for name, module in model.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield ".".join(filter(None, (prefix, name))), module


def is_site(module: nn.Module) -> bool:
    """Whether ``module`` computes attention that we can redirect. A scripted module has no Python function for that."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    cls: Any = type(module)
    processor = processor_of(module)
    return computes_attention(processor) if processor is not None else forward_reaches_sdpa(cls)


def left_alone(models: dict[str, Any]) -> dict[str, str]:
    """Attention of ``models`` that is left alone: its name -> ``"SanaLinearAttnProcessor2_0: linear attention"``."""
    found = {}
    for name, module in _modules(models):
        cls: Any = type(module)
        processor = processor_of(module)
        if processor is not None and not computes_attention(processor):
            found[name] = f"{type(processor).__name__}: {_why_not_ours(type(processor))}"
        elif processor is None and _attends_by_itself(module):
            has_softmax = "softmax" in names_of(cls.forward)
            found[name] = f"{cls.__name__}: {'a softmax of its own' if has_softmax else 'attention without softmax'}"
    for name in set(DENOISERS) & models.keys():
        if not any(place.startswith(f"{name}.") for place in (*dict(sites_of(models)), *found)):
            found[name] = f"{type(models[name]).__name__}: no attention that calls scaled_dot_product_attention"
    return found


def counted(reasons: Iterable[str]) -> list[str]:
    """Equal reasons together: ``"2 x SanaLinearAttnProcessor2_0: linear attention"``."""
    return [f"{count} x {reason}" for reason, count in collections.Counter(reasons).items()]


def _why_not_ours(cls: Any) -> str:
    is_linear = "Linear" in cls.__name__ or any("linear_attention" in name for name in names_of(cls.__call__))
    return "linear attention" if is_linear else "attention without scaled_dot_product_attention"


def _attends_by_itself(module: nn.Module) -> bool:
    """Whether a module of diffusers computes attention by other means, judged by its name and its code."""
    cls: Any = type(module)
    if not cls.__module__.startswith("diffusers.") or any(is_site(part) for part in module.modules()):
        return False
    return cls.__name__.endswith("Attention") or ("Att" in cls.__name__ and "softmax" in names_of(cls.forward))


def processor_of(module: nn.Module) -> Any:
    """The processor of an attention module, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    processor = module.__dict__.get("processor") or module.__dict__.get("_modules", {}).get("processor")
    return processor if callable(processor) else None


def computes_attention(processor: Any) -> bool:
    """Whether ``processor`` computes softmax attention that we can redirect. Linear attention and processors bound to
    a backend of their own (flex attention) are not ours."""
    cls: Any = type(processor)
    # a third party's processor may call attention where we do not look; a redirect that sees no call costs little
    if isinstance(processor, RedirectedProcessor) or not cls.__module__.startswith("diffusers."):
        return True
    return _call_reaches_sdpa(cls) or upgrade_of(cls) is not None


def default_processor_class(attn: nn.Module) -> type | None:
    """The processor class that ``attn`` would have picked for itself; None if it has no such rule."""
    from diffusers.models import attention_processor

    declared = getattr(attn, "_default_processor_cls", None)
    if declared is not None or not isinstance(attn, attention_processor.Attention):
        return declared
    return attention_processor.AttnProcessor2_0 if attn.scale_qk else attention_processor.AttnProcessor


@functools.cache
def upgrade_of(cls: Any) -> type | None:
    """The class that computes by SDPA what ``cls``, one of diffusers' older processors, computes by other means:
    ``SlicedAttnProcessor`` -> ``AttnProcessor2_0``; None if there is none, or ``cls`` needs none."""
    from diffusers.models import attention_processor

    if cls.__module__ != attention_processor.__name__ or _call_reaches_sdpa(cls):
        return None
    name = cls.__name__.replace("XFormers", "").replace("Sliced", "") + "2_0"
    upgrade = getattr(attention_processor, name, None)
    return upgrade if upgrade is not None and _call_reaches_sdpa(upgrade) else None


@functools.cache
def _call_reaches_sdpa(cls: Any) -> bool:
    call = cls.forward if cls.__call__ is nn.Module.__call__ else cls.__call__
    return reaches_sdpa(call, cls)


@functools.cache
def forward_reaches_sdpa(cls: Any) -> bool:
    """Whether modules of this class call SDPA in their own ``forward``."""
    return cls.__module__.partition(".")[0] != "torch" and reaches_sdpa(cls.forward, cls)
