"""The Python state that a module's code refers to by name: compared between calls, and put back after a trial.

Names are looked for in the attributes of the module and its children, in their classes, in closures and globals, and in
the functions and objects found there. What belongs to torch, to Python or to a host is left out.
"""

from __future__ import annotations

import copyreg
import functools
import io
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..patching.function_copy import names_in
from ..patching.hosts import HOOK_NAMES, casts_weights, is_hooked, is_hosts
from .run import SCALARS, NotTokenwise

_DEPTH = 6  # of containers and objects inside each other
_MOST_HOLDERS = 1000
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "einops"}
_OURS = __name__.rpartition(".ffn.")[0]
_HOLD_STATE = ("types", "_thread", "_threading_local")  # modules of Python whose objects programs keep state in
_OF_NO_EFFECT = re.compile(
    "_(state_dict|load_state_dict|non_persistent)_|.*_(with_kwargs|always_called)$"
)  # of a module
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")  # for all modules
_OF_CASTING_LAYERS = {"forward", "_forward_hooks", "_forward_pre_hooks"}  # the rest is their host's business

Values = dict[Any, Any]


class _Holder(NamedTuple):
    """A dict, list, object, class or closure: how it is read, and its values at first. ``owner`` gets them back."""

    name: str
    owner: Any
    read: Callable[[], Values]
    kept: Values

    def put_back(self) -> None:
        owner, kept, now = self.owner, self.kept, self.read()
        if isinstance(owner, ContextVar):
            owner.set(kept[0])
        elif now is owner or isinstance(owner, (list, deque, set)):  # all of a container, in its order
            owner.clear()
            put = owner.extend if isinstance(owner, (list, deque)) else owner.update
            put(kept if now is owner else kept.values())
        elif owner is not None:
            is_dict = isinstance(owner, dict)
            put = owner.__setitem__ if is_dict else functools.partial(setattr, owner)
            drop = owner.__delitem__ if is_dict else functools.partial(delattr, owner)
            for name in now.keys() - kept.keys():
                drop(name)
            for name in [name for name in kept if name not in now or now[name] is not kept[name]]:
                put(name, kept[name])

    def has_changed(self) -> bool:
        now, kept = self.read(), self.kept
        if not (now or kept):
            return False
        if len(now) == len(kept) and all(map(is_, now.values(), kept.values())) and all(map(is_, now, kept)):
            return False
        return list(now) != list(kept) or not all(map(_is_equal, now.values(), kept.values()))


class _Namespace(NamedTuple):
    """A class, or a dict of globals, in which code looks up names."""

    label: str
    owner: Any
    values: Mapping[str, Any]
    names: set[str]

    def used(self) -> set[str]:
        return self.names & self.values.keys()


