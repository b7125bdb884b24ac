"""The memory that a kernel may touch: tensors and buffers at their own addresses, and nothing between them."""

import ctypes
from collections.abc import Iterable

import numpy as np
from torch import Tensor

Bytes = np.ndarray  # uint8


class OutsideOfMemory(AssertionError):
    """An address that belongs to none of the tensors."""


class Memory:
    """
    Args:
        tensors: what may be read and written, from the first element of each to its last one.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._regions: dict[int, Bytes] = {}
        for tensor in tensors:
            if tensor.numel():
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                self._add(tensor.data_ptr(), (last + 1) * tensor.element_size())
        self._kept: list[object] = []

    def _add(self, address: int, size: int) -> None:
        if size > len(self._regions.get(address, ())):
            self._regions[address] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def put(self, content: bytes) -> int:
        """The address of a copy."""
        buffer = ctypes.create_string_buffer(content, len(content))
        self._kept.append(buffer)
        self._add(ctypes.addressof(buffer), len(content))
        return ctypes.addressof(buffer)

    def read(self, addresses: np.ndarray, size: int) -> Bytes:
        """``[lanes, size]`` from ``addresses``, uint64 ``[lanes]``."""
        found = np.empty((len(addresses), size), np.uint8)
        for lanes, region, at in self._places(addresses, size):
            found[lanes] = region[at[:, None] + np.arange(size)]
        return found

    def write(self, addresses: np.ndarray, content: Bytes) -> None:
        """``content``: ``[lanes, size]``."""
        size = content.shape[1]
        for lanes, region, at in self._places(addresses, size):
            region[at[:, None] + np.arange(size)] = content[lanes]

    def _places(self, addresses: np.ndarray, size: int) -> Iterable[tuple[np.ndarray | slice, Bytes, np.ndarray]]:
        """(lanes, region, offsets in it), until every lane has one."""
        if len(addresses):  # most often they are all in one region
            first, last = int(addresses.min()), int(addresses.max())
            for start, region in self._regions.items():
                if start <= first and last + size <= start + len(region):
                    yield slice(None), region, (addresses - np.uint64(start)).astype(np.int64)
                    return
        left = np.arange(len(addresses))
        for start, region in self._regions.items():
            at = (addresses[left] - np.uint64(start)).astype(np.int64)
            inside = (at >= 0) & (at + size <= len(region))
            if inside.any():
                yield left[inside], region, at[inside]
                left = left[~inside]
            if not len(left):
                return
        raise OutsideOfMemory(f"{size} bytes at {', '.join(hex(a) for a in addresses[left[:4]])}")
