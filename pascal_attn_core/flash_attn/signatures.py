"""Signatures of flash-attn's versions, written as text, and what a function of ours does with each argument."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_KEPT = ("__module__", "__name__", "__qualname__", "__doc__")  # of a function that is given another signature


def called_as(
    parameters: str, *, renamed: Mapping[str, str] | None = None, ignored: str = "", refused: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a function the signature of another version of flash-attn: Python compiles a function of
    that signature once, so that a call costs no more than any other.

    Args:
        parameters: all parameters in order, ``"q k v softmax_scale=None causal=False"``; those after ``*`` are given by
            name only. The function gets each of them by name, also if it has its default.
        renamed: their name -> the name under which the function gets it.
        ignored: parameters that change nothing here; the function does not get them.
        refused: parameters that are not supported: they raise a NotImplementedError unless they have their default.
    """
    parts = parameters.split()
    defaults = dict(part.partition("=")[::2] for part in parts if part != "*")  # name -> the text of its default
    refusing = {name: ast.literal_eval(defaults[name]) for name in refused.split()}
    ours = {name: (renamed or {}).get(name, name) for name in defaults if name not in {*ignored.split(), *refusing}}
    lines = [
        f"def make({', '.join(['_function', *(f'_{name}' for name in refusing)])}):",
        f"    def call({', '.join(parts)}):",
        *(f"        if {name} is not _{name}: _refuse('{name}', {name}, _{name})" for name in refusing),
        f"        return _function({', '.join(f'{inner}={name}' for name, inner in ours.items())})",
        "    return call",
    ]
    code = compile("\n".join(lines), f"<called as {parameters}>", "exec")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(code, globals(), scope)  # noqa: S102  the text above
        call = scope["make"](function, *refusing.values())
        for name in _KEPT:
            setattr(call, name, getattr(function, name))
        return call

    return decorate


def options_of(function: Callable[..., Any], first: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a function ``(own, ..., *options, **named)`` that passes its options on to ``function``: its
    signature shows the parameters of ``function`` from number ``first`` on."""

    def decorate(packed: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(packed).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        options = list(inspect.signature(function).parameters.values())[first:]
        packed.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return packed

    return decorate


def _refuse(name: str, value: Any, default: Any) -> None:
    if isinstance(value, Tensor):
        raise NotImplementedError(f"{name} is not supported by Pascal Attention; got a tensor {list(value.shape)}")
    if value is not None and value != default:
        raise NotImplementedError(f"{name} is not supported by Pascal Attention; got {value!r}")
