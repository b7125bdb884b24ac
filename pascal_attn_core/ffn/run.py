"""Runs a function over slices of its tokens; decides which of its arguments carry tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..config import Unsupported


class NotTokenwise(Unsupported):
    """The module cannot be run over slices of its tokens; the message says why."""


SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Inputs(NamedTuple):
    """The arguments of one call, those that carry tokens apart.

    Attributes:
        tokens: tensors [..., T, *] by place: an index into ``args`` or a name in ``kwargs``; the first is the input.
        args, kwargs: all arguments; those at the places of ``tokens`` are replaced.
    """

    tokens: dict[int | str, Tensor]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def x(self) -> Tensor:
        return next(iter(self.tokens.values()))

    def call(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """``fn`` with ``tensors`` in place of the tensors that carry tokens."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, tensor in zip(self.tokens, tensors):
            if isinstance(place, int):
                args[place] = tensor
            else:
                kwargs[place] = tensor
        return fn(*args, **kwargs)


def inputs_of(args: tuple, kwargs: dict[str, Any]) -> Inputs:
    """Which arguments carry tokens: the first, and each further tensor with as many entries in dimension -2.

    Others are the same for every slice.

    Raises:
        NotTokenwise: an argument that may hide tensors.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    x = places[0][1]
    tokens = {}
    for place, value in places:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):
                raise NotTokenwise(f"argument {place!r} is a {type(value).__name__}, not a plain tensor")
            if value is x or (value.dim() >= 2 and value.shape[-2] == x.shape[-2]):
                if type(value) is not Tensor:
                    what = "a parameter with a token dimension"
                    raise NotTokenwise(f"argument {place!r} is {what}, which cannot be sliced")
                tokens[place] = value
        elif not all(isinstance(leaf, SCALARS) for leaf in tree_leaves(value)):
            raise NotTokenwise(f"argument {place!r} is a {type(value).__name__}, which may carry tokens")
    return Inputs(tokens, args, kwargs)


def sliced_is_view(inputs: Inputs) -> bool:
    """Whether slices need no copy: nothing but ones before the token dimension."""
    return all(tensor.is_contiguous() and tensor.shape[:-2].numel() == 1 for tensor in inputs.tokens.values())


def _as_whole(part: Tensor) -> Tensor:
    """A slice laid out as a whole tensor of its shape. That of a batch is copied: each layer that reads it would do so
    otherwise. That of a single element is a view, whose first stride would be that of all tokens: then a layer without
    bias, whose weight needs no gradient, takes another matrix product than on the whole."""
    part = part if part.is_contiguous() else part.clone()
    return part.view(part.shape)


OfSlice = Callable[[list[Tensor], int], Any]
"""The result for these parts of the tensors that carry tokens, the first of them at the second argument."""


def run_sliced(fn: OfSlice, inputs: Inputs, sizes: Sequence[int]) -> Tensor:
    """``fn`` over slices of these lengths; [..., T, C] -> [..., T, D]."""
    x, out, start = inputs.x, None, 0
    for size in sizes:
        part = fn([_as_whole(tensor.narrow(-2, start, size)) for tensor in inputs.tokens.values()], start)
        _check(part, (*x.shape[:-2], size))
        if out is None:
            out = part.new_empty((*x.shape[:-1], part.shape[-1]))
        out.narrow(-2, start, size).copy_(part)
        del part  # before the next one is made
        start += size
    assert out is not None
    return out


def run_checkpointed(fn: OfSlice, inputs: Inputs, sizes: Sequence[int]) -> Tensor:
    """Run ``fn`` over slices with gradients: each slice saves only its input and is recomputed in the backward pass."""

    def of_slice(start: int, *parts: Tensor) -> Any:
        return fn([_as_whole(part) for part in parts], start)

    slices = zip(*(tensor.split(list(sizes), dim=-2) for tensor in inputs.tokens.values()))
    outs, start = [], 0
    for size, parts in zip(sizes, slices):
        out = checkpoint(of_slice, start, *parts, use_reentrant=False, preserve_rng_state=False)
        _check(out, (*inputs.x.shape[:-2], size))
        if out.requires_grad:
            out.register_hook(Tensor.contiguous)  # backward passes may take views of it
        outs.append(out)
        start += size
    return torch.cat(outs, dim=-2)


def _check(part: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(part, Tensor) or part.shape[:-1] != shape:
        got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise RuntimeError(f"a slice of tokens {list(shape)} must give one tensor with one output per token, got {got}")
