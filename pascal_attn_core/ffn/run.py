"""Runs a function over slices of its tokens; decides which of its arguments carry tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..config import Unsupported


class NotTokenwise(Unsupported):
    """The module cannot be run over slices of its tokens; the message says why."""


def tokens_of(args: tuple, kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
    """The arguments that carry tokens, by index or name: the first, and each further tensor with as many entries in
    dimension -2. Others are the same for every slice, or have an entry for each token where an operator meets them."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    x = places[0][1]
    return {place: v for place, v in places if type(v) is Tensor and v.dim() >= 2 and v.shape[-2] == x.shape[-2]}


def call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], tokens: dict[int | str, Tensor]) -> Any:
    """``fn(*args, **kwargs)`` with ``tokens`` at their places."""
    return fn(*(tokens.get(place, arg) for place, arg in enumerate(args)), **{k: tokens.get(k, kwargs[k]) for k in kwargs})


def run_slices(of_slice: Callable[..., Any], tensors: Sequence[Tensor], sizes: Sequence[int], recompute: bool) -> Tensor:
    """The results of ``of_slice(first token, *parts of tensors)`` for slices of these lengths; [..., T, C] -> [..., T, D].

    Args:
        recompute: with gradients: a slice saves only its input, and is computed again in the backward pass.
    """
    outs, start = [], 0
    for parts in zip(*(tensor.split(list(sizes), dim=-2) for tensor in tensors)):
        shape = parts[0].shape[:-1]
        if recompute:
            out = checkpoint(of_slice, start, *parts, use_reentrant=False, preserve_rng_state=False)
        else:
            out = of_slice(start, *parts)
        if not isinstance(out, Tensor) or out.shape[:-1] != shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise RuntimeError(f"a slice of tokens {list(shape)} must give one tensor with one output per token, got {got}")
        if out.requires_grad:
            out.register_hook(Tensor.contiguous)  # backward passes may take views of it
        if recompute:
            outs.append(out)
        else:
            outs = outs or [out.new_empty((*tensors[0].shape[:-1], out.shape[-1]))]
            outs[0].narrow(-2, start, shape[-1]).copy_(out)
        del out  # before the next one is made
        start += shape[-1]
    return torch.cat(outs, dim=-2) if recompute else outs[0]


def as_whole(part: Tensor) -> Tensor:
    """A slice laid out as a whole tensor of its shape. That of a batch is copied: each layer that reads it would do so
    otherwise. That of a single element is a view, whose first stride would be that of all tokens: then a layer without
    bias, whose weight needs no gradient, takes another matrix product than on the whole."""
    part = part if part.is_contiguous() else part.clone()
    return part.view(part.shape)
