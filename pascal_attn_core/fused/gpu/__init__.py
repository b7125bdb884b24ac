"""Drivers and compilers of the GPUs' makers, and which serve a device."""

from __future__ import annotations

from ...machine.device import DeviceInfo
from .cuda import CudaRuntime
from .hip import HipRuntime
from .runtime import GpuRuntime

_RUNTIMES: dict[str, GpuRuntime] = {"cuda": CudaRuntime(), "hip": HipRuntime()}


def gpu_runtime_of(info: DeviceInfo) -> GpuRuntime | None:
    """That of a device; None = the kernels run on no device of this kind."""
    return _RUNTIMES.get(info.kind)


def has_kernels(info: DeviceInfo) -> bool:
    """Whether there are kernels for a device, by its facts alone: not whether they can be had on this machine."""
    gpu = gpu_runtime_of(info)
    return gpu is not None and not gpu.refusal(info)
