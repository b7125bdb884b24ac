"""Exchange: the float weight of a module out, the same weight in 8 bits in, and everything back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .weight import Int8Weight, LowRank


@dataclass(frozen=True)
class FloatWeight:
    """The tensors that a host computes a linear layer with.

    Attributes:
        matrix: ``[N, K]``, on the device of the inputs: the part that is rounded. It may be stored in 8 bits: see
            :func:`.stored.values`.
        original: that matrix where it is stored.
        bias: a bias to be used in place of the module's; None = the module's.
        attributes: instance attributes that the module has while its weight is in 8 bits.
    """

    matrix: Tensor
    original: Tensor
    bias: Tensor | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


class Source:
    """Where the float weight of one module is. This one is for modules whose parameter is all there is; hosts that keep
    patched or offloaded weights have their own. A source must not refer to its module, which it would keep alive.

    Attributes:
        note: what the report says of the layer beside its numbers.
        why_not: why the layer has to be left to its host now; "" = it need not.
        casts: whether the host brings the weight to the device of the inputs in each call.
        lora: the adapters that are added beside the weight, in float.
    """

    note, why_not, casts = "", "", False
    lora: LowRank | None = None

    def read(self, module: nn.Module, device: torch.device) -> FloatWeight:
        """The weight as it is now, its matrix on ``device``."""
        parameter = module._parameters["weight"]
        assert parameter is not None
        return FloatWeight(parameter.detach().to(device), parameter)

    def stays_in_host_memory(self, module: nn.Module) -> bool:
        """Whether the host can run with the weight left in host memory when its device is full."""
        return False


class Exchange:
    """The module's own weight while it has one in 8 bits, until :meth:`undo`.

    Args:
        found: its float weight.
        weight: the same in 8 bits, which the module is given.
        weights: "host" = the float weight moves to host memory; "keep" = it stays; "free" = it is discarded.

    Attributes:
        parameter: the module's float parameter; None = discarded.
    """

    def __init__(self, module: nn.Module, found: FloatWeight, weight: Int8Weight, weights: str):
        parameter = module._parameters["weight"]
        assert parameter is not None
        self._home, self._at, self._requires_grad = parameter.device, weight.device, parameter.requires_grad
        self.parameter = None if weights == "free" else parameter
        self._original = None if weights == "free" else found.original
        if weights == "host":
            moved = self.parameter = _moved(parameter, torch.device("cpu"), parameter.dtype)
            if self._original is parameter:
                self._original = weight.in_float.original = moved
        self._own = found.attributes
        self._attributes = {name: vars(module)[name] for name in self._own if name in vars(module)}
        vars(module).update(self._own)
        self._bias, self._own_bias = module._parameters.get("bias"), None
        if found.bias is not None:
            self._own_bias = module._parameters["bias"] = nn.Parameter(found.bias, requires_grad=False)
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def values(self, weight: Int8Weight) -> Tensor:
        """The float values that the module has without us: the parameter's, or those that were written since."""
        if self.parameter is not None and weight.original is self._original:
            return self.parameter.detach()
        return weight.float_matrix() if weight.original is None else weight.original.detach()

    def bring_back(self, weight: Int8Weight) -> None:
        """Move the float weight to where the host has its weights now. With a torch.OutOfMemoryError nothing has
        changed."""
        if self.parameter is not None:
            device = self._home if weight.device == self._at else weight.device
            self.parameter = _moved(self.parameter, device, weight.dtype, self.values(weight))

    def undo(self, module: nn.Module, weight: Int8Weight | None) -> None:
        """Put back what the module had in place of ``weight``; None = someone has replaced it, then that stays. With a
        torch.OutOfMemoryError the float weight stays in host memory."""
        if self._own_bias is not None and module._parameters.get("bias") is self._own_bias:
            module._parameters["bias"] = self._bias
        for name in self._own:
            vars(module).pop(name, None)
        vars(module).update(self._attributes)
        if weight is None:
            return
        if self.parameter is None:
            module._parameters["weight"] = nn.Parameter(weight.float_matrix(), requires_grad=self._requires_grad)
            return
        module._parameters["weight"] = self.parameter  # which stays in host memory if it cannot be brought back
        self.bring_back(weight)
        module._parameters["weight"] = self.parameter


def _moved(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype, values: Tensor | None = None
) -> nn.Parameter:
    """A parameter with these values, or its own, on a device. It is the same one, whoever else holds it; only tensors
    of classes of their own cannot be given other data, and become another parameter."""
    found = (parameter.detach() if values is None else values).to(device, dtype)
    if found.data_ptr() == parameter.data_ptr() and found.dtype == parameter.dtype and found.device == parameter.device:
        return parameter
    if type(parameter) is not nn.Parameter:
        return nn.Parameter(found, requires_grad=False)
    parameter.data = found
    return parameter


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Weights made here can be used outside of inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        yield
