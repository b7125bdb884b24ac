"""Leaves a module as it was found: what a trial run changes in it is restored, and reported as a reason."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..own_thread import made_up_inputs
from .hosts import PLAIN, casts_weights, hook_names, is_hooked, settings_of
from .rules import NotTokenwise

_OPAQUE = (Tensor, nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_DEPTH = 2


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restores the Python state of ``module`` and the random state of Python and NumPy.

    Raises:
        NotTokenwise: the block changed any of them; the change is undone first.
    """
    children = [
        (name, child) for name, child in module.named_modules() if not isinstance(child, torch.jit.ScriptModule)
    ]
    before = [(name, _Snapshot(child)) for name, child in children]
    numpy = sys.modules.get("numpy")
    draws, numpy_draws = random.getstate(), numpy.random.get_state() if numpy else None
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that is found in the cache does not appear among the operators
    changed: list[str] = []
    try:
        with made_up_inputs():
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        for name, snapshot in before:
            changed += [f"{name}.{key}".lstrip(".") for key in snapshot.put_back()]
        if random.getstate() != draws:
            random.setstate(draws)
            changed.append("Python's random state")
        if numpy and not _same_draws(numpy.random.get_state(), numpy_draws):
            numpy.random.set_state(numpy_draws)
            changed.append("NumPy's random state")
    if changed:
        raise NotTokenwise(f"changes its own state: {', '.join(changed[:3])}")


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Children compiled by torch.compile run uncompiled: compiled code cannot be followed, and a few tokens must not
    trigger another compilation.

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


@contextlib.contextmanager
def announced(layers: list[nn.Module], running: list[int]) -> Iterator[None]:
    """While one of ``layers`` runs, its number is the last in ``running``."""
    forwards = [layer.__dict__.get("forward") for layer in layers]

    def announcing(number: int, forward: Any) -> Any:
        def announced_forward(*args: Any, **kwargs: Any) -> Any:
            running.append(number)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        return announced_forward

    try:
        for number, layer in enumerate(layers):
            layer.__dict__["forward"] = announcing(number, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, forwards):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


def hooked_children(module: nn.Module) -> list[str]:
    """Names of the modules inside that have a forward or backward hook, which would see slices."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(nn.modules.module, f"_global{kind}", None) for kind in kinds):
        return ["every module (a global hook)"]
    return [
        name for name, child in module.named_modules() if name and any(getattr(child, kind, None) for kind in kinds)
    ]


class _Snapshot:
    """The attributes of one module, and of what they hold, one or two levels deep."""

    def __init__(self, module: nn.Module):
        self._casting = module if casts_weights(module) else None
        self._data: list[tuple[str, Tensor, Tensor]] = []
        self._levels: list[tuple[str, Any, Any]] = []
        if self._casting is not None:
            self._state, self._parameters = dict(module.__dict__), dict(module._parameters)
            self._settings = settings_of(module)
            return
        self._moves_weights = is_hooked(module)
        own = (
            ()
            if self._moves_weights
            else (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        )
        self._data = [(name, tensor, tensor.data) for name, tensor in own if type(tensor) in (Tensor, nn.Parameter)]
        self._take("", module.__dict__, _DEPTH)

    def put_back(self) -> list[str]:
        """Restores what has changed and returns its names."""
        if self._casting is not None:
            return self._put_back_casting(self._casting)
        changed = []
        for name, tensor, data in self._data:
            if tensor.untyped_storage()._cdata != data.untyped_storage()._cdata:
                tensor.data = data
                changed.append(name)
        for name, holder, old in self._levels:
            if self._moves_weights and name in ("_parameters", "_buffers"):
                if any(isinstance(value, FakeTensor) for value in holder.values()):
                    changed.append(name)
                    holder.update(old)
                continue
            if not _same(holder, old):
                changed.append(name or _first_difference(holder, old))
                _restore(holder, old)
        return changed

    def _put_back_casting(self, layer: nn.Module) -> list[str]:
        """Where a host keeps weights between calls is its own business, unless tensors without data ended up there."""
        state = layer.__dict__
        leaked = [key for key, value in {**state, **state["_parameters"]}.items() if isinstance(value, FakeTensor)]
        if not leaked and settings_of(layer) == self._settings:
            return []
        kept = state.get("forward")
        state.clear()
        state.update(self._state)
        state["_parameters"].update(self._parameters)
        if kept is not None:
            state["forward"] = kept
        return leaked or ["a setting of a layer"]

    def _take(self, name: str, holder: Any, depth: int) -> None:
        if isinstance(holder, dict):
            skipped = () if name else hook_names()
            values = {key: value for key, value in holder.items() if key not in skipped}
            self._levels.append((name, holder, values))
            inside = list(values.items())
        elif isinstance(holder, (list, set)):
            self._levels.append((name, holder, type(holder)(holder)))
            inside = list(enumerate(holder)) if isinstance(holder, list) else []
        elif isinstance(getattr(holder, "__dict__", None), dict) and not isinstance(holder, _OPAQUE):
            self._levels.append((name, holder.__dict__, dict(holder.__dict__)))
            inside = []
        else:
            return
        if depth:
            for key, value in inside:
                if not isinstance(value, (*PLAIN, *_OPAQUE)):
                    self._take(f"{name}.{key}".lstrip("."), value, depth - 1)


def _same(holder: Any, old: Any) -> bool:
    if isinstance(holder, dict):
        relevant = set(holder) - hook_names()
        return relevant == set(old) - hook_names() and all(_alike(holder[key], old[key]) for key in relevant)
    if isinstance(holder, list):
        return len(holder) == len(old) and all(map(_alike, holder, old))
    return holder == old


def _alike(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and isinstance(new, PLAIN) and new == old)


def _first_difference(holder: dict, old: dict) -> str:
    keys = [key for key in {**old, **holder} if key not in hook_names()]
    return next(str(key) for key in keys if key not in holder or key not in old or not _alike(holder[key], old[key]))


def _restore(holder: Any, old: Any) -> None:
    if isinstance(holder, list):
        holder[:] = old
        return
    if isinstance(holder, dict):
        for key in set(holder) - set(old) - hook_names():
            del holder[key]
    else:
        holder.clear()
    holder.update(old)


def _same_draws(new: Any, old: Any) -> bool:
    return all((a == b).all() if hasattr(a, "shape") else a == b for a, b in zip(new, old))
