"""Leaves a module as it was found: what a trial run changes in it is put back, and reported as a reason."""

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

from .ffn_rules import NotTokenwise

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (Tensor, nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_HOOKS = ("_hf_hook", "_diffusers_hook")  # accelerate's and diffusers': they bring weights and take them away
_SKIPPED = (*_HOOKS, "forward", "_old_forward")
_CASTS = "comfy_cast_weights"  # on ComfyUI's layers, which fetch, cast and patch their weights inside forward
_OF_CASTS = ("_", "comfy_", "prev_comfy_")  # names of what such a layer keeps between calls
_DEPTH = 2


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Puts back the Python state of ``module`` and the random state of Python and NumPy.

    Raises:
        NotTokenwise: the block changed any of them; what it changed is put back first.
    """
    before = [(name, _Snapshot(child)) for name, child in module.named_modules()]
    numpy = sys.modules.get("numpy")
    draws, numpy_draws = random.getstate(), numpy.random.get_state() if numpy else None
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that is found there is missing among the operators
    changed: list[str] = []
    try:
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


def fingerprint(module: nn.Module) -> tuple:
    """What may decide which operators ``module`` runs, apart from its input: modes, plain attributes, the modules
    inside and what stands in their forwards, the kind of their parameters, hooks. Values of parameters are no part of
    it: see ffn_verify; nor is what a weight-casting layer does to its weights."""
    children = iter(module.modules())
    return (_fingerprint_of(next(children)), *((_fingerprint_of(child), _forward_of(child)) for child in children))


def structure(module: nn.Module) -> tuple | None:
    """Equal for modules of which a proof of one holds for the others, such as the same layer of each block: beside
    the fingerprint the names and sizes inside. None where a host's hooks may tell them apart."""
    children = list(module.modules())
    if any(hook in child.__dict__ for child in children for hook in (*_HOOKS, "_old_forward")):
        return None
    names = tuple(tuple(child._modules) for child in children)
    sizes = tuple(p.shape for child in children for p in child._parameters.values() if p is not None)
    return fingerprint(module), names, sizes


def casting_layers(module: nn.Module) -> list[nn.Module]:
    """The layers inside that bring their weights to the input's device and dtype in each call."""
    return [child for child in module.modules() if hasattr(child, _CASTS)]


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


def movable_parameters(module: nn.Module) -> set[int]:
    """Identities of the parameters whose memory a host's hook exchanges around each call: offloading, casting."""
    hosts = [child for child in module.modules() if any(hook in child.__dict__ for hook in _HOOKS)]
    return {id(parameter) for child in hosts for parameter in child.parameters(recurse=False)}


def hooked_children(module: nn.Module) -> list[str]:
    """Names of modules inside on which somebody has registered a forward or backward hook: it would see slices."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        name for name, child in module.named_modules() if name and any(getattr(child, kind, None) for kind in kinds)
    ]


def _forward_of(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    return (id(forward.__self__), id(forward.__func__)) if isinstance(forward, MethodType) else id(forward)


def _fingerprint_of(module: nn.Module) -> tuple:
    state = module.__dict__
    if hasattr(module, _CASTS):
        own: tuple = tuple(_plain_state(module).items())
    else:
        own = tuple((key, _print_of(value)) for key, value in state.items() if key not in _BASE)
    parameters = tuple((key, p is not None and (p.dtype, p.requires_grad)) for key, p in state["_parameters"].items())
    hooks = len(state["_forward_hooks"]) + len(state["_forward_pre_hooks"]) + len(state["_backward_hooks"])
    return id(type(module)), state["training"], hooks, tuple(state["_buffers"]), parameters, own


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """What a weight-casting layer is set to, without what it does to its weights."""
    state = module.__dict__.items()
    return {key: v for key, v in state if isinstance(v, _PLAIN) and key not in _BASE and not key.startswith(_OF_CASTS)}


def _print_of(value: Any, depth: int = _DEPTH) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, dict) and len(value) <= 32:
        return tuple((key, _print_of(item, depth - 1)) for key, item in value.items() if isinstance(key, _PLAIN))
    if depth and isinstance(value, (list, tuple)) and len(value) <= 32:
        return tuple(_print_of(item, depth - 1) for item in value)
    if depth == _DEPTH and not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict):
        return id(value), tuple((k, v) for k, v in value.__dict__.items() if isinstance(v, _PLAIN))  # a config
    return id(value)


_BASE = {key for key in nn.Module().__dict__ if key != "training"} | {"training", *_SKIPPED}


class _Snapshot:
    """The attributes of one module, and one or two levels into what they hold."""

    def __init__(self, module: nn.Module):
        self._casting = module if hasattr(module, _CASTS) else None
        self._data: list[tuple[str, Tensor, Tensor]] = []
        self._levels: list[tuple[str, Any, Any]] = []
        if self._casting is not None:
            self._state, self._parameters = dict(module.__dict__), dict(module._parameters)
            self._plain = _plain_state(module)
            return
        self._moves_weights = any(hook in module.__dict__ for hook in _HOOKS)
        own = (
            ()
            if self._moves_weights
            else (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        )
        self._data = [(name, tensor, tensor.data) for name, tensor in own if type(tensor) in (Tensor, nn.Parameter)]
        self._take("", module.__dict__, _DEPTH)

    def put_back(self) -> list[str]:
        """Restores and names what had changed."""
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
        """Where weights are kept between calls is the host's business, unless tensors without data got there."""
        state = layer.__dict__
        leaked = [key for key, value in {**state, **state["_parameters"]}.items() if isinstance(value, FakeTensor)]
        if not leaked and _plain_state(layer) == self._plain:
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
            values = {key: value for key, value in holder.items() if key not in _SKIPPED or name}
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
                if not isinstance(value, (*_PLAIN, *_OPAQUE)):
                    self._take(f"{name}.{key}".lstrip("."), value, depth - 1)


def _same(holder: Any, old: Any) -> bool:
    if isinstance(holder, dict):
        relevant = {key for key in holder if key not in _SKIPPED}
        return relevant == set(old) - set(_SKIPPED) and all(_alike(holder[key], old[key]) for key in relevant)
    if isinstance(holder, list):
        return len(holder) == len(old) and all(map(_alike, holder, old))
    return holder == old


def _alike(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and isinstance(new, _PLAIN) and new == old)


def _first_difference(holder: dict, old: dict) -> str:
    keys = [key for key in {**old, **holder} if key not in _SKIPPED]
    return next(str(key) for key in keys if key not in holder or key not in old or not _alike(holder[key], old[key]))


def _restore(holder: Any, old: Any) -> None:
    if isinstance(holder, list):
        holder[:] = old
        return
    if isinstance(holder, dict):
        for key in set(holder) - set(old) - set(_SKIPPED):
            del holder[key]
    else:
        holder.clear()
    holder.update(old)


def _same_draws(new: Any, old: Any) -> bool:
    return all((a == b).all() if hasattr(a, "shape") else a == b for a, b in zip(new, old))
