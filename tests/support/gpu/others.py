"""A torch that believes it has a GPU of Apple's or of Intel's, without float64; see :mod:`.cards`."""

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from attn_support import mps

from pascal_attn_core.patching import interception

from . import guard, tensors

_TYPES = {"xpu": 12, "mps": 13}  # c10/core/DeviceType.h
_XPU = SimpleNamespace(name="Intel(R) Arc(TM) A770 Graphics", gpu_subslice_count=32, total_memory=16 << 30)


def believe(kind: str) -> None:
    """Make torch, and the package, believe in one ``"mps"`` or ``"xpu"``; this cannot be undone."""
    ctypes.CDLL(str(guard.library())).fake_device_is(_TYPES[kind])
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "synchronize": None, "_lazy_init": None}
    answers |= {"recommended_max_memory": 12 << 30, "driver_allocated_memory": 0, "current_allocated_memory": 0}
    answers |= {"get_name": "Apple M1", "get_core_count": 8, "_get_device_properties": _XPU}
    answers |= {"mem_get_info": (15 << 30, 16 << 30), "memory_reserved": 0, "memory_allocated": 0}
    for module in (torch.xpu,) if kind == "xpu" else (torch.mps, torch.backends.mps):
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer: answer)
    if kind == "mps":
        torch.baddbmm, torch.bmm = mps.baddbmm, mps.bmm
        torch._fused_sdp_choice = Mock(side_effect=NotImplementedError("there is no kernel for it on MPS"))
    else:
        interception.TORCH_SDPA = _fused  # type: ignore[attr-defined]
    tensors.serve(lambda device=None: 0, kind)


def _fused(*tensors: Any, **options: Any) -> torch.Tensor:
    """Compute on the CPU what oneDNN would on the device."""
    device = tensors[0].device
    return torch.nn.functional.scaled_dot_product_attention(
        *(t.cpu() if isinstance(t, torch.Tensor) else t for t in tensors), **options
    ).to(device)
