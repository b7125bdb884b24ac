"""Weights as hosts store them: float matrices, 8-bit floats without a scale, which a host casts in each call, and
tensors of their own classes that expand themselves (``dequantize``), such as ComfyUI's for scaled 8-bit floats."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .backends import FLOATS

FLOATS_8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LEAST_BITS = 7.9
_FEW = 64


def why_not(module: nn.Module, weight: Tensor) -> str:
    """Why the numbers that a stored weight of a module stands for are not known; "" = they are."""
    if weight.dtype not in (*FLOATS, *FLOATS_8) or not (type(weight) is nn.Parameter or _expands(weight)):
        kind = "" if type(weight) is nn.Parameter else f" in a {type(weight).__name__}"
        return f"its weight is {_name(weight.dtype)}{kind}"
    if _expands(weight) and _codes(weight).dtype == torch.int8:  # whoever made it has its own product
        return f"its weight is {format_of(weight)}"
    own = {**module._parameters, **module._buffers}
    scale = next((name for name, tensor in own.items() if "scale" in name and tensor is not None), "")
    if weight.dtype in FLOATS_8 and scale:
        return f"its weight is {_name(weight.dtype)} with a scale of the module's own ({scale})"
    return ""


def values(weight: Tensor, device: torch.device | None = None) -> Tensor:
    """The matrix ``[N, K]`` that a stored weight stands for, on a device; None = where it is. 8-bit floats stay what
    they are: whoever computes with some rows casts them, without loss."""
    found = weight.detach() if device is None else weight.detach().to(device)
    return found.dequantize() if _expands(weight) else found


def format_of(weight: Tensor) -> str:
    """``"float32"``, ``"float8_e4m3fn"``, or for a tensor of its own class ``"float8_e4m3fn in a QuantizedTensor"``."""
    if not _expands(weight):
        return _name(weight.dtype)
    return f"{_name(_codes(weight).dtype)} in a {type(weight).__name__}"


def bytes_of(weight: Tensor) -> int:
    """The memory that a stored weight takes."""
    return sum(part.numel() * part.element_size() for part in (_inner(weight) if _expands(weight) else [weight]))


def has_fewer_bits(weight: Tensor) -> bool:
    """Whether 8 bits would take more memory than the weight does."""
    return 8 * bytes_of(weight) < _LEAST_BITS * weight.numel()


class Seen:
    """The weight of a module that was seen last."""

    def __init__(self) -> None:
        self._weight: weakref.ref[Tensor] | None = None
        self._state: tuple[int, int] | None = None
        self._few: list[Any] = []

    def changes(self, weight: Tensor) -> bool:
        """Whether this weight has other numbers than the one before it; False for the first one. Hosts that offload
        give a module the same numbers in other memory, which is seen by a few of them."""
        weight = _codes(weight) if _expands(weight) else weight
        with torch._C.DisableTorchFunctionSubclass():
            state = weight.data_ptr(), -1 if weight.is_inference() else weight._version
            before, is_same = self._state, self._weight is not None and self._weight() is weight
            if is_same and state == before:
                return False
            plain = weight.detach().as_subclass(Tensor).flatten().view(torch.uint8)
            few = [weight.shape, weight.dtype, plain[:: max(1, plain.numel() // _FEW)].tolist()]
        is_written = is_same and before is not None and state[1] != before[1]
        is_other = before is not None and (is_written or few != self._few)
        self._weight, self._state, self._few = weakref.ref(weight), state, few
        return is_other


def _expands(weight: Tensor) -> bool:
    kind = type(weight)
    return hasattr(kind, "__tensor_flatten__") and kind.dequantize is not Tensor.dequantize


def _codes(weight: Tensor) -> Tensor:
    return max(_inner(weight), key=Tensor.numel)


def _inner(weight: Any) -> list[Tensor]:
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
