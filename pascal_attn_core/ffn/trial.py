"""Whether a module works token by token, f(concat(a, b)) == concat(f(a), f(b)), tried on a few of its own tokens; and
how much memory a token takes.

The trial sees what the module does to these tokens. What it does only to others, or only later, is found by
:mod:`.recheck`.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..machine.own_thread import made_up_inputs
from ..observe.memory import PeakMemory
from .hosts import casts_weights
from .probe import probe, probe_gradients
from .run import Inputs, NotTokenwise, slice_of

_TOKENS = 24
_RANDOM = "the random state"
_SMALL = 1 << 16  # elements of a buffer that is restored
_PLAIN = (bool, int, float, str)


class Trial(NamedTuple):
    """What a trial has found.

    Attributes:
        token_bytes, constant_bytes: a call takes these besides its input: per token, its output included, and once.
        out_bytes: of the output, per token.
        relative: how far results may be apart in a re-check, relative to the largest.
    """

    token_bytes: float
    constant_bytes: float
    out_bytes: float
    relative: float

    def extra_bytes(self, tokens: int) -> float:
        """What a call takes besides input and output."""
        return self.constant_bytes + tokens * (self.token_bytes - self.out_bytes)


def tried(
    fn: Callable[..., Any],
    module: nn.Module,
    inputs: Inputs,
    *,
    verify: bool = True,
    wants_grad: bool = False,
    passing: tuple[type[BaseException], ...] = (),
) -> Trial:
    """Run ``fn`` on a few tokens of ``inputs``.

    Args:
        verify: False = only the memory is measured.
        passing: exceptions that say nothing about the module (a host's interrupt): raised as they are.
    Raises:
        NotTokenwise: what keeps the module from being run in slices.
    """
    count = min(_TOKENS, inputs.x.shape[-2])
    try:
        with _undisturbed(module), uncompiled(module):
            with torch.no_grad():
                few, many = (_measured(fn, inputs, tokens, verify) for tokens in (count // 2, count))
                dtypes = many.dtypes
                if verify and few.operators != many.operators:
                    raise NotTokenwise(f"runs different operators on {count} tokens than on {count // 2}")
                relative = probe(fn, inputs, count, dtypes) if verify else 0.0
            if verify and wants_grad:
                # A surrounding checkpoint counts what is saved for the backward pass.
                with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                    probe_gradients(fn, module, inputs, count, relative)
    except (NotTokenwise, torch.OutOfMemoryError):
        raise
    except passing:
        raise
    except Exception as error:  # whatever foreign code raises during a trial becomes the reason
        traceback.clear_frames(error.__traceback__)  # they hold the trial's tensors
        raise NotTokenwise(f"cannot be tried on a few of its tokens: {_one_line(error)}") from error
    token_bytes = (many.peak_bytes - few.peak_bytes) / (count - count // 2)
    out_bytes = many.out.numel() * many.out.element_size() / count
    return Trial(token_bytes, many.peak_bytes - token_bytes * count, out_bytes, relative)


class _Measured(NamedTuple):
    out: Tensor
    operators: list[str]
    dtypes: set[torch.dtype]
    peak_bytes: int


class _Operators(TorchDispatchMode):
    """The names of the operators that run, and the dtypes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self.dtypes |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def _measured(fn: Callable[..., Any], inputs: Inputs, count: int, verify: bool) -> _Measured:
    """Run ``fn`` on the first ``count`` tokens, of which it must leave the numbers alone."""
    given = [slice_of(tensor.detach(), 0, count).clone() for tensor in inputs.tokens.values()]
    inputs.call(fn, [tensor.clone() for tensor in given])  # fills caches
    with _Operators() as operators:
        out = inputs.call(fn, given)
    if not isinstance(out, Tensor):
        raise NotTokenwise(f"returns a {type(out).__name__}, not one tensor")
    if out.dim() != given[0].dim() or out.shape[:-1] != given[0].shape[:-1]:
        raise NotTokenwise(f"turns tokens {list(given[0].shape)} into {list(out.shape)}, not one output per token")
    before = (slice_of(tensor.detach(), 0, count) for tensor in inputs.tokens.values())
    if verify and not all(
        torch.equal(one.view(torch.uint8), two.contiguous().view(torch.uint8)) for one, two in zip(given, before)
    ):
        raise NotTokenwise("writes to its input")
    if any(out.untyped_storage()._cdata == tensor.untyped_storage()._cdata for tensor in given):
        raise NotTokenwise("returns its input")
    with PeakMemory(inputs.x.device) as peak:
        inputs.call(fn, given)
    return _Measured(out, operators.names, operators.dtypes, peak.peak_bytes)


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """
    Raises:
        NotTokenwise: the block draws random numbers, or changes the module's state: both are undone first.
    """
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    own = [child for child in module.modules() if not casts_weights(child)]
    kept = [(child, _plain_state(child), dict(child._buffers)) for child in own]
    buffers = [buffer for child in own for buffer in child.buffers(recurse=False) if type(buffer) is Tensor]
    numbers = [(buffer, buffer.detach().clone(), buffer.data) for buffer in buffers if buffer.numel() <= _SMALL]
    changed: list[str] = []
    with torch.random.fork_rng(devices), made_up_inputs():
        before, numpy = (torch.get_rng_state(), random.getstate()), sys.modules.get("numpy")
        draws = numpy.random.get_state(legacy=False) if numpy else None
        try:
            yield
        finally:
            if not torch.equal(torch.get_rng_state(), before[0]) or random.getstate() != before[1]:
                changed.append(_RANDOM)
            random.setstate(before[1])
            if numpy and str(numpy.random.get_state(legacy=False)) != str(draws):
                numpy.random.set_state(draws)
                changed.append(_RANDOM)
            for child, state, buffers in kept:
                now = _plain_state(child)
                changed += [key for key in {**state, **now} if state.get(key, kept) != now.get(key, kept)]
                changed += [key for key, buffer in buffers.items() if child._buffers.get(key) is not buffer]
                child.__dict__.update(copy.deepcopy(state))
                child._buffers.update(buffers)
            for buffer, values, data in numbers:
                buffer.data = data
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
                    changed.append("a buffer")
    if _RANDOM in changed:
        raise NotTokenwise("draws random numbers")
    if changed:
        raise NotTokenwise(f"changes its own state: {', '.join(changed[:3])}")


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, words, or lists of them."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, _PLAIN) or (isinstance(value, list) and all(map(is_plain, value)))

    return {key: copy.deepcopy(value) for key, value in module.__dict__.items() if is_plain(value)}


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Children compiled by torch.compile run uncompiled: a few tokens must not trigger another compilation.

    Raises:
        NotTokenwise: this torch cannot switch that.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded if any child is compiled
    if dynamo is None or not any(isinstance(child, dynamo.OptimizedModule) for child in module.modules()):
        yield
        return
    if not hasattr(torch.compiler, "set_stance"):
        raise NotTokenwise("holds a module compiled by torch.compile; torch 2.6 could run it uncompiled in a trial")
    with torch.compiler.set_stance("force_eager"):
        yield


def structure_of(module: nn.Module) -> tuple:
    """Equal for modules that are built alike; another one than before where layers, hooks, modes or plain settings have
    been exchanged."""
    return tuple(
        (
            type(child), child.training, len(child._forward_hooks), len(child._forward_pre_hooks),
            None if child is module else id(child.__dict__.get("forward")),
            *((name, p.shape, p.dtype, p.requires_grad) for name, p in child._parameters.items() if p is not None),
            *(() if casts_weights(child) else _plain_items(child)),
        )
        for child in module.modules()
    )  # fmt: skip


def _plain_items(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in module.__dict__.items() if isinstance(value, _PLAIN))


def hooked_children(module: nn.Module) -> list[str]:
    """Names of the modules inside that have a forward or backward hook, which would see slices."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(nn.modules.module, f"_global{kind}", None) for kind in kinds):
        return ["every module (a global hook)"]
    return [
        name for name, child in module.named_modules() if name and any(getattr(child, kind, None) for kind in kinds)
    ]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
