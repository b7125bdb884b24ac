"""Tensors that reach over more memory than there is: address space, of which only the touched pages exist."""

import mmap
import sys

import pytest
import torch
from torch import Tensor

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on


def address_space(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor ``[count]`` of zeros."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux, which reserves addresses without memory")
    size = count * dtype.itemsize
    try:
        found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        pytest.skip(f"needs {size >> 30} GiB of addresses: {error}")
    return torch.frombuffer(found, dtype=dtype)
