"""Tensors without data that stand in for those of a call until its operators run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..observe.memory import tensors_in
from .rules import Along

_places: dict[int, tuple[Place, weakref.ref[Tensor]]] = {}  # by address


@dataclass(slots=True, eq=False)
class Place:
    """What a stand-in is to its graph: its number, its shape and strides without data, where the tokens are in it (None
    = it has none), and its value, once the operators have run on all tokens."""

    graph: Any
    number: int
    like: Tensor
    along: Along | None
    value: Tensor | None = None


class StandIn(Tensor):
    """A tensor whose operators have been noted. While the module's code runs its class is torch.Tensor, which code may
    ask for; only the modes of its graph see it then. It gets this class if it outlives the call."""

    @staticmethod
    def of(place: Place, device: Any) -> Tensor:
        like = place.like
        layout = like.shape, like.stride(), like.storage_offset()
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(StandIn, *layout, dtype=like.dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        return _noted(made, place)

    @staticmethod
    def saved(tensor: Tensor) -> Tensor:
        """What autograd saves of a tensor: another one, since a result must not keep itself alive."""
        return tensor.detach() if (place := place_of(tensor)) is None else StandIn.of(place, tensor.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return on_values(func, args, kwargs or {})


def _noted(made: Tensor, place: Place) -> Tensor:
    address = id(made)
    _places[address] = place, weakref.ref(made, lambda _: _places.pop(address, None))
    return made


def place_of(value: Any) -> Place | None:
    return found[0] if (found := _places.get(id(value))) else None


def places_of(graph: Any) -> list[tuple[Place, Tensor]]:
    """The stand-ins of a graph that are in use, those that autograd has saved included."""
    return [
        (place, leaf) for place, ref in list(_places.values()) if place.graph is graph and (leaf := ref()) is not None
    ]


def exchange(leaf: Tensor) -> None:
    """Make a plain tensor of a stand-in that has a value, where that is possible."""
    place = _places.pop(id(leaf))[0]  # a tensor with a weak reference cannot be exchanged
    assert place.value is not None
    try:
        torch.utils.swap_tensors(leaf, place.value.view_as(place.value))
    except RuntimeError:  # autograd has it too
        _noted(leaf, place).__class__ = StandIn


def values_of(tree: Any) -> Any:
    return tree_map(lambda leaf: place.value if (place := place_of(leaf)) else leaf, tree)


def on_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator or a function on the values of stand-ins."""
    found: dict[int, Tensor] = {}
    for leaf in tensors_in((*args, *kwargs.values())):
        if place := place_of(leaf):
            if place.value is None:
                place.graph.catch_up("is used outside the call")
            found[id(place.value)] = leaf
    out = func(*values_of(args), **values_of(kwargs)) if found else func(*args, **kwargs)
    return found.get(id(out), out)  # one that was written to stays the tensor that the code has


def like_of(value: Any) -> Any:
    """An argument without data."""
    if not isinstance(value, Tensor):
        return value
    if (place := place_of(value)) is not None:
        return place.like
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
