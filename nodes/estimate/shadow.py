"""A copy of a model without its numbers: the same modules, whose weights have shapes but no memory.

A forward through it computes nothing, loads nothing, and leaves the model, its layers and its device as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_SMALL_BYTES = 1 << 20  # constants up to this size keep their values: schedules, position tables
_LEFT_OUT = ("forward", "_v", "_v_weight", "_v_bias", "_v_signature", "_prefetch")  # others' patches; host's buffers
_CASTS = "comfy_cast_weights"


class Shadow:
    """Makes shadows of modules; equal modules and weights have one shadow.

    Args:
        mode: the mode in which the weights have shapes only.
    """

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}
        self._kept: list[Any] = []  # ids are only good while their objects live

    def of(self, module: nn.Module) -> nn.Module:
        """The shadow of ``module``; on the CPU, without hooks, patches of forwards, and weights still to be cast."""
        known = self._modules.get(id(module))
        if known is not None:
            return known
        shadow = object.__new__(type(module))
        self._modules[id(module)] = shadow
        self._kept.append(module)
        state: dict[str, Any] = {}
        for name, value in module.__dict__.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                state[name] = OrderedDict()
            elif name not in _LEFT_OUT:
                state[name] = self._copied(value)
        object.__setattr__(shadow, "__dict__", state)
        if hasattr(module, _CASTS):
            # Cast to the input in each call, as a host does with weights that it has not loaded.
            state.update({_CASTS: True, "weight_function": [], "bias_function": []})
            state.update({name: None for name in ("weight_lowvram_function", "bias_lowvram_function") if name in state})
        return shadow

    def _copied(self, value: Any, depth: int = 2) -> Any:
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if depth and type(value) in (dict, OrderedDict):
            return type(value)((key, self._copied(item, depth - 1)) for key, item in value.items())
        if depth and type(value) in (list, tuple):
            return type(value)(self._copied(item, depth - 1) for item in value)
        return set(value) if type(value) is set else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._new_tensor(tensor)
            self._kept.append(tensor)
        return self._tensors[id(tensor)]

    def _new_tensor(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        if not is_parameter and small and not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        dtype = tensor.dtype if tensor.dtype.is_floating_point or not is_parameter else torch.float16  # quantised
        with self.mode:
            empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=False) if is_parameter else empty
