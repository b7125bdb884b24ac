"""The launches of a call once more, for another call of its kind: only the addresses in their parameters differ."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..code.params import Params
from . import Launch

_ALIGNED = 256  # bytes at which each piece of memory of a launch begins
# The fields that hold the addresses of a call's tensors: the first seven in a forward pass.
_FIELDS = ("q", "k", "v", "mask", "o", "lse", "log_sum", "g", "grad_lse", "dq", "dk", "dv")
_ZERO_FIRST = ("arrived",)  # fields whose memory holds zeros when the launches begin


Moves = tuple[tuple[str, int, int], ...]
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor


class Loaded(NamedTuple):
    """A launch, the driver's handle of its function, and the shared memory that is asked for."""

    launch: Launch
    handle: Any
    shared_bytes: int


class Repeat(NamedTuple):
    """Launches that can be queued again.

    Attributes:
        queue: queues them with other parameters.
        loaded: they, as they were queued.
        moves: for each of them (field, place, bytes): the field holds the address at this place, and so many bytes
            more. The places are those of the tensors given to :meth:`of`, of the results, and behind them that of the
            memory between the launches. None: its parameters are those of the launch before.
        results: what the results are like; None = it is not wanted.
        scratch_bytes: memory between the launches; zeroed: the ranges of it that hold zeros at first.
    """

    queue: Callable[[Sequence[Loaded], Sequence[Params]], None]
    loaded: tuple[Loaded, ...]
    moves: tuple[Moves | None, ...]
    results: tuple[Like | None, ...]
    scratch_bytes: int
    zeroed: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        queue: Any, loaded: Sequence[Loaded], given: Sequence[Tensor | None], results: Sequence[Tensor | None]
    ) -> Repeat:
        """Make it from launches that have been queued by ``queue``, and the tensors of their fields, in the order of
        _FIELDS. All other addresses must be those of memory that a launch keeps, and whose content no other code has
        made."""
        tensors: dict[str, Any] = dict(zip(_FIELDS, (*given, *results)))
        places = {name: place for place, name in enumerate(tensors)}
        # Another field may name a result, as the sums of a gradient do that are kept in itself.
        at_results = {t.data_ptr(): name for name, t in zip(_FIELDS[len(given) :], results) if t is not None}
        begins: dict[int, int] = {}  # of scratch tensors, by their address
        before: Any = None
        moves: list[Moves | None] = []
        zeroed, size = [], 0
        for launch, *_ in loaded:
            own = []
            for name, address in addresses(launch.params):
                of = name if name in places else at_results.get(address, name)
                if of in places:
                    own.append((name, places[of], address - tensors[of].data_ptr()))
                    continue
                tensor = next(t for t in launch.keep if 0 <= address - t.data_ptr() < t.nbytes)
                if tensor.data_ptr() not in begins:
                    begins[tensor.data_ptr()], size = size, size + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
                    if name in _ZERO_FIRST:
                        zeroed.append((begins[tensor.data_ptr()], begins[tensor.data_ptr()] + tensor.nbytes))
                own.append((name, len(places), begins[tensor.data_ptr()] + address - tensor.data_ptr()))
            params: Any = launch.params
            is_same = before is not None and type(params) is type(before) and bytes(params) == bytes(before)
            moves.append(None if is_same else tuple(own))
            before = params
        bare = tuple(each._replace(launch=each.launch._replace(keep=())) for each in loaded)
        like = tuple(None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in results)
        return Repeat(queue, bare, tuple(moves), like, size, tuple(zeroed))

    def again(self, given: Sequence[Tensor | None], numbers: Mapping[str, int]) -> list[Tensor | None]:
        """Queue the launches for other tensors, and return their results.

        Args:
            given: tensors like those of :meth:`of`, in their order, the first of them not None.
            numbers: fields that have other values now.
        """
        first: Any = given[0]
        results = [None if r is None else first.new_empty_strided(r[0], r[1], dtype=r[2]) for r in self.results]
        addresses = [0 if t is None else t.data_ptr() for t in (*given, *results)]
        if self.scratch_bytes:
            scratch = first.new_empty(self.scratch_bytes, dtype=torch.uint8)  # lives until all is queued
            addresses.append(scratch.data_ptr())
            for begin, end in self.zeroed:
                scratch[begin:end].zero_()
        found: list[Params] = []
        for each, moves in zip(self.loaded, self.moves):
            if moves is None:  # the same as those of the launch before
                found.append(found[-1])
                continue
            params = type(each.launch.params).from_buffer_copy(each.launch.params)
            for name, place, offset in moves:
                setattr(params, name, addresses[place] + offset)
            for name, number in numbers.items():
                setattr(params, name, number)
            found.append(params)
        self.queue(self.loaded, found)
        return results


class Repeats(dict[Any, Repeat]):
    """The kept launches of calls of one kind. Of a forward pass the key is whether it returns lse and what gradients
    need; of a backward pass, the strides of what it is given."""

    @staticmethod
    def strides(given: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return tuple([None if t is None else t.stride() for t in given])

    def again(
        self, asked: Any, given: Sequence[Tensor | None], numbers: Mapping[str, int] = MappingProxyType({})
    ) -> list[Tensor | None] | None:
        """:meth:`.Repeat.again`, or None where nothing is kept for what is asked."""
        repeat = self.get(asked)
        return None if repeat is None else repeat.again(given, numbers)


def addresses(params: Params) -> list[tuple[str, int]]:
    """The fields of parameters that hold addresses, but for those that hold none."""
    found = ((name, getattr(params, name)) for name in _pointers(type(params)))
    return [(name, address) for name, address in found if address]


@functools.cache
def _pointers(kind: type[Params]) -> tuple[str, ...]:
    fields = [field for each in kind.__mro__ for field in each.__dict__.get("_fields_", ())]
    return tuple(name for name, its, *_ in fields if its is ctypes.c_void_p)
