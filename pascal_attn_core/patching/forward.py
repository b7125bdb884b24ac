"""A replacement for one module's ``forward``, below the hooks of hosts, which may come and go over it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .hosts import forward_slots


class ReplacedForward:
    """Stands in a module in place of its ``forward``. It has slots, so that hooks that wrap it copy no attributes from
    it.

    Attributes:
        inner: what stood in the module before; None = its class's forward counts.
        whole: the module's forward without us.
    """

    __slots__ = ("__weakref__", "_defined", "inner", "module", "whole")

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None):
        self.module, self.inner = module, inner
        self._defined = type(module).forward
        self.whole = inner or types.MethodType(self._defined, module)

    def follow_class(self) -> None:
        """Take over a forward that the module's class was given since; asked at the beginning of each call."""
        if type(self.module).forward is not self._defined and self.inner is None:
            self._defined = type(self.module).forward
            self.whole = types.MethodType(self._defined, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.whole)

    def __reduce__(self) -> tuple:
        """Copied or pickled, only the module's own forward remains: a file must not depend on this package."""
        return (getattr, (self.module, "forward")) if self.inner is None else (functools.partial, (self.inner,))


Replaced = TypeVar("Replaced", bound=ReplacedForward)


def put_in(module: nn.Module, make: Callable[[nn.Module, Callable[..., Any] | None], Replaced]) -> Replaced:
    """Let ``make(module, what stood there)`` take the place of the module's forward, below all hooks."""
    holder, key = next(forward_slots(module))
    replaced = holder[key] = make(module, holder.get(key))
    return replaced


def take_out(replaced: ReplacedForward) -> list[str]:
    """Put back what stood there before, unless another forward was put over it; returns what could not be undone."""
    for place, key in forward_slots(replaced.module):
        if place.get(key) is replaced:
            if replaced.inner is not None or key != "forward" or place is not replaced.module.__dict__:
                place[key] = replaced.whole
            else:
                del place[key]
            return []
    what = f"the forward of a {type(replaced.module).__name__} was replaced while patched"
    return [f"{what}; ours stays underneath it and passes every call through"]
