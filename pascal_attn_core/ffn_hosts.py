"""What hosts put on a module, by attribute names: hooks that bring weights, layers that cast them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
HOOKS = ("_hf_hook", "_diffusers_hook")  # accelerate's and diffusers': they bring weights and take them away
SKIPPED = (*HOOKS, "forward", "_old_forward")
BOOKKEEPING = {"comfy.model_management"}  # code that keeps lists of what is loaded, which change from run to run
CASTS = "comfy_cast_weights"  # on ComfyUI's layers, which fetch, cast and patch their weights inside forward
_OF_CASTS = ("_", "comfy_", "prev_comfy_")  # names of what such a layer keeps between calls
_BASE = {key for key in nn.Module().__dict__ if key != "training"} | {"training", *SKIPPED}


def plain_state(module: nn.Module) -> dict[str, Any]:
    """What a weight-casting layer is set to, without what it does to its weights."""
    state = module.__dict__.items()
    return {key: v for key, v in state if isinstance(v, PLAIN) and key not in _BASE and not key.startswith(_OF_CASTS)}


def casting_layers(module: nn.Module) -> list[nn.Module]:
    """The layers inside that bring their weights to the input's device and dtype in each call."""
    return [child for child in module.modules() if hasattr(child, CASTS)]


def movable_parameters(module: nn.Module) -> set[int]:
    """Identities of the parameters whose memory a host's hook exchanges around each call: offloading, casting."""
    hosts = [child for child in module.modules() if any(hook in child.__dict__ for hook in HOOKS)]
    return {id(parameter) for child in hosts for parameter in child.parameters(recurse=False)}
