"""Which maker's driver and compiler serve a device."""

from __future__ import annotations

from ..device import DeviceInfo
from .cuda_runtime import CudaRuntime
from .gpu_runtime import GpuRuntime

_CUDA = CudaRuntime()


def gpu_runtime_of(info: DeviceInfo) -> GpuRuntime | None:
    """That of a device; None = the kernels run on no device of this kind."""
    return _CUDA if info.kind == "cuda" else None
