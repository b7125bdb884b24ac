"""Errors that say that memory was short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory
# Lower case. A handle of cuBLAS or cuDNN that cannot be made is what a full card shows first.
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "allocate memory",
    "alloc_failed",
    "allocation_failed",
    "memory_error",
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
)


def with_room(work: Callable[[], Result]) -> Result:
    """The result of ``work()``. Where memory was short it is called once more, after torch has given back to the driver
    what it holds unused: other libraries ask there for theirs."""
    with suppress_out_of_memory():
        return work()
    torch.cuda.empty_cache()
    return work()


@contextmanager
def suppress_out_of_memory() -> Iterator[None]:
    """An error that says that memory was short ends the block, no more."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short: torch's own, Python's, the driver's, or that of a library for which
    there was no workspace."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return getattr(error, "error_code", None) == _OUT_OF_MEMORY or any(words in text for words in _NO_MEMORY)
