"""A replacement for one module's ``forward``."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


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
        """Pickled, only the module's own forward remains: a file must not depend on this package."""
        return (getattr, (self.module, "forward")) if self.inner is None else (functools.partial, (self.inner,))
