"""Calls of ComfyUI's attention functions that no override sees: of modules that look one of them up by its name.

``wrap_attn`` of ComfyUI puts a wrapper around each of its functions. It hands a call that is announced in
``transformer_options`` to the override, and any other to the function, which is a variable of the wrapper's closure.
While a patched model runs, that variable is our function.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

OVERRIDE = "optimized_attention_override"
Attention = Callable[..., Any]
Catch = Callable[[Attention, tuple, dict[str, Any]], Any]

_local = threading.local()  # catch: of the model that this thread runs
_lock = threading.Lock()
_put_in: list[tuple[Any, Attention]] = []  # variables of closures, and the host's functions that were there
_users = 0


@contextmanager
def caught(catch: Catch) -> Iterator[None]:
    """Within it, this thread's calls past the override are ``catch(function, args, kwargs)``, with the host's own
    function for those that it leaves."""
    global _users
    with _lock:
        if not _users:
            _put_in.extend((variable, variable.cell_contents) for variable in _variables())
            for variable, function in _put_in:
                variable.cell_contents = _in_front_of(function)
        _users += 1
    before, _local.catch = getattr(_local, "catch", None), catch
    try:
        yield
    finally:
        _local.catch = before
        with _lock:
            _users -= 1
            while not _users and _put_in:
                variable, function = _put_in.pop()
                variable.cell_contents = function


def _variables() -> list[Any]:
    """The closures' variables that hold the host's functions, each once: a wrapper may have several names."""
    found: dict[int, Any] = {}
    for wrapper in vars(sys.modules.get("comfy.ldm.modules.attention", object)).values():
        if isinstance(wrapper, FunctionType) and hasattr(wrapper, "__wrapped__"):
            free = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or ()))
            found |= {id(wrapper): free["func"]} if "func" in free else {}
    return list(found.values())


def _in_front_of(function: Attention) -> Attention:
    @functools.wraps(function)
    def by_name(*args: Any, **kwargs: Any) -> Any:
        catch = None if torch.compiler.is_compiling() else getattr(_local, "catch", None)
        if catch is None or OVERRIDE in (kwargs.get("transformer_options") or ()):
            return function(*args, **kwargs)
        return catch(function, args, kwargs)

    return by_name
