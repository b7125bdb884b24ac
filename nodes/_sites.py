"""Where the modules of a VAE or text encoder compute attention, read from the modules and from their code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

ARGUMENT = "optimized_attention"
#: ComfyUI's attention functions, and the function that returns one of them
HOST_FUNCTIONS = frozenset({"optimized_attention", "optimized_attention_masked", "optimized_attention_for_device"})
_SDPA = "scaled_dot_product_attention"
_HELPER_DEPTH = 2


def attributes(module: nn.Module) -> list[str]:
    """Attention functions that the module holds itself: ``optimized_attention``, ``optimized_vae_attention``."""
    held = vars(module).items()
    return [name for name, value in held if name.startswith("optimized_") and name.endswith("attention") and value]


def argument_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules whose forward is given the attention function and hands it to no module below: name, module, and the
    argument's position in a call."""
    for name, module in model.named_modules():
        position = _position(type(module))  # type: ignore[arg-type]  # mypy: a class is not Hashable
        below = (child for child in module.modules() if child is not module)
        if position is not None and all(_position(type(child)) is None for child in below):  # type: ignore[arg-type]
            yield name, module, position


@functools.cache
def _position(kind: type[nn.Module]) -> int | None:
    names = list(inspect.signature(kind.forward).parameters)
    return names.index(ARGUMENT) - 1 if ARGUMENT in names else None


def host_names(kind: type[nn.Module]) -> set[str]:
    """Names of ComfyUI's attention functions that ``forward`` itself looks up among the globals of its file; none if
    ``forward`` is not a plain function."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return set()
    return {name for name in HOST_FUNCTIONS & set(_names(forward.__code__)) if name in forward.__globals__}


def calls_directly(model: nn.Module, known: Iterable[str]) -> list[str]:
    """Names of modules whose code, or a helper of it, names an attention function, besides the modules ``known`` and
    those around them."""
    known = set(known)
    return [
        name
        for name, module in model.named_modules()
        if reaches_attention(type(module))  # type: ignore[arg-type]
        and not any(_is_within(other, name) for other in known)
    ]


def _is_within(name: str, around: str) -> bool:
    return name == around or not around or name.startswith(f"{around}.")


@functools.cache
def reaches_attention(kind: type[nn.Module]) -> bool:
    """Whether a method of the class names an attention function, itself or in a function of its file."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [method for base in own for name, method in vars(base).items() if name != "__init__"]
    return any(_reaches(method, _HELPER_DEPTH) for method in methods)


def _reaches(function: Any, depth: int) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return False
    names = set(_names(function.__code__))
    if names & {_SDPA, *HOST_FUNCTIONS}:
        return True
    helpers = (function.__globals__.get(name) for name in names)
    return depth > 0 and any(_reaches(h, depth - 1) for h in helpers if isinstance(h, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
