"""Int8 layers of ComfyUI's own files (``TensorWiseINT8Layout`` of comfy_kitchen) by this package's product.

comfy_kitchen chooses among backends by what each call needs; its CUDA backend begins at compute capability 7.5, and
below it every call copies the weight and holds the whole int32 result. Ours is preferred while a model runs for which
it was asked, and only in that thread; the list of priorities is never touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pascal_attn_core.int8.backends import backend_for
from ...pascal_attn_core.int8.product import int8_linear as product
from ...pascal_attn_core.int8.report import COMPUTED_BY
from ...pascal_attn_core.reference.int8_rows import Int8Matrix
from .host import KEY

NAME, FUNCTION, LAYOUT = "pascal", "int8_linear", "TensorWiseINT8Layout"
CHOICES = ("auto", "always", "off")
_NEWER = (7, 5)  # where comfy_kitchen's CUDA backend begins
_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "none": lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
}


def registry_of_host() -> Any | None:
    """comfy_kitchen's registry of backends, where the host has one that knows int8 layers."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    registry: Any = getattr(comfy_kitchen, "registry", None)
    if not hasattr(registry, "use_backend") or not hasattr(registry, "get_constraints"):
        return None
    return registry if registry.get_constraints("eager", FUNCTION) is not None else None


def int8_layers(model: nn.Module) -> int:
    """Number of layers of ``model`` that have a weight in 8 bits from their file."""
    weights = (module._parameters.get("weight") for module in model.modules())
    return sum(getattr(weight, "_layout_cls", "") == LAYOUT for weight in weights)


def why_not(device: torch.device, choice: str) -> str:
    """Why our product does not take the int8 layers of a file on this device; "" = it does."""
    registry = registry_of_host()
    if registry is None:
        return "this ComfyUI has no comfy_kitchen with int8 layers"
    if choice == "off":
        return "int8_files is off"
    if choice == "always":
        return ""
    if device.type != "cuda" or torch.version.hip:
        return "int8_files is auto, which applies to NVIDIA cards only"
    has_cuda = registry.is_available("cuda") and registry.get_constraints("cuda", FUNCTION) is not None
    if has_cuda and torch.cuda.get_device_capability(device) >= _NEWER:
        return "int8_files is auto, and ComfyUI has its own kernel for this card"
    return ""


class FileLayers:
    """The int8 layers of one node's model that its file brings.

    Attributes:
        layers: their number.
        why_not: why ComfyUI computes them itself; "" = it does not.
        calls: number of calls that were computed here in this run.
        backend: what computed the first of them, see :data:`.backends.BACKENDS`.
    """

    def __init__(self, network: nn.Module, device: torch.device, choice: str) -> None:
        self.layers = int8_layers(network)
        self.why_not = why_not(device, choice) if self.layers else "none"
        self.calls, self.backend = 0, ""

    def text(self) -> str:
        """A sentence about these layers; "" where there are none."""
        if not self.layers:
            return ""
        text = f"{self.layers} linear layers are in int8 in the model's file"
        if self.why_not:
            return f"{text}; ComfyUI computes them: {self.why_not}"
        if not self.calls:
            return f"{text}, computed here: no call yet"
        return f"{text}, computed here: {self.calls} calls by {COMPUTED_BY[self.backend]}"

    def wrapper(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        with serving(registry_of_host(), self):
            return executor(*args, **kwargs)

    def count(self, x: Tensor, matrix: Int8Matrix) -> None:
        self.calls += 1
        self.backend = self.backend or backend_for(x, matrix).name


_local = threading.local()  # served: of the model that this thread runs


@contextmanager
def serving(registry: Any, served: FileLayers) -> Iterator[None]:
    """Within it, int8 layers that this thread runs are ours. Other calls never are: ours has no priority."""
    registry.register(NAME, _Backend, {FUNCTION: registry.get_constraints("eager", FUNCTION)})
    before, _local.served = getattr(_local, "served", None), served
    try:
        with registry.use_backend(NAME):
            yield
    finally:
        _local.served = before


class _Backend:
    """The functions that comfy_kitchen calls."""

    @staticmethod
    def int8_linear(
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = torch.bfloat16,
        convrot: bool = False,
        convrot_groupsize: int = 256,
        input_act: str | None = None,
        **others: Any,
    ) -> Tensor:
        """``act(x) W^T + bias`` with W ``[N, K]`` int8, scale ``[]``, ``[1]``, ``[N]`` or ``[N, 1]``."""
        if others or input_act not in _ACTIVATIONS:
            registry: Any = registry_of_host()
            implementation = registry.get_implementation(FUNCTION, backend="eager")
            own = {"convrot": convrot, "convrot_groupsize": convrot_groupsize, "input_act": input_act}
            return implementation(x, weight, weight_scale, bias, out_dtype, **own, **others)
        x = _ACTIVATIONS[input_act](x)
        codes, scales = weight.to(x.device).contiguous(), weight_scale.to(x.device, torch.float32).reshape(-1)
        matrix = Int8Matrix(codes, scales, convrot_groupsize if convrot else 0)
        if bias is not None:
            bias = bias.to(x.device).reshape(-1)
        served = getattr(_local, "served", None)
        if served is not None:
            served.count(x, matrix)
        return product(x, matrix, bias, out_dtype=out_dtype)


def install(patcher: Any, files: FileLayers) -> None:
    """Let the clone's diffusion model run with its int8 layers computed here, or not, whatever it had before."""
    from comfy.patcher_extension import WrappersMP

    key = f"{KEY}_int8_files"
    patcher.remove_wrappers_with_key(WrappersMP.DIFFUSION_MODEL, key)
    if not files.why_not:
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, key, files.wrapper)
