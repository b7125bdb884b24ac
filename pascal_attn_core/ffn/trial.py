"""Whether a module works token by token, f(concat(a, b)) == concat(f(a), f(b)): tried on a few of its own tokens, and
compared with the operators that it would run on all of them; and how much memory a token takes.

The trial sees what the module does to these tokens. What it does only to others, or only later, is found by
:mod:`.recheck`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..machine.out_of_memory import is_out_of_memory
from ..machine.own_thread import made_up_inputs
from ..observe.without_data import WithoutData
from ..patching.hosts import casts_weights, is_hosts
from .probe import probe, probe_gradients
from .run import Inputs, NotTokenwise, slice_of
from .state import State

_TOKENS = 24


class Trial(NamedTuple):
    """The result of a trial: the memory that a call takes besides its input, and how exact its results are."""

    token_bytes: float  # per token, its output included
    constant_bytes: float
    out_bytes: float  # of the output, per token
    relative: float  # how far results may be apart in a re-check, relative to the largest

    def extra_bytes(self, tokens: int) -> float:
        """Memory that a call takes besides input and output."""
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
    """Run ``fn`` on a few tokens of ``inputs``, and on tensors without data of their full length.

    Args:
        verify: False = only the memory is measured, without any data.
        passing: exceptions that say nothing about the module (a host's interrupt): raised as they are.
    Raises:
        NotTokenwise: what keeps the module from being run in slices.
    """
    tokens = inputs.x.shape[-2]
    count = min(_TOKENS, tokens)
    few = count // 2
    with _as_reasons(passing), _undisturbed(module, fn) as settled, uncompiled(module), made_up_inputs():
        with torch.no_grad():
            if verify:
                _followed(fn, inputs, count, with_data=True)  # fills caches
                settled()
            some = _followed(fn, inputs, count, with_data=True) if verify else None
            few_of_them, all_of_them = _followed(fn, inputs, few), _followed(fn, inputs, tokens)
            relative = 0.0
            if some is not None:
                if not some.operators == few_of_them.operators == all_of_them.operators:
                    raise NotTokenwise(f"runs different operators on {tokens} tokens than on a few")
                relative = probe(fn, inputs, count, some.dtypes)
        if verify and wants_grad:
            # A surrounding checkpoint counts what is saved for the backward pass.
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                probe_gradients(fn, module, inputs, count, relative)
    token_bytes = (all_of_them.peak - few_of_them.peak) / (tokens - few)
    constant_bytes = few_of_them.peak - token_bytes * few
    return Trial(token_bytes, constant_bytes, all_of_them.out_bytes / tokens, relative)


@contextlib.contextmanager
def _as_reasons(passing: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Whatever foreign code raises during a trial becomes the reason against slices."""
    as_they_are: tuple[type[BaseException], ...] = (NotTokenwise, *passing)
    try:
        yield
    except as_they_are:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the trial's tensors
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise NotTokenwise(f"cannot be tried on a few of its tokens: {text}") from error


class _Followed(WithoutData):
    """Notes the operators that run with the numbers they are given and the dtypes of their results, and refuses those
    that write to a tensor from before."""

    def __init__(self, *, with_data: bool = False):
        super().__init__()
        self.with_data = with_data
        self.operators: list[tuple] = []
        self.dtypes: set[torch.dtype] = set()
        self.out_bytes = 0
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # storages, by address

    def run_operator(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not _is_hosts_business():
            raise NotTokenwise("reads values of a tensor, on which its path may depend")
        written = _storages(_written(func, args, kwargs))
        if any(storage._cdata not in self._made for storage in written) and not _is_hosts_business():
            raise NotTokenwise("writes to its input, or to a tensor that it keeps between calls")
        out = func(*args, **kwargs) if self.with_data else super().run_operator(func, args, kwargs)
        self.operators.append((str(func), *(arg for arg in args if isinstance(arg, (bool, int, float)))))
        given = {storage._cdata for storage in _storages((args, kwargs))} if "lift" not in str(func) else ()
        for storage in _storages(out):
            if storage._cdata not in given:
                self._made[storage._cdata] = storage
        self.dtypes |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    given = {**dict(zip((argument.name for argument in schema.arguments), args)), **kwargs}
    written = [given.get(argument.name) for argument in schema.arguments if argument.is_write]
    if "batch_norm" in schema.name and any(arg is True for arg in args):  # in training; the schema does not say it
        written += [given.get("running_mean"), given.get("running_var")]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
                yield leaf.untyped_storage()


def _is_hosts_business() -> bool:
    """Whether this is called below code of a host that brings weights to a layer."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if is_hosts(frame.f_globals.get("__name__", "")) or (isinstance(owner, nn.Module) and casts_weights(owner)):
            return True
        frame = frame.f_back
    return False


def _followed(fn: Callable[..., Any], inputs: Inputs, count: int, *, with_data: bool = False) -> _Followed:
    """Run ``fn`` on the first ``count`` tokens, or without data on ``count`` tokens."""
    mode = _Followed(with_data=with_data)
    tensors = inputs.tokens.values()
    if with_data:
        given = [slice_of(tensor.detach(), 0, count).clone() for tensor in tensors]
    else:
        given = [mode.like(tensor, (*tensor.shape[:-2], count, tensor.shape[-1])) for tensor in tensors]
    with mode:
        out = inputs.call(fn, given)
    if not isinstance(out, Tensor):
        raise NotTokenwise(f"returns a {type(out).__name__}, not one tensor")
    if out.dim() != given[0].dim() or out.shape[:-1] != given[0].shape[:-1]:
        raise NotTokenwise(f"turns tokens {list(given[0].shape)} into {list(out.shape)}, not one output per token")
    if any(out.untyped_storage()._cdata == tensor.untyped_storage()._cdata for tensor in given):
        raise NotTokenwise("returns its input")
    mode.out_bytes = out.numel() * out.element_size()
    return mode


@contextlib.contextmanager
def _undisturbed(module: nn.Module, fn: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Puts back what the block changes of the state that ``fn`` refers to, and of random numbers.

    Yields:
        A function after whose call nothing must change: what has been cached by then may stay.
    Raises:
        NotTokenwise: the block changes the state, or draws random numbers; both are undone first.
    """
    states = [State(module, fn)]
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    numpy, caches_casts = sys.modules.get("numpy"), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that is found in the cache does not appear among the operators
    try:
        with torch.random.fork_rng(devices):
            draws = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(legacy=False)
            try:
                yield lambda: states.append(State(module, fn))
            finally:
                has_drawn = not torch.equal(torch.get_rng_state(), draws[0]) or random.getstate() != draws[1]
                random.setstate(draws[1])
                if numpy:
                    has_drawn |= str(numpy.random.get_state(legacy=False)) != str(draws[2])
                    numpy.random.set_state(draws[2])
        changes = states[-1].changes()
        if has_drawn or changes:
            raise NotTokenwise(
                "draws random numbers" if has_drawn else f"changes its own state: {', '.join(changes[:3])}"
            )
    except BaseException:
        states[0].put_back()
        raise
    finally:
        torch.set_autocast_cache_enabled(caches_casts)


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Children compiled by torch.compile run uncompiled: a few tokens must not trigger another compilation."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded if any child is compiled
    if dynamo is None or not any(isinstance(child, dynamo.OptimizedModule) for child in module.modules()):
        yield
        return
    if not hasattr(torch.compiler, "set_stance"):
        raise NotTokenwise("holds a module compiled by torch.compile; torch 2.6 could run it uncompiled in a trial")
    with torch.compiler.set_stance("force_eager"):
        yield


def hooked_children(module: nn.Module) -> list[str]:
    """Names of the modules inside that have a forward or backward hook, which would see slices."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(nn.modules.module, f"_global{kind}", None) for kind in kinds):
        return ["every module (a global hook)"]
    return [
        name for name, child in module.named_modules() if name and any(getattr(child, kind, None) for kind in kinds)
    ]
