"""Records what may decide how a module's code runs besides its input: read when it is proven, compared in every call.

A :class:`Watch` starts at the modules inside and follows what their code names: attributes, also nested ones and
``__slots__``, containers, the classes' methods and attributes, globals, closures, context variables, the state of
random generators, hooks. Code of torch and of the standard library is assumed constant. What cannot be reached by a
name (state inside C extensions, ``globals()["a" + "b"]``) is left to :mod:`.recheck`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .hosts import PLAIN, casts_weights, is_bookkeeping, own_names, settings_of

_MOST_ENTRIES = 8192  # of one module; what lies beyond is left to the re-check
_MOST_INNER = 64  # modules inside one that is not registered; a larger one is the model itself
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
_ALWAYS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
_KNOWN_CODE = set(sys.stdlib_module_names) | {"torch", "numpy"}
_FUNCTIONS = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial)
_MISSING = object()


class Watch:
    """What ``module``'s code refers to, as it is now.

    It keeps what it names alive (tensors and modules it refers to weakly), so that no remembered address can be reused.

    Args:
        forward: what runs in place of the forward that the module's class defines, if anything does.
    """

    def __init__(self, module: nn.Module, forward: Any = None):
        self._points: list[_Point] = []
        walk = _Walk(module, forward)
        for point in walk.points():
            point.take()
            self._points.append(point)

    def changed(self) -> str:
        """The name of something that has changed; "" if nothing has."""
        for point in self._points:
            if point.differs():
                return point.first_difference()
        return ""

    def put_back(self) -> None:
        """Restore everything."""
        for point in self._points:
            if point.differs():
                point.put_back()

    def key(self) -> tuple:
        """Equal for modules whose code refers to equal things; an object that no longer exists equals nothing."""
        return tuple(point.key() for point in self._points)


class Same:
    """An object by identity, by weak reference where possible; equal to nothing once the object is gone."""

    __slots__ = ("_hash", "_refer")

    def __init__(self, value: Any):
        try:
            self._refer: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._refer = _Strong(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        value = self._refer()
        return value is not None and value is other._refer()

    def __call__(self) -> Any:
        return self._refer()


class _Strong:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _is_heavy(value: Any) -> bool:
    return isinstance(value, (Tensor, nn.Module))


class _Point:
    """Some values that are read together; what they were is kept in ``_taken``."""

    def __init__(self, name: str):
        self.name = name
        self._taken: list[Any] = []

    def read(self) -> list[Any]:
        raise NotImplementedError

    def take(self) -> None:
        self._taken = [Same(value) if _is_heavy(value) else value for value in self.read()]

    def differs(self) -> bool:
        now = self.read()
        return len(now) != len(self._taken) or not all(map(_alike, now, self._taken))

    def first_difference(self) -> str:
        return self.name

    def put_back(self) -> None:
        """Restore the values, where that is possible."""

    def values(self) -> list[Any]:
        """The values as they were read."""
        return [value() if isinstance(value, Same) else value for value in self._taken]

    def key(self) -> tuple:
        return (type(self).__name__, *map(_key_of, self.values()))


def _alike(now: Any, taken: Any) -> bool:
    if now is taken:
        return True
    if type(taken) is Same:
        return taken() is now
    return type(now) is type(taken) and type(now) in PLAIN and now == taken


def _key_of(value: Any) -> Any:
    """A module or a container is described by its content, which has points of its own."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, nn.Module) or _is_walked(value):
        return type(value)
    if isinstance(value, types.MethodType):
        return Same(value.__func__), _key_of(value.__self__)
    return Same(value)


