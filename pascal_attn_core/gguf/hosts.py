"""The linear layers in which hosts keep GGUF weights: how each is recognised, and what its own code computes from.

diffusers has ``GGUFLinear`` with a ``GGUFParameter``, ComfyUI-GGUF (and its forks, which keep the names) a
``GGMLLayer`` with a ``GGMLTensor``. Neither is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..reference.gguf_blocks import FORMATS
from .matrix import GgufMatrix, Product

Operands = tuple[GgufMatrix, Tensor | None]


class Host(NamedTuple):
    """One host. ``method``: the method of its linear layers that multiplies by the expanded weight. ``mark``: the
    attribute of a weight that is its format. ``operands``: returns weight and bias of a module for an input."""

    method: str
    mark: str
    operands: Callable[[nn.Module, Tensor], Operands]


def _of_diffusers(module: Any, x: Tensor) -> Operands:
    weight, dtype, bias = module.weight, module.compute_dtype, module.bias
    shape = module.out_features, module.in_features
    matrix = GgufMatrix(_plain(weight), weight.quant_type.name, shape, torch.float16, torch.float32, dtype)
    return matrix, None if bias is None else bias.to(dtype)


def _of_comfyui(module: Any, x: Tensor) -> Operands:
    weight, dtype = module.weight.to(x.device), module.dequant_dtype
    arithmetic = x.dtype if dtype == "target" else dtype or torch.float16
    bias = None if module.bias is None else module.get_weight(module.bias.to(x.device), x.dtype)
    shape = tuple(weight.tensor_shape)
    return GgufMatrix(_plain(weight), weight.tensor_type.name, shape, arithmetic, torch.int8, x.dtype), bias


def _plain(weight: Tensor) -> Tensor:
    """The bytes of a weight as a tensor without the host's behaviour."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().as_subclass(Tensor).contiguous().view(torch.uint8)


HOSTS = (
    Host("forward_native", "quant_type", _of_diffusers),
    Host("forward_ggml_cast_weights", "tensor_type", _of_comfyui),
)


def host_of(module: nn.Module) -> Host | None:
    """The host whose linear layer for GGUF weights a module is; None = it is none."""
    if not hasattr(module, "in_features"):  # no convolution
        return None
    for host in HOSTS:
        if hasattr(type(module), host.method) and format_of(module, host) not in ("", "F32", "F16"):
            return host
    return None


def format_of(module: nn.Module, host: Host) -> str:
    """The name of the format of a module's weight, "" = it has none."""
    return getattr(getattr(module._parameters.get("weight"), host.mark, None), "name", "")


def why_not(module: nn.Module, host: Host) -> str:
    """Why a host has to compute a layer itself; "" = it need not."""
    name = format_of(module, host)
    if host.method in module.__dict__:
        return "its product has been replaced already"
    if name not in FORMATS:
        return f"its format {name} is not one of {', '.join(FORMATS)}"
    if hasattr(module, "forward_cuda") and getattr(sys.modules.get(type(module).__module__), "ops", None):
        return "diffusers computes it by kernels of its own (DIFFUSERS_GGUF_CUDA_KERNELS)"
    return ""


class Multiplier:
    """Stands in a module in place of its host's method that multiplies by the expanded weight.

    Attributes:
        takes: whether it multiplies; else the host does, as for weights and inputs that are not ours. It is given
            whether the weight has patches: ComfyUI-GGUF keeps those of a LoRA on it, and adds them to the whole
            expanded matrix.
        multiply: gives the product of an input with the weight and the bias.
    """

    __slots__ = ("_host", "module", "multiply", "takes")

    def __init__(self, module: nn.Module, host: Host, takes: Callable[[bool], bool], multiply: Product):
        self.module, self._host, self.takes, self.multiply = module, host, takes, multiply

    def put_in(self) -> None:
        """Take the place."""
        self.module.__dict__[self._host.method] = self

    def take_out(self) -> bool:
        """Give the host its method back. Returns False if something has been put over it."""
        is_in_place = self.module.__dict__.get(self._host.method) is self
        if is_in_place:
            del self.module.__dict__[self._host.method]
        return is_in_place

    def __call__(self, x: Tensor) -> Tensor:
        module, host = self.module, self._host
        takes = self.takes(bool(getattr(module.weight, "patches", None)))
        if takes and format_of(module, host) in FORMATS and _is_ordinary(x):
            return self.multiply(x, *host.operands(module, x))
        return getattr(type(module), host.method)(module, x)

    def __reduce__(self) -> Any:
        """Copied or pickled, it is the host's own method: a file must not depend on this package."""
        return getattr, (self.module, self._host.method)


def _is_ordinary(x: Tensor) -> bool:
    """Whether a tensor has numbers, and slices can be written into a result: not where torch.func works on it."""
    return not x.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(x)
