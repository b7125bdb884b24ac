"""Facts about a device: the public names of :mod:`.machine.device`."""

from .machine.device import (
    Cache,
    DeviceInfo,
    core_l2_bytes,
    cpu_caches,
    cpu_name,
    device_info,
    free_bytes,
    pci_place,
    smi_id,
)

__all__ = [
    "Cache",
    "DeviceInfo",
    "core_l2_bytes",
    "cpu_caches",
    "cpu_name",
    "device_info",
    "free_bytes",
    "pci_place",
    "smi_id",
]
