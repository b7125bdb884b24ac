"""How a feed-forward call runs: whole, or in the fewest slices that keep the budget."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import check_number
from ..machine.device import MIB
from ..machine.room import room_of

DEFAULT_BUDGET_MIB = 64.0
_LEAST_TOKENS = 2  # of a slice
_LEAST_ROWS = 64  # shorter slices cost too much time


@dataclass(eq=False)
class FfnSettings:
    """The options of one patch; shared by all its modules."""

    budget_mib: float | None = None
    chunk_tokens: int | None = None
    num_chunks: int | None = None
    min_tokens: int = 256

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 2), ("num_chunks", 1), ("min_tokens", 2)):
            if getattr(self, name) is not None or name == "min_tokens":
                check_number(name, getattr(self, name), int, least)
        if self.budget_mib is not None:
            check_number("budget_mib", self.budget_mib, float, 0, above=True)

    def bytes_on(self, device: torch.device, wants_grad: bool) -> float:
        """Return the bytes that a call on this device may take: the budget, or without one the memory that is free.
        With gradients it is always the same number, since a checkpoint of the user must find the same slices again."""
        room = 0 if wants_grad or self.budget_mib is not None else room_of(device)
        return max(MIB * (DEFAULT_BUDGET_MIB if self.budget_mib is None else self.budget_mib), room)


class Slicing(NamedTuple):
    """How calls of one kind run, with a sentence for the report."""

    sizes: tuple[int, ...]  # tokens of each slice; empty = whole
    why: str
    refused: bool = False  # the module does not work token by token, or that is not known
    fits: float = 0.0  # it is whole as long as these bytes fit the budget


class Proven(NamedTuple):
    """A kind of call that ran in slices, of a module of known code: the state of the module (:func:`.known.state_of`),
    and what :func:`decide` was given."""

    state: list[Any]
    peak: float
    of_output: int


@dataclass(eq=False)
class FfnSite:
    """A module under one patch."""

    settings: FfnSettings
    plans: dict[Any, Slicing] = field(default_factory=dict)  # of calls that run whole, by kind
    proven: dict[Any, Proven] = field(default_factory=dict)  # of calls that need not be noted again, by kind
    used: dict[Any, Slicing] = field(default_factory=dict)  # of all calls since the report was reset
    sliced: weakref.ref[Any] | None = None  # its replacement forward, which holds the module


def kind_of_call(module: nn.Module, x: Tensor, arguments: int) -> tuple:
    """Return the kind of call for which a plan holds. This is cheap, since every call computes it."""
    casts = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
    return x.shape, x.dtype, x.device, casts, arguments, module.training, torch.is_grad_enabled(), x.requires_grad


def decide(settings: FfnSettings, tensors: Sequence[Tensor], peak: float, of_output: int, wants_grad: bool) -> Slicing:
    """How a call on ``tensors`` [..., T, *] runs that takes ``peak`` bytes at once besides them, its output included:
    whole, or in slices whose lengths differ by one at most; a slice has two tokens at least. Gradients take half."""
    x, tokens, extra = tensors[0], tensors[0].shape[-2], peak - of_output
    count = settings.num_chunks if settings.chunk_tokens is None else math.ceil(tokens / settings.chunk_tokens)
    if count is None:
        budget = settings.bytes_on(x.device, wants_grad)
        if extra <= budget:
            return Slicing((), f"fits: whole, {extra / MIB:.1f} MiB besides input and output", fits=extra)
        least = min(tokens // 2, max(2, math.ceil(_LEAST_ROWS * tokens * x.shape[-1] / x.numel())))
        if not all(
            tensor.is_contiguous() and tensor.shape[:-2].numel() == 1 for tensor in tensors
        ):  # slices are copied
            peak += sum(tensor.nbytes for tensor in tensors)
        count = math.ceil(tokens / max(least, int((budget / 2 if wants_grad else budget) * tokens / peak)))
    count = min(count, tokens // _LEAST_TOKENS)
    return _even(tokens, count, extra) if count > 1 else Slicing((), "one slice is enough")


@functools.lru_cache(maxsize=256)
def _even(tokens: int, count: int, extra: float) -> Slicing:
    """So many slices whose lengths differ by one at most; ``extra``: bytes of the whole call."""
    short, longer = divmod(tokens, count)
    sizes = (short + 1,) * longer + (short,) * (count - longer)
    return Slicing(sizes, f"{count} slices of {sizes[0]} tokens ({extra / MIB:.1f} MiB whole)")


def run_slices(of_slice: Callable, tensors: Sequence[Tensor], sizes: Sequence[int], recompute: bool) -> Tensor:
    """Join what ``of_slice(first token, *parts of tensors)`` returns for slices of these lengths; [..., T, C] -> [...,
    T, D].

    Args:
        recompute: with gradients: a slice saves only its input, and is computed again in the backward pass.
    """
    outs: list[Tensor] = []
    start, places = 0, tuple[Tensor, ...]()
    for number, parts in enumerate(zip(*(torch.split_with_sizes(tensor, sizes, -2) for tensor in tensors))):
        if recompute:
            outs.append(checkpoint(of_slice, start, *parts, use_reentrant=False, preserve_rng_state=False))
            if outs[-1].requires_grad:
                outs[-1].register_hook(Tensor.contiguous)  # backward passes may take views of it
        else:
            out = of_slice(start, *parts)
            if not outs:
                outs.append(out.new_empty((*tensors[0].shape[:-1], out.shape[-1])))
                places = torch.split_with_sizes(outs[0], sizes, -2)
            places[number].copy_(out)
            del out  # before the next one is made
        start += sizes[number]
    return torch.cat(outs, dim=-2) if recompute else outs[0]


def as_whole(part: Tensor) -> Tensor:
    """A slice laid out as a whole tensor of its shape. That of a batch is copied: each layer that reads it would do so
    otherwise. That of a single element is a view, whose first stride would be that of all tokens: then a layer without
    bias, whose weight needs no gradient, takes another matrix product than on the whole."""
    part = part if part.is_contiguous() else part.clone()
    return part.view(part.shape)