class State:
    """The values that the code of ``module``, and of what is called in place of its forward, refers to by name, as they
    are now. Raises NotTokenwise for an iterator or a generator of random numbers, which cannot be put back, and for
    what cannot be read."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None = None):
        self._holders: list[_Holder] = []
        self._data: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[int, Any] = {}  # with the objects: an id is only good while its object lives
        self._names = {"forward"}  # in all code that is followed
        self._namespaces: dict[int, _Namespace] = {}  # by the owner's id
        try:
            for name, child in module.named_modules():
                self._add_module(name, child)
            self._visit("forward", forward)
            for name in _GLOBAL_HOOKS:
                self._visit(name, getattr(nn.modules.module, name))
            self._look_up_names()
        except (AttributeError, TypeError, ValueError) as error:  # of a foreign class
            raise NotTokenwise(f"refers to something that cannot be read: {type(error).__name__}: {error}") from error
        del self._seen, self._names, self._namespaces

    def has_changed(self) -> bool:
        """Whether a value has been replaced since."""
        return any(map(_Holder.has_changed, self._holders))

    def changes(self) -> list[str]:
        """The names of values that have been replaced since, and of weights whose memory has been."""
        changed = [holder.name for holder in self._holders if holder.has_changed()]
        return changed + ["the memory of a weight" for tensor, data in self._data if not _is_same_memory(tensor, data)]

    def put_back(self) -> None:
        """Restore every value that has been replaced."""
        for holder in self._holders:
            if holder.has_changed():
                holder.put_back()
        for tensor, data in self._data:
            if not _is_same_memory(tensor, data):
                tensor.data = data

    def key(self) -> tuple:
        """Equal for modules that are built alike and whose code refers to equal values."""
        return tuple((name, *kept, *map(_kind_of, kept.values())) for name, _, _, kept in self._holders)

    # --- finding ---

    def _add_module(self, name: str, module: nn.Module) -> None:
        attributes = module.__dict__
        if casts_weights(module):  # where it keeps weights is its host's business
            self._hold(name, None, lambda: {"code": type(module).forward, **_some(attributes, _OF_CASTING_LAYERS)})
            return
        self._hold(name, module, lambda: {"__class__": type(module)})
        self._visit(f"the class of {name}", type(module))
        searched = set(attributes)
        if is_hooked(module):
            compared = attributes.keys() - HOOK_NAMES - {"_parameters", "_buffers"}
            self._hold(name, attributes, lambda: _some(attributes, compared))
            searched = compared - {"forward"}  # which is the host's
        else:
            self._hold(name, attributes, lambda: attributes)
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            self._data += [(tensor, tensor.data) for tensor in own if type(tensor) in (Tensor, nn.Parameter)]
        for key, value in _some(attributes, searched).items():
            if not _OF_NO_EFFECT.match(key):
                self._visit(f"{name}.{key}".lstrip("."), value)

    def _visit(self, name: str, value: Any, depth: int = 0) -> None:
        """Find what ``value`` holds, and what it refers to if it is code."""
        if id(value) in self._seen or depth > _DEPTH or len(self._holders) >= _MOST_HOLDERS:
            return
        self._seen[id(value)] = value
        for key, item in list(self._inside(name, value)):
            self._visit(f"{name}.{key}", item, depth + 1)

    def _inside(self, name: str, value: Any) -> Iterable[tuple[Any, Any]]:
        """Hold what can change in ``value``; returns what is in it."""
        kind = type(value)
        if isinstance(value, (*SCALARS, Tensor, nn.Module, ModuleType, io.IOBase)):  # what is logged changes no result
            return ()
        if isinstance(value, FunctionType):
            return self._in_function(name, value)
        if isinstance(value, type):
            for base in value.__mro__:
                if not _is_foreign(base.__module__):
                    self._namespaces[id(base)] = _Namespace(base.__qualname__, base, vars(base), self._names)
            return ()
        if isinstance(value, _WRAPPERS):
            return ((key, getattr(value, key, None)) for key in _WRAPPED)
        if isinstance(value, dict):
            return self._hold(name, value, lambda: value).items()
        if isinstance(value, (list, deque, set)):
            return self._hold(name, value, lambda: dict(enumerate(value))).items()
        if isinstance(value, tuple):
            return enumerate(value)
        if isinstance(value, ContextVar):
            return self._hold(name, value, lambda: {0: value.get(None)}).items()
        is_generator = isinstance(value, (random.Random, torch.Generator)) or kind.__module__.startswith("numpy.random")
        if is_generator or hasattr(kind, "__next__"):
            raise NotTokenwise(f"refers to {name}: the state of a {kind.__name__} cannot be put back")
        if _is_foreign(kind.__module__) and kind.__module__ not in _HOLD_STATE:
            return ()
        self._visit(f"the class of {name}", kind)
        return self._hold(name, value, lambda: _attributes(value)).items()

    def _in_function(self, name: str, function: FunctionType) -> Iterable[tuple[Any, Any]]:
        if _is_foreign(function.__module__):
            return
        names, values = names_in(function.__code__), function.__globals__
        self._names |= names
        modules = [value for value in _some(values, names).values() if isinstance(value, ModuleType)]
        for space in [values, *map(vars, modules)]:
            new = _Namespace(space.get("__name__", name), space, space, set())
            self._namespaces.setdefault(id(space), new).names.update(names)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            kept = self._hold(f"{name}.{key}", cell, functools.partial(_content, cell))
            yield key, kept.get("cell_contents")
        yield "defaults", function.__defaults__
        yield "defaults", function.__kwdefaults__

    def _look_up_names(self) -> None:
        """Visit what the names in code stand for until nothing new is found; then hold it."""
        done: set[tuple[int, str]] = set()
        while found := {(key, name) for key, space in self._namespaces.items() for name in space.used()} - done:
            for key, name in sorted(found):
                self._visit(name, self._namespaces[key].values[name])
            done |= found
        for label, owner, values, all_names in self._namespaces.values():
            names = sorted(all_names)
            self._hold(label, owner, functools.partial(_some, values, names))

    def _hold(self, name: str, owner: Any, read: Callable[[], Values]) -> Values:
        kept = dict(read())
        self._holders.append(_Holder(name or "the module itself", owner, read, kept))
        return kept


_WRAPPERS = (functools.partial, MethodType, staticmethod, classmethod, property, functools._lru_cache_wrapper)
_WRAPPED = ("func", "args", "keywords", "__func__", "__self__", "fget", "__wrapped__")


def _is_foreign(module: str | None) -> bool:
    return module is not None and (module.partition(".")[0] in _FOREIGN or module.startswith(_OURS) or is_hosts(module))


def _some(values: Mapping[Any, Any], keys: Iterable[Any]) -> Values:
    return {key: values[key] for key in keys if key in values}


def _attributes(owner: Any) -> Values:
    """The attributes of an object, also of one with ``__slots__``."""
    names = copyreg._slotnames(type(owner))  # type: ignore[attr-defined]
    return {**getattr(owner, "__dict__", {}), **{name: getattr(owner, name) for name in names if hasattr(owner, name)}}


def _content(cell: CellType) -> Values:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # the variable has no value yet
        return {}


def _is_equal(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and isinstance(new, SCALARS) and new == old)


def _is_same_memory(tensor: Tensor, data: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == data.untyped_storage()._cdata


def _kind_of(value: Any) -> Any:
    """Equal for values that make no difference to what a module computes with them."""
    if isinstance(value, SCALARS):
        return type(value), value
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.requires_grad
    if isinstance(value, FunctionType):
        return (value.__module__, value.__qualname__) if "<" not in value.__qualname__ else object()
    if isinstance(value, (tuple, functools.partial)):
        parts = value if isinstance(value, tuple) else (value.func, value.args)
        return type(value), *map(_kind_of, parts)
    return value if isinstance(value, type) else type(value)
