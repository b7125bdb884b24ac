"""The memory that a kernel may touch: tensors and buffers at their own addresses, and nothing between them."""

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

Words = np.ndarray  # uint32
_CELLS = {1: np.uint8, 2: np.uint16}


class OutsideOfMemory(AssertionError):
    """An address that belongs to none of the tensors."""


class Memory:
    """
    Args:
        tensors: what may be read and written, from the first element of each to its last one.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._regions: dict[int, tuple[int, np.ndarray]] = {}
        for tensor in tensors:
            if tensor.numel():
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                self._add(tensor.data_ptr(), (last + 1) * tensor.element_size())
        self._kept: list[object] = []

    def _add(self, address: int, size: int) -> None:
        """As whole words, so that some of them can be taken at once."""
        end, _ = self._regions.get(address, (0, None))
        if address + size > end:
            first = address // 4 * 4
            words = ctypes.c_uint32 * -(-(address + size - first) // 4)
            self._regions[address] = address + size, np.ctypeslib.as_array(words.from_address(first))

    def put(self, content: bytes) -> int:
        """The address of a copy."""
        buffer = ctypes.create_string_buffer(content, len(content))
        self._kept.append(buffer)
        self._add(ctypes.addressof(buffer), len(content))
        return ctypes.addressof(buffer)

    def read(self, addresses: np.ndarray, size: int) -> Words:
        """``[lanes, size / 4]`` from ``addresses``, uint64 ``[lanes]``; of 1 or 2 bytes a word each."""
        found = np.empty((len(addresses), max(1, size // 4)), np.uint32)
        for lanes, cells, at in self._places(addresses, size):
            found[lanes] = cells[at]
        return found

    def write(self, addresses: np.ndarray, words: Words, size: int) -> None:
        """``words``: as :meth:`read` gives them; of 1 or 2 bytes the lowest ones."""
        for lanes, cells, at in self._places(addresses, size):
            cells[at] = words[lanes].astype(cells.dtype)

    def _places(
        self, addresses: np.ndarray, size: int
    ) -> Iterator[tuple[np.ndarray | slice, np.ndarray, np.ndarray]]:
        """(lanes, a region, which of its words, or bytes or pairs of them, each means), until every lane has one."""
        unit = min(size, 4)
        if np.bitwise_or.reduce(addresses) & np.uint64(unit - 1):
            raise OutsideOfMemory(f"{size} bytes at an address that is no multiple of {unit}")
        following = np.arange(max(1, size // 4))
        left: np.ndarray = np.arange(len(addresses))
        for start, (end, words) in self._regions.items():
            own = addresses[left]
            inside = (own >= np.uint64(start)) & (own <= np.uint64(end - size))
            if inside.any():
                at = (own[inside] - np.uint64(start // 4 * 4)).astype(np.int64) // unit
                lanes = slice(None) if inside.all() and len(left) == len(addresses) else left[inside]
                yield lanes, words.view(_CELLS.get(size, np.uint32)), at[:, None] + following
                left = left[~inside]
            if not len(left):
                return
        raise OutsideOfMemory(f"{size} bytes at {', '.join(hex(a) for a in addresses[left[:4]])}")
