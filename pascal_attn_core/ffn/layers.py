"""Linear layers whose weights are there within their call only, since their host or a patch of this package brings
them: each is noted as one operator, and called for each slice."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..patching.hosts import casts_weights, is_hosts
from .graph import Graph, place_of
from .rules import NotTokenwise

_OURS = tuple(f"{__name__.rpartition('.ffn.')[0]}.{folder}." for folder in ("int8", "gguf"))
_QUANTISED = ("optimum.quanto.", "diffusers.quantizers.gguf.")  # linear layers whose weights are expanded in each call
_lock = threading.RLock()


def brought_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers inside a module that bring their weights themselves. Raises NotTokenwise for one that is not known to
    treat every token by itself."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise NotTokenwise("holds TorchScript, which may need a tensor's values")
        home = type(child).forward.__module__
        is_ours = any(map(_is_ours, (*child.__dict__.values(), *child._parameters.values())))
        if isinstance(child, nn.Linear) and (is_ours or home.startswith(_QUANTISED)):
            yield child
        elif casts_weights(child):
            is_known = isinstance(child, (nn.Linear, nn.LayerNorm, nn.RMSNorm))
            if not is_known or not is_hosts(home) or "forward" in child.__dict__:
                raise NotTokenwise(
                    f"holds {name}, a {type(child).__name__} that brings its weights in a way of its own"
                )
            yield child


def _is_ours(thing: Any) -> bool:
    return _is_of_ours(type(thing))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _is_of_ours(kind: Any) -> bool:
    return f"{kind.__module__}.".startswith(_OURS)


def waiting_layer(module: nn.Module) -> str:
    """The name of a layer inside that another patch of this package is about to measure by a hook; "" = none."""
    hooks = ((name, child._forward_pre_hooks.values()) for name, child in module.named_modules())
    return next((name for name, found in hooks if any(map(_is_ours, found))), "")


@contextlib.contextmanager
def noted(graph: Graph, layers: list[nn.Module]) -> Iterator[None]:
    """Within the block these layers are operators of ``graph``."""
    with contextlib.ExitStack() as undo:
        if layers:
            undo.enter_context(_lock)
        for layer in layers:
            place, own = layer.__dict__, {key: layer.__dict__[key] for key in ("forward",) if key in layer.__dict__}
            undo.callback(place.update, own)
            undo.callback(place.pop, "forward")  # before that
            place["forward"] = _noting(graph, layer, layer.forward)
        yield


def _noting(graph: Graph, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    is_linear = isinstance(layer, nn.Linear)
    own: Any = 1 if is_linear else len(layer.normalized_shape)  # type: ignore[arg-type]

    def note(*args: Any, **kwargs: Any) -> Any:
        x, place = (args[0], place_of(args[0])) if args else (None, None)
        if x is None or place is None or place.value is not None:
            return forward(*args, **kwargs)
        if len(args) > 1 or kwargs or place.along is None or place.along.dim >= x.dim() - own:
            graph.catch_up(f"calls {type(layer).__name__}, which brings its weights, not on one tensor of tokens")
            return forward(*args, **kwargs)
        casts = is_linear and torch.is_autocast_enabled(x.device.type)
        channels: Any = layer.out_features if is_linear else x.shape[-1]
        return graph.note_layer(forward, x, channels, torch.get_autocast_dtype(x.device.type) if casts else x.dtype)

    return note
