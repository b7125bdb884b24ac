"""The attention calls of a function of diffusers, read from its code; and copies of it that call ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from ..patching.function_copy import copy_over, names_in
from ..patching.interception import SDPA_NAME

_DISPATCH = "dispatch_attention_fn"
_HELPER_DEPTH = 3


def reaches_sdpa(function: Callable, owner: type, depth: int = _HELPER_DEPTH) -> bool:
    """Whether the code of ``function`` names SDPA, itself or in a helper: a function of its module or a method of
    ``owner``. Submodules are not followed; they are sites of their own."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return False
    names = names_in(function.__code__)
    if names & {SDPA_NAME, _DISPATCH}:
        return True
    return depth > 0 and any(reaches_sdpa(helper, owner, depth - 1) for helper in _helpers(function, names, owner))


def calls_sdpa_of_torch(function: Callable) -> bool:
    """Whether ``function`` itself calls ``torch.nn.functional.scaled_dot_product_attention``, by this whole name."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    whole = {"torch", "nn", "functional", SDPA_NAME}
    return whole <= names_in(function.__code__) and function.__globals__.get("torch") is torch


def with_other_attention(function: Callable, owner: type, functional: Any, dispatch: Callable) -> Callable | None:
    """A copy of ``function`` for which ``F`` means ``functional``, and which instead of ``dispatch_attention_fn(...)``
    calls ``dispatch(dispatch_attention_fn, ...)``; None unless the code shows that it calls attention by these two
    names and in no other way."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    names, variables = names_in(function.__code__), function.__globals__
    if "super" in names or any(reaches_sdpa(h, owner) for h in _helpers(function, names - {_DISPATCH}, owner)):
        return None
    replaced: dict[str, Any] = {}
    if SDPA_NAME in names:
        if "functional" in names or variables.get("F") is not F:
            return None
        replaced["F"] = functional
    if _DISPATCH in names:
        if _DISPATCH in function.__code__.co_varnames or _DISPATCH not in variables:
            return None
        replaced[_DISPATCH] = lambda *args, **kwargs: dispatch(variables[_DISPATCH], *args, **kwargs)
    return copy_over(function, replaced) if replaced else None


def _helpers(function: FunctionType, names: set[str], owner: type) -> Iterator[FunctionType]:
    for name in names:
        helper = inspect.getattr_static(owner, name, function.__globals__.get(name))
        if isinstance(helper, (staticmethod, classmethod)):
            helper = helper.__func__
        if isinstance(helper, FunctionType) and helper is not function:
            yield helper


def names_of(function: Callable) -> set[str]:
    function = inspect.unwrap(function)
    return names_in(function.__code__) if isinstance(function, FunctionType) else set()
