"""Modules of known code: layers of torch and of hosts that treat every token by itself, keep nothing between calls and
read nothing but themselves. Once a call has been noted and has run in slices, the next one of its kind calls the module
on each slice, as long as nothing was changed, added or exchanged."""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .layers import brought_layers

_KNOWN = {
    "torch.nn.modules.activation": ("GELU", "ReLU", "SiLU"),
    "torch.nn.modules.container": ("ModuleList", "Sequential"),
    "torch.nn.modules.dropout": ("Dropout",),
    "torch.nn.modules.linear": ("Identity", "Linear"),
    "torch.nn.modules.normalization": ("LayerNorm", "RMSNorm"),
    "diffusers.models.activations": ("ApproximateGELU", "GEGLU", "GELU", "LinearActivation", "SwiGLU"),
    "diffusers.models.attention": ("FeedForward",),
    "comfy.ldm.modules.attention": ("FeedForward", "GEGLU"),
}
_functions = operator.itemgetter("linear", "gelu", "silu", "relu", "dropout", "layer_norm", "rms_norm")
_CONSTANTS = frozenset({bool, int, float, str, tuple, type(None)})
_hooks = operator.attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOXES = frozenset({dict, OrderedDict, list, set})


def state_of(module: nn.Module) -> list[Any]:
    """Return what the code of known layers reads besides numbers, and what is called with it: two calls of a module
    whose states have the same entries run the same code. It holds no weight and no module."""
    found, state = [module], [nn.Module.__call__, torch.sigmoid, *_functions(vars(F))]
    for each in found:
        kind, own = type(each), each.__dict__
        state += kind, kind.forward, kind.__dict__.get("gelu"), *own
        state += [
            len(value) if (of := type(value)) in _BOXES else value if of in _CONSTANTS else of for value in own.values()
        ]
        for parameter in own["_parameters"].values():
            state += type(parameter), parameter is not None and parameter.requires_grad
        if children := own["_modules"]:
            found += [child for child in children.values() if child is not None]
    return state


def is_seen() -> bool:
    """Whether a mode or a hook of the caller looks at what runs, or autocast is on, which casts a weight once for all
    slices of a call that is noted."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(modes or torch._C._is_any_autocast_enabled() or _has_any_global_hook())


def is_known(module: nn.Module) -> bool:
    """Whether all code of a module is known. Layers that bring their weights are called for each slice anyway."""
    brought = list(map(id, brought_layers(module)))
    return all(
        (id(each) in brought or _is_plain(each, is_whole=each is module)) and (each is module or not any(_hooks(each)))
        for each in module.modules()
    )


def _is_plain(layer: nn.Module, *, is_whole: bool) -> bool:
    """Whether the code of a layer is known, and its weights are of torch's classes."""
    kind, forward = type(layer), type(layer).forward
    is_its_own = (forward.__module__, forward.__qualname__) == (kind.__module__, f"{kind.__name__}.forward")
    return (
        kind.__name__ in _KNOWN.get(kind.__module__, ())
        and (kind is nn.ModuleList or (is_its_own and not vars(forward)))  # which a wrapper of it has
        and (is_whole or not {"forward", "_compiled_call_impl"} & layer.__dict__.keys())
        and all(type(weight) in (nn.Parameter, Tensor, type(None)) for weight in layer._parameters.values())
    )
