"""Facts about a device: the public names of :mod:`.machine.device`."""

from .machine.device import DeviceInfo, cpu_caches, cpu_name, device_info, free_bytes

__all__ = ["DeviceInfo", "cpu_caches", "cpu_name", "device_info", "free_bytes"]
