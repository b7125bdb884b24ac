"""The kernels that are loaded on a device, and the checks before they are used."""
