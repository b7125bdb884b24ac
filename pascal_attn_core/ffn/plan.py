"""Decides how a feed-forward call runs: whole, or in the fewest slices that keep the budget."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..machine.device import MIB

DEFAULT_BUDGET_MIB = 64.0
SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_LEAST_TOKENS = 2  # of a slice
_LEAST_ROWS = 64  # shorter slices cost too much time


@dataclass(eq=False)
class FfnSettings:
    """The options of one patch; shared by all its modules."""

    budget_mib: float | None = None
    chunk_tokens: int | None = None
    num_chunks: int | None = None
    min_tokens: int = 256
    verify: bool = True
    checkpoint: bool = True

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 2), ("num_chunks", 1), ("min_tokens", 2)):
            value = getattr(self, name)
            if value is None and name != "min_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.budget_mib is not None:
            if isinstance(self.budget_mib, bool) or not isinstance(self.budget_mib, (int, float)):
                raise TypeError(f"budget_mib must be a number, got {self.budget_mib!r}")
            if not 0 < self.budget_mib < float("inf"):
                raise ValueError(f"budget_mib must be above 0 and finite, got {self.budget_mib}")
        for name in ("verify", "checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    def slices(self, tokens: int) -> int | None:
        """How many slices were asked for; None = as many as the budget needs."""
        return self.num_chunks if self.chunk_tokens is None else math.ceil(tokens / self.chunk_tokens)

    @property
    def budget_bytes(self) -> float:
        return (DEFAULT_BUDGET_MIB if self.budget_mib is None else self.budget_mib) * MIB


class Slicing(NamedTuple):
    """How calls of one kind run, with a sentence for the report."""

    sizes: tuple[int, ...]  # tokens of each slice; empty = whole
    why: str
    refused: bool = False  # the module does not work token by token, or that is not known


@dataclass(eq=False)
class FfnSite:
    """A module under one patch."""

    settings: FfnSettings
    plans: dict[Any, Slicing] = field(default_factory=dict)  # of calls that run whole, by kind
    used: dict[Any, Slicing] = field(default_factory=dict)  # of all calls since the report was reset
    sliced: weakref.ref[Any] | None = None  # its replacement forward, which holds the module


WHOLE = Slicing((), "")
"""Run whole and decide again next time."""


def kind_of_call(module: nn.Module, x: Tensor, args: tuple, kwargs: dict) -> tuple:
    """Everything a plan may depend on, except the module's attributes; cheap, since every call computes it."""
    device = x.device
    casts = torch._C._is_any_autocast_enabled() and device.type != "meta" and torch.is_autocast_enabled(device.type)
    cast = torch.get_autocast_dtype(device.type) if casts else None
    key = (x.shape, x.stride(), x.dtype, device, module.training, torch.is_grad_enabled(), x.requires_grad, cast)
    if len(args) + len(kwargs) == 1:
        return key
    rest = [*enumerate(args[1:]), *kwargs.items()] if args else list(kwargs.items())[1:]
    return *key, *((place, _kind_of_value(value)) for place, value in rest)


def _kind_of_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    leaves = tree_leaves(value)
    return type(value), tuple((type(leaf), leaf if isinstance(leaf, SCALARS) else None) for leaf in leaves)


def decide(
    settings: FfnSettings, tensors: Sequence[Tensor], needed: tuple[float, int] | None, wants_grad: bool
) -> Slicing:
    """How a call runs.

    Args:
        tensors: [..., T, *], those that carry tokens.
        needed: the bytes that it takes at once besides its input, and those of its output; None = the number of slices
            is given, and nothing is known of the module.
    """
    tokens = tensors[0].shape[-2]
    count = settings.slices(tokens)
    if needed is None:
        return _sliced(tokens, count or 1, "not verified, as asked")
    extra = needed[0] - needed[1]
    if count is None:
        if extra <= settings.budget_bytes:
            return Slicing((), f"fits the budget: {extra / MIB:.1f} MiB besides input and output")
        budget = settings.budget_bytes / (2 if wants_grad else 1)  # the backward pass keeps gradients beside them
        count = _fewest_slices(tensors, needed[0] / tokens, budget)
    return _sliced(tokens, count, f"{extra / MIB:.1f} MiB whole")


def _sliced(tokens: int, count: int, note: str) -> Slicing:
    """``count`` slices whose lengths differ by one at most; a slice has two tokens at least."""
    count = min(count, tokens // _LEAST_TOKENS)
    if count < 2:
        return Slicing((), "one slice is enough")
    short, longer = divmod(tokens, count)
    sizes = (short + 1,) * longer + (short,) * (count - longer)
    return Slicing(sizes, f"{count} slices of {sizes[0]} tokens ({note})")


def _fewest_slices(tensors: Sequence[Tensor], bytes_per_token: float, budget: float) -> int:
    x, tokens = tensors[0], tensors[0].shape[-2]
    least = min(tokens // 2, max(2, math.ceil(_LEAST_ROWS * tokens * x.shape[-1] / x.numel())))
    if not all(tensor.is_contiguous() and tensor.shape[:-2].numel() == 1 for tensor in tensors):  # slices are copied
        bytes_per_token += sum(tensor.nbytes for tensor in tensors) / tokens
    return math.ceil(tokens / max(least, int(budget / bytes_per_token)))


def is_beyond(x: Tensor) -> bool:
    """Tensors whose operators cannot be put off."""
    return x.is_meta or x.is_nested or isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)
