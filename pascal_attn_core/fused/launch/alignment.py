"""Which rows of tensors the kernels can read as they lie."""

from __future__ import annotations

from torch import Tensor

_STRIDE = 1 << 26  # offsets within a staged chunk are 32-bit numbers


def rows_are_readable(tensor: Tensor, elements: int = 4) -> bool:
    """Whether the kernels can read a tensor as it lies, so many elements at a time."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % (elements * tensor.element_size()):
        return False
    innermost = 0
    for size, stride in zip(tensor.shape, strides):
        if size > 1:
            if stride % elements:
                return False
            innermost = stride
    return innermost < _STRIDE
