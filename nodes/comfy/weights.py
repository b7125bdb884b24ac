"""LoadedWeight: where the float weight of a linear layer is in a ComfyUI model that has been loaded, and its patches.

Loaded on the device, a patched weight (LoRA) has its patches in it, and ``patcher.backup`` holds what was there before.
Left in host memory ("lowvram"), it has not: a function on the layer adds them in each call. In both cases plain LoRA
adapters can be told apart from the weight, and everything else is a part of it.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pascal_attn_core.int8.exchange import FloatWeight, Source
from ...pascal_attn_core.int8.stored import values
from ...pascal_attn_core.int8.weight import Int8Weight, LowRank

PREFIX = "diffusion_model."
Adapter = tuple[Tensor, Tensor, float]


class LoadedWeight(Source):
    """The weight of one layer under one patcher; made when the model has been loaded."""

    casts = True

    def __init__(self, patcher: Any, name: str, module: nn.Module):
        model, key = patcher.model, f"{PREFIX}{name}.weight"
        self._model = weakref.ref(model)
        self._base: Tensor | None = None  # the weight before its patches
        self._adapters: list[Adapter] = []
        self._functions = functions_of(module, "weight")
        self.why_not = _why_not(module, self._functions)
        if self._functions and not self.why_not:
            function = self._functions[-1]
            self._split(function.patches[function.key], module)
            if self._adapters:
                self._functions = []
        elif kept := getattr(module.weight, "patches", None):  # on a tensor of ComfyUI-GGUF
            self._split(kept[0][0], module)
            if not self._adapters:
                self.why_not = f"its weight is {self.note.removeprefix('rounded ')}"
        elif key in patcher.hook_backup:
            self.note = "rounded as patched by a hook"
        elif key in patcher.backup:
            if model.current_weight_patches_uuid == patcher.patches_uuid and key in patcher.patches:
                self._split(patcher.patches[key], module)
                if self._adapters:
                    self._base = patcher.backup[key].weight
            else:
                self.note = "rounded with the patches it was loaded with"
        if self._adapters:
            downs, ups = zip(*((down.float(), up.float() * factor) for down, up, factor in self._adapters))
            self.lora = LowRank(torch.cat(downs), torch.cat(ups, dim=1))

    def _split(self, patches: list[Any], module: nn.Module) -> None:
        self._adapters, other = plain_adapters(patches, tuple(module._parameters["weight"].shape))  # type: ignore[union-attr]
        rank = sum(len(down) for down, _, _ in self._adapters)
        self.note = f"LoRA of rank {rank} beside it in float" if self._adapters else ""
        if other:
            self.note = f"rounded with its patch ({other})"

    def read(self, module: nn.Module, device: torch.device) -> FloatWeight:
        parameter: Any = module._parameters["weight"]
        original: Tensor = parameter if self._base is None else self._base
        matrix = original.detach().to(device)
        if self._functions:
            matrix = _patched(matrix, self._functions)
            original = matrix.to("cpu", parameter.dtype if parameter.dtype.itemsize > 1 else torch.bfloat16)
        bias, functions = module._parameters.get("bias"), functions_of(module, "bias")
        return FloatWeight(
            matrix,
            original,
            bias=_patched(bias.detach().to(device), functions) if bias is not None and functions else None,
            attributes=_without_casting(module),
        )

    def stays_in_host_memory(self, module: nn.Module) -> bool:
        """The weight becomes one of those that ComfyUI unloads while their model runs on."""
        model = self._model()
        if model is None or not hasattr(module, "comfy_cast_weights"):
            return False
        if not hasattr(module, "prev_comfy_cast_weights"):
            module.prev_comfy_cast_weights = module.comfy_cast_weights
        module.comfy_cast_weights = True  # type: ignore[assignment]
        weight: Any = module._parameters["weight"]
        model.model_lowvram = True
        model.model_loaded_weight_memory -= weight.numel() * weight.element_size()
        return True


def _without_casting(module: nn.Module) -> dict[str, Any]:
    """Attributes with which a layer of ComfyUI multiplies by its weight as it is: one in 8 bits takes inputs of any
    dtype and device."""
    if not hasattr(module, "comfy_cast_weights"):
        return {}
    own = {"forward_comfy_cast_weights": types.MethodType(forward_comfy_cast_weights, module)}
    return {"comfy_cast_weights": True, **own, **({"layout_type": None} if hasattr(module, "layout_type") else {})}


def forward_comfy_cast_weights(self: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
    """A method of one layer in place of its class's, of which it has the name, so that in a pickle it is that one."""
    if not isinstance(self.weight, Int8Weight):  # in a copy of the model
        return type(self).forward_comfy_cast_weights(self, input, *_, **__)
    return F.linear(input, self.weight, self.bias)


def functions_of(module: nn.Module, parameter: str) -> list[Any]:
    """The functions that the host applies to a layer's ``"weight"`` or ``"bias"`` in each call of the layer."""
    return list(getattr(module, f"{parameter}_function", []))


def _patched(parameter: Tensor, functions: list[Any]) -> Tensor:
    """The values of a parameter after these functions, in float32."""
    found = values(parameter).to(torch.float32, copy=True)
    for function in functions:
        found = function(found)
    return found


def plain_adapters(patches: list[Any], shape: tuple[int, ...]) -> tuple[list[Adapter], str]:
    """ComfyUI's patches of one weight ``[N, K]`` as LoRA adapters ``(down [R, K], up [N, R], factor)``; or none of
    them, and the name of the first that is something else (``"loha"``, ``"diff"``)."""
    from comfy import weight_adapter

    found: list[Adapter] = []
    for strength, value, strength_model, offset, function in patches:
        kind = _kind_of(value)
        weights: Any = getattr(value, "weights", ())
        if not isinstance(value, weight_adapter.LoRAAdapter) or len(weights) != 6:
            return [], kind
        up, down, alpha, mid, dora, reshape = weights
        if strength_model != 1.0:
            return [], f"{kind} that scales the weight"
        if offset is not None or function is not None or mid is not None or reshape is not None:
            return [], f"{kind} of a part of the weight"
        if dora is not None:
            return [], "dora"
        up, down = up.flatten(1), down.flatten(1)
        if (up.shape[0], down.shape[1]) != shape or up.shape[1] != down.shape[0]:
            return [], f"{kind} of another shape"
        if strength:
            found.append((down, up, float(strength) * (1.0 if alpha is None else float(alpha) / down.shape[0])))
    return found, ""


def _kind_of(value: Any) -> str:
    if isinstance(value, tuple):
        return value[0] if len(value) == 2 and isinstance(value[0], str) else "diff"
    if isinstance(value, list):
        return "merged model"
    return str(getattr(value, "name", type(value).__name__))


def _why_not(module: nn.Module, functions: list[Any]) -> str:
    if type(module).forward.__module__ not in ("torch.nn.modules.linear", "comfy.ops"):
        return f"{type(module).__module__}.{type(module).__qualname__} has its own forward"
    if any(type(function).__name__ != "LowVramPatch" for function in [*functions, *functions_of(module, "bias")]):
        return "another node changes its weight in each call"
    return ""
