"""Linear layers whose weights are there within their call only, since their host or a patch of this package brings
them: each is noted as one operator, and called for each slice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..patching.hosts import casts_weights, is_hosts
from .graph import Graph
from .run import NotTokenwise
from .stand_in import place_of

_OURS = __name__.rpartition(".ffn.")[0]
_QUANTISED = ("optimum.quanto.", "diffusers.quantizers.gguf.")  # linear layers whose weights are expanded in each call
_lock = threading.RLock()


def brought_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers inside a module that bring their weights themselves.

    Raises:
        NotTokenwise: one that is not known to treat every token by itself.
    """
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise NotTokenwise("holds TorchScript, which may need a tensor's values")
        is_ours = any(map(_is_ours, (*child.__dict__.values(), *child._parameters.values())))
        home = type(child).forward.__module__
        if isinstance(child, nn.Linear) and (is_ours or home.startswith(_QUANTISED)):
            yield child
        elif casts_weights(child):
            if not is_hosts(home) or "forward" in child.__dict__ or not isinstance(child, (nn.Linear, *_NORMS)):
                raise NotTokenwise(f"holds {name}, a {type(child).__name__} that brings its weights and is no linear layer")
            yield child


_NORMS = (nn.LayerNorm, nn.RMSNorm)


def _is_ours(thing: Any) -> bool:
    return f"{type(thing).__module__}.".startswith((f"{_OURS}.int8.", f"{_OURS}.gguf."))


def waiting_layer(module: nn.Module) -> str:
    """The name of a layer inside that another patch of this package is about to measure by a hook; "" = none."""
    hooked = (name for name, child in module.named_modules() if any(map(_is_ours, child._forward_pre_hooks.values())))
    return next(hooked, "")


@contextlib.contextmanager
def noted(graph: Graph, layers: list[nn.Module]) -> Iterator[None]:
    """Within the block these layers are operators of ``graph``."""
    if not layers:
        yield
        return
    with _lock:
        before = [(layer, layer.forward, layer.__dict__.get("forward")) for layer in layers]
        try:
            for layer, forward, _ in before:
                layer.__dict__["forward"] = _noting(graph, layer, forward)
            yield
        finally:
            for layer, _, own in before:
                if own is None:
                    del layer.__dict__["forward"]
                else:
                    layer.__dict__["forward"] = own


def _noting(graph: Graph, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Any:
        place = place_of(args[0]) if args else None
        if place is None or place.value is not None:
            return forward(*args, **kwargs)
        x: Tensor = args[0]
        own = 1 if isinstance(layer, nn.Linear) else len(layer.normalized_shape)  # type: ignore[arg-type]
        if len(args) > 1 or kwargs or place.along is None or place.along.dim >= x.dim() - own:
            graph.catch_up(f"calls {type(layer).__name__}, which brings its weights, not on one tensor of tokens")
            return forward(*args, **kwargs)
        casts = torch.is_autocast_enabled(x.device.type) and isinstance(layer, nn.Linear)
        channels: Any = layer.out_features if isinstance(layer, nn.Linear) else x.shape[-1]
        return graph.note_layer(forward, x, channels, torch.get_autocast_dtype(x.device.type) if casts else x.dtype)

    return note
