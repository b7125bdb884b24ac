"""The memory that a kernel may touch: the elements of tensors and buffers at their own addresses, and nothing between
them; or at others, as far apart as no machine has memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pascal_attn_core.call import AttentionCall
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.fields import MOST_STRIDE
from pascal_attn_core.fused.launch.plan import Plan
from pascal_attn_core.fused.trust import verify

Words = np.ndarray  # uint32
_UNITS = {1: np.uint8, 2: np.uint16}


class OutsideOfMemory(AssertionError):
    """An address that belongs to none of the tensors."""


class Placed(NamedTuple):
    """A tensor as a kernel sees it: at another address, with other strides, in elements."""

    tensor: Tensor
    address: int
    strides: tuple[int, ...]


class Memory:
    """
    Args:
        tensors: whose elements may be read and written.
    """

    def __init__(self, tensors: Iterable[Tensor | Placed]):
        placed = (t if isinstance(t, Placed) else Placed(t, t.data_ptr(), t.stride()) for t in tensors)
        self._regions = [region for each in placed if each.tensor.numel() for region in _regions(each)]
        self._kept: list[object] = []
        self._index()

    def _index(self) -> None:
        """Regions in their order, those that overlap as one: where they start and end, and how far from there what is
        in them really lies; all of it as words from the first one on."""
        merged: list[list[int]] = []
        for start, end, distance in sorted(self._regions):
            if merged and start < merged[-1][1]:
                assert merged[-1][2] == distance
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end, distance])
        self._starts, self._ends, self._distances = np.array(merged, np.int64).reshape(-1, 3).T
        first, end = (
            (min(self._starts + self._distances) // 4 * 4, max(self._ends + self._distances)) if merged else (0, 0)
        )
        self._first = int(first)
        words = ctypes.c_uint32 * -(-(int(end) - self._first) // 4)
        self._words = np.ctypeslib.as_array(words.from_address(self._first)) if merged else np.zeros(0, np.uint32)

    def put(self, content: bytes) -> int:
        """The address of a copy."""
        buffer = ctypes.create_string_buffer(content, len(content))
        self._kept.append(buffer)
        address = ctypes.addressof(buffer)
        self._regions.append((address, address + len(content), 0))
        self._index()
        return address

    def read(self, addresses: np.ndarray, size: int) -> Words:
        """``[lanes, size / 4]`` from ``addresses``, uint64 ``[lanes]``; of 1 or 2 bytes a word each."""
        cells, at = self._places(addresses, size)
        return cells[at].view(_UNITS.get(size, np.uint32)).astype(np.uint32, copy=False)

    def write(self, addresses: np.ndarray, words: Words, size: int) -> None:
        """``words``: as :meth:`read` gives them; of 1 or 2 bytes the lowest ones."""
        cells, at = self._places(addresses, size)
        cells[at] = np.ascontiguousarray(words.astype(_UNITS.get(size, np.uint32))).view(cells.dtype)

    def _places(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """All memory in units of 1, 2 or 4 bytes, and ``[lanes, units]`` which of them these are."""
        addresses = addresses.astype(np.int64)
        region = np.searchsorted(self._starts, addresses, "right") - 1
        is_inside = (region >= 0) & (addresses + size <= self._ends[region])
        if not is_inside.all():
            some = ", ".join(hex(a) for a in addresses[~is_inside][:4])
            raise OutsideOfMemory(f"{size} bytes at {some}")
        at = addresses + self._distances[region] - self._first
        unit = min(size, 4)
        if np.bitwise_or.reduce(at) & unit - 1:  # AMD's cards allow it
            unit = 1
        return self._words.view(_UNITS.get(unit, np.uint32)), at[:, None] // unit + np.arange(size // unit)


def _regions(placed: Placed) -> Iterable[tuple[int, int, int]]:
    """(start, end, how far from there it really lies) of runs of elements that follow one another."""
    tensor, address, strides = placed
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    count = 1
    while axes and strides[axes[-1]] == tensor.stride(axes[-1]) == count:
        count *= tensor.shape[axes.pop()]
    size = tensor.element_size()
    starts, own = np.array([address]), np.array([tensor.data_ptr()])
    for axis in axes:
        places = np.arange(tensor.shape[axis]) * size
        starts = np.add.outer(starts, places * strides[axis]).ravel()
        own = np.add.outer(own, places * tensor.stride(axis)).ravel()
    return zip(starts.tolist(), (starts + count * size).tolist(), (own - starts).tolist())


# A parameter that is an address, and those that are its strides. Strides are far beyond 2^31 bytes, with bits in each
# half word; those of tokens, which kernels multiply in 32 bits within a tile, are as large as they take.
_STRIDED = {name: [f"{name}{axis}" for axis in "bhs"] for name in ("q", "k", "v", "o", "g", "dq", "dk", "dv", "x")}
_STRIDED |= {"mask": ["mb", "mh", "mq"], "lse": ["lb", "lh"], "log_sum": ["lb", "lh"]}
_FAR = 0x3_0900_A5C3_2000, 0x25_9B57_1000, MOST_STRIDE - 64


def far(launch: Launch) -> Launch:
    """The launch with its tensors far apart, and so are the tokens, heads and batch elements of each."""
    params, keep = type(launch.params).from_buffer_copy(launch.params), list(launch.keep)
    for n, (name, fields) in enumerate(_STRIDED.items(), 1):
        address = getattr(params, name, None)
        if not address:
            continue
        if name in ("lse", "log_sum") and hasattr(params, "delta"):  # which kernels of gradients read without strides
            continue
        fields = fields if hasattr(params, fields[0]) else ["row_stride"]
        if not hasattr(params, fields[0]):
            continue
        which = next(i for i, t in enumerate(launch.keep) if t.data_ptr() == address and t.numel())
        tensor, strides = launch.keep[which], list(launch.keep[which].stride())
        for axis, (field, stride) in enumerate(zip(fields, _FAR[-len(fields) :])):
            if tensor.shape[axis] > 1 and strides[axis]:
                strides[axis] = stride
                setattr(params, field, stride)
        keep[which] = Placed(tensor, (n << 54) + 0xFFFFF000, tuple(strides))
        setattr(params, name, keep[which].address)
    return launch._replace(params=params, keep=tuple(keep))


@contextmanager
def lse_too() -> Iterator[list[Tensor]]:
    """Within it the check of a kernel's first answers asks forward kernels for lse as well; gives lse of each call,
    float32 ``[*batch, Hq, L]``, NaN until a kernel writes it."""
    found: list[Tensor] = []

    def launches(
        call: AttentionCall, plan: Plan, out: Tensor, original: Callable[..., list[Launch]] = verify.forward_launches
    ) -> list[Launch]:
        found.append(torch.full(out.shape[:-1], torch.nan))
        return original(call, plan, out, found[-1], torch.empty_like(found[-1]) if call.has_bias else None)

    with mock.patch.object(verify, "forward_launches", launches):
        yield found
