"""Launches of the emulation whose tensors lie beside memory that may not be touched: a kernel that reads or writes
outside of one ends its process by SIGSEGV."""

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from pascal_attn_core.fused.launch import Launch

from .emulation import LeftOut, emulate

_PAGE = mmap.PAGESIZE
_ALIGNED = 16  # bytes: the widest load of a kernel


def run(launches: Iterable[Launch], *, behind: bool, mutated: Mapping[str, str | LeftOut | None] | None = None) -> None:
    """Emulates launches with the forbidden page behind the last byte of each tensor that they keep, or before its
    first one; ``mutated``: see :func:`.emulate`."""
    for launch in launches:
        params = type(launch.params).from_buffer_copy(launch.params)
        places = [(begin, _Place(end - begin, begin, behind)) for begin, end in _spans(launch.keep)]
        for begin, place in places:
            ctypes.memmove(place.begin, begin, place.size)
        for name in _pointers(type(params)):
            address = getattr(params, name) or 0
            own = (place.begin - begin for begin, place in places if begin <= address < begin + place.size)
            setattr(params, name, address + next(own, -address))  # 0 for what the launch does not keep
        emulate([launch._replace(params=params)], mutated=mutated)
        for begin, place in places:
            ctypes.memmove(begin, place.begin, place.size)


def _pointers(params: type[ctypes.Structure]) -> Iterator[str]:
    for kind in params.__mro__:
        yield from (name for name, of, *_ in vars(kind).get("_fields_", ()) if of is ctypes.c_void_p)


def _spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """(address, address behind the last byte) of tensors, those that share memory as one."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        if spans and begin < spans[-1][1]:
            begin, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((begin, end))
    return spans


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class _Place:
    """Memory of ``size`` bytes at ``begin``, beside a page that may not be touched, and aligned as ``like``."""

    def __init__(self, size: int, like: int, behind: bool):
        self.size, pages = size, -(-(size + _ALIGNED) // _PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * _PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, pages + 1):
            if libc.mprotect(ctypes.c_void_p(first + page * _PAGE), ctypes.c_size_t(_PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        aligned = min(_ALIGNED, size & -size)
        if behind:
            begin = first + (pages + 1) * _PAGE - size
            self.begin = begin - (begin - like) % aligned
        else:
            self.begin = first + _PAGE + (like - first) % aligned
