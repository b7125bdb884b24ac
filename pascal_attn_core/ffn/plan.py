"""Decides how a feed-forward call runs: whole, or, once tried, in the fewest slices that keep the budget."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..config import check_bools, check_number
from ..machine.device import MIB
from ..machine.out_of_memory import out_of_memory
from ..machine.room import room_of
from ..patching.hosts import is_hooked
from .run import SCALARS, Inputs, NotTokenwise, inputs_of, sliced_is_view
from .state import State
from .trial import Trial, tried

DEFAULT_BUDGET_MIB = 64.0
_MAX_SHARED = 1024
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
    passing: tuple[type[BaseException], ...] = ()  # see tried()
    # What trials found, or reasons against slices, by structure and kind of call: identical blocks need one.
    shared: dict[Any, Trial | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 2), ("num_chunks", 1), ("min_tokens", 2)):
            if getattr(self, name) is not None or name == "min_tokens":
                check_number(name, getattr(self, name), int, least)
        if self.budget_mib is not None:
            check_number("budget_mib", self.budget_mib, float, 0, above=True)
        check_bools(self, "verify", "checkpoint")

    def slices(self, tokens: int) -> int | None:
        """How many slices were asked for; None = as many as the budget needs."""
        return self.num_chunks if self.chunk_tokens is None else math.ceil(tokens / self.chunk_tokens)

    def bytes_on(self, device: torch.device) -> float:
        """What a call on this device may take: the budget, or where none is given, what memory is free."""
        return max(DEFAULT_BUDGET_MIB * MIB, room_of(device)) if self.budget_mib is None else self.budget_mib * MIB


class Slicing(NamedTuple):
    """How calls of one kind run, with a sentence for the report."""

    sizes: tuple[int, ...]  # tokens of each slice; empty = whole
    why: str
    recompute: bool = False  # each slice is checkpointed
    refused: bool = False  # the module does not work token by token, or that could not be tried
    relative: float | None = None  # see Trial; None = not tried, not checked later


@dataclass(eq=False)
class FfnSite:
    """A module under one patch."""

    settings: FfnSettings
    plans: dict[Any, Slicing] = field(default_factory=dict)  # by kind of call
    used: dict[Any, Slicing] = field(default_factory=dict)  # the same, of calls since the report was reset
    refusals: dict[Any, str] = field(default_factory=dict)  # why not in slices, by the mode in which that was found
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


def make_plan(
    fn: Callable[..., Any], module: nn.Module, site: FfnSite, args: tuple, kwargs: dict, *, is_own: bool = True
) -> Slicing:
    """Decide for this kind of call of ``fn``, the module's forward without us. What is found holds for identical
    modules too if ``fn`` is what the module's class defines (``is_own``)."""
    try:
        inputs = inputs_of(args, kwargs)
    except NotTokenwise as reason:
        return Slicing((), str(reason), refused=True)
    if inputs.x.shape[-2] < 2 * _LEAST_TOKENS:
        return Slicing((), "too few tokens for two slices")
    mode = mode_of(inputs, module)
    if mode in site.refusals:
        return Slicing((), site.refusals[mode], refused=True)
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *module.parameters()))
    if wants_grad and not site.settings.checkpoint:
        return Slicing((), "gradients are needed and checkpoint=False")
    if _cannot_decide_now(inputs.x, site.settings):
        return WHOLE
    try:
        trial = _trial(fn, module, site.settings, inputs, wants_grad, (is_own, *mode))
        return _decide(site.settings, inputs, trial, wants_grad)
    except NotTokenwise as reason:
        site.refusals[mode] = str(reason)
        return Slicing((), str(reason), refused=True)
    except out_of_memory():
        return WHOLE


def _trial(
    fn: Callable, module: nn.Module, settings: FfnSettings, inputs: Inputs, wants_grad: bool, mode: tuple
) -> Trial | None:
    """The result of a trial of this module or of one like it; None = the number of slices is given, not verified."""
    if settings.verify and any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise NotTokenwise("holds TorchScript, whose state cannot be compared from call to call")
    if not settings.verify and settings.slices(inputs.x.shape[-2]) is not None:
        return None
    is_shared = mode[0] and not any(map(is_hooked, module.modules()))
    sizes = *inputs.x.shape[:-2], inputs.x.shape[-1]
    state = State(module, fn).key() if is_shared and settings.verify else ()
    key = *mode, wants_grad, sizes, inputs.x.device, state
    found = settings.shared.get(key) if is_shared else None
    if found is None:
        try:
            found = tried(fn, module, inputs, verify=settings.verify, wants_grad=wants_grad, passing=settings.passing)
        except NotTokenwise as reason:
            found = str(reason)
        if is_shared and len(settings.shared) < _MAX_SHARED:
            settings.shared[key] = found
    if isinstance(found, str):
        raise NotTokenwise(found)
    return found


def mode_of(inputs: Inputs, module: nn.Module) -> tuple:
    """The kind of call for which a refusal holds."""
    x = inputs.x
    return x.dtype, x.dim(), x.device.type, module.training, torch.is_grad_enabled(), len(inputs.tokens)


def refuse(site: FfnSite, inputs: Inputs, module: nn.Module, reason: str) -> None:
    """A later check found what the trial could not see: discard every earlier decision."""
    site.refusals[mode_of(inputs, module)] = reason
    site.settings.shared.clear()


def _decide(settings: FfnSettings, inputs: Inputs, trial: Trial | None, wants_grad: bool) -> Slicing:
    tokens = inputs.x.shape[-2]
    count = settings.slices(tokens)
    if trial is None:
        return _sliced(tokens, count or 1, wants_grad, "not verified, as asked")
    extra = trial.extra_bytes(tokens)
    if count is None:
        if extra <= settings.bytes_on(inputs.x.device):
            return Slicing((), f"fits the budget: {extra / MIB:.1f} MiB besides input and output")
        count = _fewest_slices(inputs, trial, settings, wants_grad)
    plan = _sliced(tokens, count, wants_grad, f"{extra / MIB:.1f} MiB whole")
    return plan._replace(relative=trial.relative) if settings.verify and plan.sizes else plan


def _sliced(tokens: int, count: int, recompute: bool, note: str) -> Slicing:
    """``count`` slices whose lengths differ by one at most; a slice has two tokens at least."""
    count = min(count, tokens // _LEAST_TOKENS)
    if count < 2:
        return Slicing((), "one slice is enough")
    short, longer = divmod(tokens, count)
    sizes = (short + 1,) * longer + (short,) * (count - longer)
    return Slicing(sizes, f"{count} slices of {sizes[0]} tokens ({note})", recompute=recompute)


def _fewest_slices(inputs: Inputs, trial: Trial, settings: FfnSettings, wants_grad: bool) -> int:
    tokens = inputs.x.shape[-2]
    budget = settings.bytes_on(inputs.x.device) / (
        2 if wants_grad else 1
    )  # the backward pass keeps gradients beside them
    least = min(tokens // 2, max(2, math.ceil(_LEAST_ROWS * tokens * inputs.x.shape[-1] / inputs.x.numel())))
    per_token = trial.token_bytes
    if not sliced_is_view(inputs):
        per_token += sum(t.numel() // t.shape[-2] * t.element_size() for t in inputs.tokens.values())
    return math.ceil(tokens / max(least, int((budget - trial.constant_bytes) / per_token)))


def _cannot_decide_now(x: Tensor, settings: FfnSettings) -> bool:
    """Nothing can be tried without values, or while a CUDA graph is being captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if x.is_nested or isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return settings.verify and x.is_meta
