"""Copies of functions with other globals: what a copy calls by a global name can be another function for it alone."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType
from typing import Any


def copy_over(function: FunctionType, replaced: dict[str, Any]) -> FunctionType:
    """A copy of ``function`` for which the global names in ``replaced`` have the values given there.

    Everything else is looked up where the original does, at the time of the call, so that later patches of that module
    take effect. What it calls is not copied.
    """
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    copy = FunctionType(code, _Globals(function.__globals__, replaced), function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


class Instead:
    """A module with some of its names meaning something else."""

    def __init__(self, module: Any, replaced: dict[str, Any]):
        self.__module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__module, name)


def names_in(code: CodeType) -> set[str]:
    """The global names and attributes in code, functions that it defines included."""
    return set(code.co_names).union(*(names_in(const) for const in code.co_consts if isinstance(const, CodeType)))


class _Globals(dict):
    """The globals of a module with some names replaced; the others are looked up there when they are used."""

    def __init__(self, module: dict[str, Any], replaced: dict[str, Any]):
        # looked up by the interpreter, for builtins and relative imports, without __missing__
        own = {name: value for name, value in module.items() if name.startswith("__")}
        super().__init__({**own, **replaced})
        self.module = module

    def __missing__(self, name: str) -> Any:
        return self.module[name]
