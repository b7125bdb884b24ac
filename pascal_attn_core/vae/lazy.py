"""Tensors that are computed when they are read, a range of one dimension at a time.

Each :class:`Lazy` knows which ranges of its inputs a range of its own needs (``wants``) and how to compute it from them
(``compute``). Nothing else decides what a band is: a convolution wants some rows more than it gives, an upsampling
fewer, a padding has edges that come from nowhere.

Ranges are ``(dim, low, high)`` in elements of the tensor that is read. The range of all elements of dimension 0 stands
for the whole tensor and can always be read; others where :meth:`Lazy.granule` is not 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import Unsupported
from ..observe.memory import leaves, mapped

if TYPE_CHECKING:
    from .store import Value

aten = torch.ops.aten
_SMALL = 1 << 16  # elements of a tensor that is copied when it is recorded, since its memory may be used again
Versions = tuple[tuple[Tensor, int], ...]
Dims = Sequence[int | None]  # which dimension of the input each one of a result is; None = it must not be cut
Memo = dict[tuple[int, int, int, int], Tensor]


class NotInBands(Unsupported):
    """This model does something that cannot be followed in bands; the message says what."""


class Want(NamedTuple):
    """A range of an input that a node reads."""

    node: Lazy
    dim: int
    low: int
    high: int


class Lazy:
    """A tensor that is computed when it is read; ``like`` is a tensor on ``meta`` of its shape and dtype."""

    #: it costs more than to read it again: to be computed once
    is_heavy = False
    #: what it returns is new memory of its own
    is_fresh = True
    #: although it mostly is new memory, a range may be a view of an input
    may_alias = False
    #: attributes that are needed only until it has been computed
    arguments: tuple[str, ...] = ()
    #: ordinary tensors that it is computed from, and their versions
    given: Versions = ()

    def __init__(self, like: Tensor, inputs: Sequence[Lazy] = ()):
        self.like = like
        self.inputs = tuple(inputs)
        self.value: Value | None = None  # where it lies once it has been computed and kept
        self.readers = 0  # how many others were made from it
        # how many nodes a reading goes through, those that are read in several places several times
        self.steps: int = 1 + sum(0 if node.value is not None else node.steps for node in self.inputs)
        for node in self.inputs:
            node.readers += 1

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def nbytes(self) -> int:
        return self.like.numel() * self.like.element_size()

    def size(self, dim: int) -> int:
        return self.like.shape[dim] if self.like.dim() else 1

    def granule(self, dim: int) -> int:
        """Ranges along ``dim`` may begin and end at multiples of this; 0 = it can only be read as a whole."""
        return 1 if self.value is not None else self.own_granule(dim)

    def own_granule(self, dim: int) -> int:
        raise NotImplementedError

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        """The ranges of the inputs that this range is computed from."""
        raise NotImplementedError

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        """This range, from the pieces that :meth:`wants` asked for, on their device."""
        raise NotImplementedError

    def scratch(self, given: int, made: int) -> int:
        """Bytes that :meth:`compute` takes besides what it is given and what it makes."""
        return 0

    def is_whole(self, dim: int, low: int, high: int) -> bool:
        return dim == 0 and low == 0 and high == self.size(0)

    def whole(self) -> Want:
        return Want(self, 0, 0, self.size(0))

    def shape_of(self, dim: int, low: int, high: int) -> list[int]:
        return [high - low if each == dim else size for each, size in enumerate(self.shape)]

    def read(self, dim: int, low: int, high: int, memo: Memo) -> Tensor:
        """Elements ``low`` to ``high`` of dimension ``dim``, on the device of the run."""
        if self.value is not None:
            return self.value.read(dim, low, high)
        key = (id(self), dim, low, high)
        if key in memo:
            return memo[key]
        pieces = [want.node.read(*want[1:], memo) for want in self.wants(dim, low, high)]
        piece = self.compute(pieces, dim, low, high)
        if self.readers > 1:
            memo[key] = piece
        return piece

    def cost(self, dim: int, low: int, high: int) -> tuple[int, int]:
        """(most bytes alive while this range is read, bytes of the result that are new memory)."""
        if self.value is not None:
            held = self.value.read_bytes(dim, low, high)
            return held, held
        held = peak = 0
        for want in self.wants(dim, low, high):
            most, kept = want.node.cost(*want[1:])
            peak = max(peak, held + most)
            held += kept
        made = self.nbytes // max(self.size(dim), 1) * (high - low) if self.is_fresh else 0
        peak = max(peak, held + made + self.scratch(held, made))
        return peak, made if self.is_fresh else held

    def leaves(self, dim: int, low: int, high: int) -> list[tuple[Value, int, int, int]]:
        """The ranges of kept values that reading this range reads."""
        if self.value is not None:
            return [(self.value, dim, low, high)]
        return [leaf for want in self.wants(dim, low, high) for leaf in want.node.leaves(*want[1:])]

    def keep(self, value: Value) -> None:
        """Read the node from ``value`` from now on: it has been computed."""
        self.value = value
        self.inputs = self.given = ()
        for name in self.arguments:
            setattr(self, name, None)

    def check_given(self) -> None:
        """Raise NotInBands if a tensor that a reading of it needs has been written to since the model used it."""
        if self.value is None:
            if any(tensor._version != version for tensor, version in self.given):
                raise NotInBands("a weight or another tensor is changed in place while the VAE runs")
            for node in self.inputs:
                node.check_given()

    @property
    def is_pending(self) -> bool:
        """Whether heavy work is still to be done to read it."""
        return self.value is None and (self.is_heavy or any(node.is_pending for node in self.inputs))

    def leaf_bytes(self) -> int:
        """Bytes of all kept values that a reading of all of it reads."""
        return self.nbytes if self.value is not None else sum(node.leaf_bytes() for node in self.inputs)


class Known(Lazy):
    """A value from the start."""

    is_fresh = False

    def __init__(self, like: Tensor, value: Value):
        super().__init__(like)
        self.value = value


class Filled(Lazy):
    """A tensor filled with one number."""

    def __init__(self, like: Tensor, number: float, device: torch.device):
        super().__init__(like)
        self.number, self.device = number, device

    def own_granule(self, dim: int) -> int:
        return 1

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        return []

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        return torch.full(self.shape_of(dim, low, high), self.number, dtype=self.like.dtype, device=self.device)


def captured(args: Any) -> tuple[Any, Versions]:
    """(the arguments as they are now, for an operator that is computed later; the versions of the tensors among them
    that are not copied). Of weights and large tensors the memory is kept: a host may give a parameter another one as
    soon as the layer has been called."""
    versions = []

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.numel() <= _SMALL and not isinstance(leaf, nn.Parameter):
            return leaf.clone()
        if not leaf.is_inference():  # those have no version
            versions.append((leaf, leaf._version))
        return leaf.detach()

    return mapped(keep, args), tuple(versions)


class Aligned(Lazy):
    """A tensor of which a range is computed from the same range of one dimension of each input."""

    #: the dimension in which it is another range; -1 = none
    along = -1

    def dim_of(self, tensor: Any, dim: int) -> int | None:
        """The dimension of an input that belongs to one of the result; None = it is read whole."""
        return dim

    def own_granule(self, dim: int) -> int:
        found = [node.granule(own) for node in self.inputs if (own := self.dim_of(node, dim)) is not None]
        unit = 0 if 0 in found else math.lcm(*found)
        return unit if dim != self.along else int(unit == 1)

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        if self.is_whole(dim, low, high):
            return [node.whole() for node in self.inputs]
        places = [self.dim_of(node, dim) for node in self.inputs]
        return [node.whole() if own is None else Want(node, own, low, high) for node, own in zip(self.inputs, places)]


class Applied(Aligned):
    """The result of an operator, with its arguments."""

    arguments = ("args", "kwargs")

    def __init__(self, like: Tensor, func: Any, args: tuple, kwargs: dict[str, Any]):
        nodes = {id(leaf): leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Lazy)}
        super().__init__(like, list(nodes.values()))
        self.func = func
        (self.args, self.kwargs), self.given = captured((args, kwargs))

    def with_pieces(self, pieces: Sequence[Tensor], tree: Any) -> Any:
        """The arguments with each node replaced by its piece."""
        by_node = {id(node): piece for node, piece in zip(self.inputs, pieces)}
        return mapped(lambda leaf: by_node.get(id(leaf), leaf) if isinstance(leaf, Lazy) else leaf, tree)


class Pointwise(Applied):
    """An operator that computes each element from the elements at the same place, with broadcasting."""

    def dim_of(self, tensor: Any, dim: int) -> int | None:
        own = dim - (self.like.dim() - len(tensor.shape))
        return own if own >= 0 and tensor.shape[own] == self.size(dim) else None

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and self.like.dim() and (own := self.dim_of(leaf, dim)) is not None:
                return leaf.narrow(own, low, high - low)
            return leaf

        args, kwargs = self.with_pieces(pieces, mapped(cut, (self.args, self.kwargs)))
        func, first = self.func, self.inputs[0]
        is_alike = self.args[0] is first and (first.shape, first.like.dtype) == (self.shape, self.like.dtype)
        if is_alike and first.value is None and first.readers == 1 and first.is_fresh and not first.may_alias:
            func = _in_place(func) or func  # its piece is new memory that nothing else reads
        return func(*args, **kwargs)


@functools.cache
def _in_place(func: Any) -> Any:
    """The variant of an operator that writes into its first argument, None where there is none."""
    packet = getattr(aten, func._schema.name.partition("::")[2] + "_", None)
    name = func._overloadname
    return getattr(packet, name, None) if packet is not None and name in packet.overloads() else None


class Rowwise(Applied):
    """An operator that treats ranges of some dimensions, see :data:`Dims`, independently: a softmax, a linear layer, a
    sum. Nodes other than its first are read whole, whatever is read of the result."""

    def __init__(
        self, like: Tensor, func: Any, args: tuple, kwargs: dict[str, Any], dims: Dims, *, heavy: bool = False
    ):
        super().__init__(like, func, args, kwargs)
        self.dims, self.is_heavy = dims, heavy

    def dim_of(self, tensor: Any, dim: int) -> int | None:
        return self.dims[dim] if tensor is self.inputs[0] else None

    def own_granule(self, dim: int) -> int:
        return 0 if self.dims[dim] is None else super().own_granule(dim)

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        args, kwargs = self.with_pieces(pieces, (self.args, self.kwargs))
        out = self.func(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


class Permuted(Rowwise):
    """Dimensions in another order."""

    is_fresh = False

    def __init__(self, node: Lazy, dims: Sequence[int]):
        places = [dim % node.like.dim() for dim in dims]
        super().__init__(node.like.permute(places), Tensor.permute, (node, places), {}, places)


class Viewed(Lazy):
    """A view of all elements, in their order, under another shape."""

    is_fresh = False

    def __init__(self, node: Lazy, shape: Sequence[int]):
        super().__init__(node.like.contiguous().view(*shape), (node,))

    def _source(self, dim: int) -> tuple[int, int, int] | None:
        """(dimension of the input, its elements per index, own elements per index) where a range is one there."""
        outer, inner = math.prod(self.shape[:dim]), math.prod(self.shape[dim:])
        if not inner:
            return None
        shape = self.inputs[0].shape
        for own in range(len(shape)):
            if shape[own] > 1 and math.prod(shape[:own]) == outer and math.prod(shape[own:]) == inner:
                return own, inner // shape[own], inner // self.shape[dim]
        return None

    def own_granule(self, dim: int) -> int:
        source = self._source(dim)
        if source is None:
            return 0
        own, theirs, ours = source
        unit = self.inputs[0].granule(own) * theirs
        return math.lcm(unit, ours) // ours if unit else 0

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        node = self.inputs[0]
        source = None if self.is_whole(dim, low, high) else self._source(dim)
        if source is None:
            return [node.whole()]
        own, theirs, ours = source
        return [Want(node, own, low * ours // theirs, high * ours // theirs)]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        return pieces[0].reshape(self.shape_of(dim, low, high))


class Narrowed(Aligned):
    """Every ``step``-th element of a dimension from ``start`` on."""

    is_fresh = False

    def __init__(self, node: Lazy, along: int, start: int, stop: int, step: int = 1):
        super().__init__(node.like[tuple([slice(None)] * along + [slice(start, stop, step)])], (node,))
        self.along, self.start, self.step = along, start, step

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        if dim != self.along or self.inputs[0].granule(dim) != 1:
            return super().wants(dim, low, high)
        return [Want(self.inputs[0], dim, self.start + low * self.step, self.start + (high - 1) * self.step + 1)]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        start, count = self.start, self.size(self.along)
        if dim == self.along and self.inputs[0].granule(dim) == 1:
            start, count = 0, high - low
        stop = start + (count - 1) * self.step + 1
        return pieces[0][tuple([slice(None)] * self.along + [slice(start, stop, self.step)])]


class Flipped(Aligned):
    """The elements of one dimension in the opposite order."""

    def __init__(self, node: Lazy, along: int):
        super().__init__(node.like, (node,))
        self.along = along

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        if dim != self.along:
            return super().wants(dim, low, high)
        return [Want(self.inputs[0], dim, self.size(dim) - high, self.size(dim) - low)]

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        return pieces[0].flip(self.along)


class Expanded(Aligned):
    """Dimensions of one element repeated."""

    is_fresh = False

    def __init__(self, node: Lazy, shape: Sequence[int]):
        super().__init__(node.like.expand(*shape), (node,))

    def dim_of(self, tensor: Any, dim: int) -> int | None:
        own = dim - (self.like.dim() - tensor.like.dim())
        return own if own >= 0 and tensor.size(own) == self.size(dim) else None

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        return pieces[0].expand(self.shape_of(dim, low, high))


class Joined(Aligned):
    """Tensors one after the other along a dimension."""

    may_alias = True

    def __init__(self, like: Tensor, nodes: Sequence[Lazy], along: int):
        super().__init__(like, nodes)
        self.along = along

    def wants(self, dim: int, low: int, high: int) -> list[Want]:
        if dim != self.along or not all(node.granule(dim) == 1 for node in self.inputs):
            return super().wants(dim, low, high)
        found, start = [], 0
        for node in self.inputs:
            a, b = max(low - start, 0), min(high - start, node.size(dim))
            if a < b:
                found.append(Want(node, dim, a, b))
            start += node.size(dim)
        return found

    def compute(self, pieces: list[Tensor], dim: int, low: int, high: int) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.along)