def _is_walked(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or (not isinstance(value, (type, *_FUNCTIONS)) and _has_own_state(value))


class _Entries(_Point):
    """Names in a dict: ``keys`` of them, or all but ``skipped``."""

    def __init__(self, name: str, holder: Any, keys: tuple[str, ...] | None = None, skipped: Any = ()):
        super().__init__(name)
        self._holder, self._keys, self._skipped = holder, keys, skipped

    def read(self) -> list[Any]:
        holder = self._holder
        if self._keys is not None:
            return [holder.get(key, _MISSING) for key in self._keys]
        return [part for key, value in list(holder.items()) if key not in self._skipped for part in (key, value)]

    def first_difference(self) -> str:
        now, old = self._named(self.read()), self._named(self._taken)
        keys = [key for key in {**old, **now} if not _alike(now.get(key, _MISSING), old.get(key, _MISSING))]
        return ".".join(part for part in (self.name, str(keys[0]) if keys else "") if part)

    def _named(self, values: list[Any]) -> dict[Any, Any]:
        return dict(zip(self._keys, values)) if self._keys is not None else dict(zip(values[::2], values[1::2]))

    def put_back(self) -> None:
        now, old = self._named(self.read()), self._named(self.values())
        for key in [key for key in now if key not in old or old[key] is _MISSING]:
            self._holder.pop(key, None)
        self._holder.update({key: value for key, value in old.items() if value is not _MISSING})


class _ClassEntries(_Entries):
    """The same of a class."""

    def __init__(self, kind: type, keys: tuple[str, ...]):
        super().__init__(kind.__name__, kind.__dict__, keys)
        self._kind = kind

    def put_back(self) -> None:
        now, old = self._named(self.read()), self._named(self.values())
        for key, value in old.items():
            if value is _MISSING:
                delattr(self._kind, key)
            elif now[key] is not value:
                setattr(self._kind, key, value)


class _Items(_Point):
    """What a list, tuple, set or deque holds."""

    def __init__(self, name: str, holder: Any):
        super().__init__(name)
        self._holder = holder

    def read(self) -> list[Any]:
        return list(self._holder)

    def put_back(self) -> None:
        if isinstance(self._holder, (list, deque, set)):
            values = self.values()
            self._holder.clear()
            self._holder.update(values) if isinstance(self._holder, set) else self._holder.extend(values)


class _Attributes(_Point):
    """Attributes in slots."""

    def __init__(self, name: str, holder: Any, names: list[str]):
        super().__init__(name)
        self._holder, self._names = holder, names

    def read(self) -> list[Any]:
        return [getattr(self._holder, name, _MISSING) for name in self._names]

    def put_back(self) -> None:
        for name, value in zip(self._names, self.values()):
            if value is not _MISSING:
                setattr(self._holder, name, value)


class _Cell(_Point):
    """A variable of an enclosing function."""

    def __init__(self, name: str, cell: Any):
        super().__init__(name)
        self._cell = cell

    def read(self) -> list[Any]:
        try:
            return [self._cell.cell_contents]
        except ValueError:  # not set yet
            return [_MISSING]

    def put_back(self) -> None:
        if self.values()[0] is not _MISSING:
            self._cell.cell_contents = self.values()[0]


class _State(_Point):
    """State with a getter and a setter: a context variable, a random generator."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], Any] | None = None):
        super().__init__(name)
        self._read, self._write = read, write

    def read(self) -> list[Any]:
        return [self._read()]

    def differs(self) -> bool:
        now, old = self.read()[0], self.values()[0]
        return not (_alike(now, self._taken[0]) or (isinstance(now, (tuple, dict)) and _equal(now, old)))

    def put_back(self) -> None:
        if self._write is not None and self.values()[0] is not _MISSING:
            self._write(self.values()[0])

    def key(self) -> tuple:
        return self.name, Same(self.values()[0])


def _equal(one: Any, two: Any) -> bool:
    """Equality of nested dicts and tuples that may hold NumPy arrays."""
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return isinstance(two, tuple) and len(one) == len(two) and all(map(_equal, one, two))
    return bool((one == two).all()) if hasattr(one, "shape") else bool(one == two)


class _Layer(_Point):
    """Modes, hooks, and the kinds of the parameters of one module; of a weight-casting layer its settings, not its
    weights."""

    def __init__(self, name: str, module: nn.Module):
        super().__init__(name)
        self._module, self._casts = weakref.ref(module), casts_weights(module)

    def read(self) -> list[Any]:
        module = self._module()
        if module is None:
            return []
        state = module.__dict__
        values: list[Any] = [type(module), module.training, *(len(state.get(hooks) or ()) for hooks in _HOOKS)]
        values += [*state["_buffers"], *state["_modules"].values()]
        for key, parameter in state["_parameters"].items():
            values += [key] if parameter is None else [key, parameter.dtype, parameter.requires_grad]
        if self._casts:
            values += [part for entry in settings_of(module).items() for part in entry]
        return values

    def key(self) -> tuple:
        module = self._module()
        sizes = () if module is None else tuple(p.shape for p in module._parameters.values() if p is not None)
        return (*super().key(), sizes, tuple(module._modules) if module is not None else ())


class _Forward(_Point):
    """The instance attribute ``forward`` of a module inside."""

    def __init__(self, name: str, module: nn.Module):
        super().__init__(f"{name}.forward")
        self._module = weakref.ref(module)

    def read(self) -> list[Any]:
        module = self._module()
        forward = None if module is None else module.__dict__.get("forward")
        if isinstance(forward, types.MethodType):  # a new object at every access
            return [forward.__func__, forward.__self__]
        return [forward]


class _Walk:
    """Everything that the code of a module names, each once, in the same order for identical modules."""

    def __init__(self, module: nn.Module, forward: Any):
        self._root, self._forward = module, forward
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is reused
        self._names: dict[str, None] = {}  # that the code uses
        self._classes: dict[type, set[str]] = {}  # with the names that have been looked up
        self._todo: deque[tuple[str, Any]] = deque()
        self._entries = 0

    def points(self) -> Iterator[_Point]:
        """Several values each."""
        yield _Entries("torch", vars(nn.modules.module), _GLOBAL_HOOKS)
        for name in _GLOBAL_HOOKS:
            yield _Items(name, getattr(nn.modules.module, name))
        yield _ClassEntries(nn.Module, _ALWAYS)
        yield from self._of_modules("", self._root)
        self._todo.append(("forward", self._forward))
        while self._todo and self._entries < _MOST_ENTRIES:
            name, value = self._todo.popleft()
            yield from self._of(name, value)
            if not self._todo:
                yield from self._of_classes()

    def _of_modules(self, prefix: str, module: nn.Module) -> Iterator[_Point]:
        for name, child in module.named_modules():
            if id(child) in self._seen or isinstance(child, torch.jit.ScriptModule):
                continue
            name = ".".join(part for part in (prefix, name) if part)
            self._seen.add(id(child))
            yield _Layer(name, child)
            if module is not self._root or child is not module:
                yield _Forward(name, child)
            self._add_class(type(child))
            if casts_weights(child):
                continue
            yield from self._dict(name, child.__dict__, own_names())
            yield from self._slots(name, child)
            forward = child.__dict__.get("forward")
            if child is not module and isinstance(forward, _FUNCTIONS):
                self._todo.append((name, forward))

    def _dict(self, name: str, holder: Any, skipped: Any = ()) -> Iterator[_Point]:
        self._entries += len(holder)
        yield _Entries(name, holder, skipped=skipped)
        for key, value in list(holder.items()):
            if key not in skipped:
                self._todo.append((f"{name}.{key}".lstrip("."), value))

    def _slots(self, name: str, value: Any) -> Iterator[_Point]:
        slots = [slot for kind in type(value).__mro__ for slot in _slots_of(kind)]
        if slots:
            yield _Attributes(name, value, slots)
            self._todo += [(f"{name}.{slot}", getattr(value, slot, None)) for slot in slots]

    def _of(self, name: str, value: Any) -> Iterator[_Point]:
        if isinstance(value, (*PLAIN, Tensor)) or id(value) in self._seen:
            return
        if isinstance(value, types.MethodType):
            self._todo += [(name, value.__func__), (name, value.__self__)]
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, nn.Module):
            if sum(1 for _ in value.modules()) <= _MOST_INNER:
                yield from self._of_modules(name, value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(name, value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._todo.append((name, value.__func__))
        elif isinstance(value, property):
            self._todo.append((name, value.fget))
        elif isinstance(value, functools.partial):
            self._todo += [(name, value.func), (name, value.args), (name, value.keywords)]
        elif isinstance(value, dict):
            yield from self._dict(name, value)
        elif isinstance(value, _CONTAINERS):
            self._entries += len(value)
            yield _Items(name, value)
            self._todo += [(name, item) for item in value]
        else:
            yield from self._object(name, value)

    def _object(self, name: str, value: Any) -> Iterator[_Point]:
        if isinstance(value, ContextVar):
            yield _State(f"context variable {value.name}", lambda: value.get(_MISSING), value.set)
            self._todo.append((name, value.get(None)))
        elif isinstance(value, random.Random):
            yield _State(f"{name} (a random generator)", value.getstate, value.setstate)
        elif (draws := _numpy_draws(value)) is not None:
            yield _State(f"{name} (a random generator)", *draws)
        elif isinstance(value, _LRU_CACHE):
            self._todo.append((name, value.__wrapped__))
        elif _has_own_state(value):
            if isinstance(getattr(value, "__dict__", None), dict):
                yield from self._dict(name, value.__dict__)
            if not isinstance(value, threading.local):
                yield from self._slots(name, value)
            self._add_class(type(value))

    def _function(self, name: str, function: types.FunctionType) -> Iterator[_Point]:
        if _is_known(function.__module__):
            return
        yield _Attributes(name, function, ["__code__", "__defaults__", "__kwdefaults__"])
        self._todo += [(name, function.__defaults__), (name, function.__kwdefaults__)]
        if function.__dict__:
            yield from self._dict(name, function.__dict__)
        written = _only_written(function.__code__) if function.__closure__ else set()
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            yield _Cell(variable, cell)
            if variable in written:
                continue
            with contextlib.suppress(ValueError):  # not set yet
                self._todo.append((variable, cell.cell_contents))
        names = list(dict.fromkeys(_names_in(function.__code__)))
        self._names |= dict.fromkeys(names)
        yield from self._named("", function.__globals__, names)

    def _named(self, prefix: str, holder: dict[str, Any], names: list[str], depth: int = 3) -> Iterator[_Point]:
        """What ``names`` refer to among these globals; for a module among them, also among its own."""
        found = tuple(name for name in names if name in holder)
        self._entries += len(found)
        yield _Entries(prefix, holder, found)
        for name in found:
            value, path = holder[name], f"{prefix}.{name}".lstrip(".")
            if not isinstance(value, types.ModuleType):
                if not _is_known(holder.get("__name__")):
                    self._todo.append((path, value))
            elif depth and id(value) not in self._seen:
                yield from self._named(path, vars(value), names, depth - 1)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base is not nn.Module and base is not object:
                self._classes.setdefault(base, set())

    def _of_classes(self) -> Iterator[_Point]:
        """The class attributes that the code names."""
        for kind, known in list(self._classes.items()):
            if _is_known(kind.__module__) and not issubclass(kind, nn.Module):
                continue
            wanted = [*_ALWAYS, *self._names] if issubclass(kind, nn.Module) else [*self._names, "__call__"]
            names = tuple(name for name in dict.fromkeys(wanted) if name in kind.__dict__ and name not in known)
            if not names:
                continue
            known.update(names)
            self._entries += len(names)
            yield _ClassEntries(kind, names)
            self._todo += [(f"{kind.__name__}.{name}", kind.__dict__[name]) for name in names]


_LRU_CACHE = type(functools.lru_cache(lambda: None))
_ADDS = ("append", "appendleft", "extend", "add")
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _only_written(code: types.CodeType) -> set[str]:
    """Variables of enclosing functions that ``code`` only appends to: a log, which decides nothing."""
    reads: set[str] = set()
    writes: set[str] = set()
    steps = list(dis.get_instructions(code))
    for step, following in pairwise(steps):
        if step.argval in code.co_freevars and step.opname.startswith("LOAD_"):
            is_log = following.opname in ("LOAD_METHOD", "LOAD_ATTR") and following.argval in _ADDS
            (writes if is_log else reads).add(step.argval)
    return writes - reads


def _is_known(module: str | None) -> bool:
    """Whether code of this module is assumed constant."""
    return (module or "").partition(".")[0] in _KNOWN_CODE or is_bookkeeping(module)


def _has_own_state(value: Any) -> bool:
    """Whether its attributes decide how it behaves: an object of a user's class, or a plain namespace."""
    if isinstance(value, (types.SimpleNamespace, threading.local)) or type(value).__module__ == "argparse":
        return True
    if isinstance(value, (Tensor, nn.Module, type, types.ModuleType, *_FUNCTIONS)):
        return False
    return not _is_known(type(value).__module__)


def _slots_of(kind: type) -> list[str]:
    if _is_known(kind.__module__):
        return []
    return [name for name, value in kind.__dict__.items() if isinstance(value, types.MemberDescriptorType)]


def _numpy_draws(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if not isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        return None
    bits = getattr(value, "bit_generator", value)
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
