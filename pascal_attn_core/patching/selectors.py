"""``include`` and ``exclude``: which modules of a model a patch is meant for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

Selector = str | type | Callable[[str, nn.Module], Any]


class Found(NamedTuple):
    """A module that was found: its qualified name, "" for the model itself; and where a patch leaves it alone, a state,
    :data:`.patch.OFF` or :data:`.patch.UNABLE`, and why."""

    name: str
    module: nn.Module
    state: str = ""
    why: str = ""


def selectors(what: str, given: Any) -> list[Selector]:
    """An argument as a list: a shell pattern for the qualified name (``"blocks.*.ffn"``), a class, a predicate
    ``(name, module) -> bool``, several of them, or None; raises TypeError for anything else."""
    if given is None:
        return []
    several = [given] if isinstance(given, (str, type)) or callable(given) else given
    if not isinstance(several, Iterable):
        raise TypeError(f"{what} must be a pattern, a class, a predicate or several of them, got {given!r}")
    several = list(several)
    for one in several:
        if not (isinstance(one, (str, type)) or callable(one)):
            raise TypeError(f"{what} must hold patterns, classes and predicates, got {one!r}")
    return several


def require_matches(model: nn.Module, **given: Any) -> None:
    """Raise ValueError if a pattern or a class among the arguments chooses no module of the model."""
    for what, value in given.items():
        for selector in selectors(what, value):
            # a predicate may rely on being asked about some modules only
            known = isinstance(selector, (str, type))
            if known and not any(matches([selector], name, module) for name, module in model.named_modules()):
                raise ValueError(f"{what} must choose a module, got {selector!r}, which matches none")


def matches(chosen: list[Selector], name: str, module: nn.Module) -> bool:
    """Whether any of them chooses the module with this qualified name."""

    def chooses(selector: Selector) -> Any:
        if isinstance(selector, str):
            return fnmatchcase(name, selector)
        return isinstance(module, selector) if isinstance(selector, type) else selector(name, module)

    return any(map(chooses, chosen))
