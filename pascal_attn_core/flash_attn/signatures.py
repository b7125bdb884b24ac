"""Signatures of flash-attn's versions, written as text, and what our function does with each argument."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

_EMPTY = inspect.Parameter.empty


def called_as(
    parameters: str, *, renamed: Mapping[str, str] | None = None, ignored: str = "", refused: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a function the signature of another version of flash-attn.

    Args:
        parameters: all parameters in order, ``"q k v softmax_scale=None causal=False"``; those after ``*`` are given by
            name only. The function gets each of them by name, also if it has its default.
        renamed: their name -> the name under which the function gets it.
        ignored: parameters that change nothing here; the function does not get them.
        refused: parameters that are not supported: they raise a NotImplementedError unless they have their default.
    """
    signature = inspect.Signature(list(_parameters(parameters)))
    every = signature.parameters
    positional = [p.name for p in every.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in every.values() if p.default is not _EMPTY}
    refusing = [(name, defaults[name]) for name in refused.split()]
    dropped = {*ignored.split(), *refused.split()}
    passed = [(name, (renamed or {}).get(name, name)) for name in every if name not in dropped]
    count, most, names = len(every), len(positional), every.keys()

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(positional, args)), **kwargs}
            is_twice = bool(kwargs) and any(name in kwargs for name in positional[: len(args)])
            if len(given) != count or len(args) > most or is_twice or not given.keys() <= names:
                signature.bind(*args, **kwargs)  # raises the TypeError of an ordinary call
            for name, default in refusing:
                if given[name] is not default:
                    refuse(name, given[name], default)
            return function(**{ours: given[name] for name, ours in passed})

        call.__signature__ = signature  # type: ignore[attr-defined]
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


def _parameters(text: str) -> Iterator[inspect.Parameter]:
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in text.split():
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        name, _, default = part.partition("=")
        yield inspect.Parameter(name, kind, default=ast.literal_eval(default) if default else _EMPTY)


def refuse(name: str, value: Any, default: Any) -> None:
    """Raises a NotImplementedError if an argument that is not supported is neither None nor its default."""
    if isinstance(value, Tensor):
        raise NotImplementedError(f"{name} is not supported by Pascal Attention; got a tensor {list(value.shape)}")
    if value is not None and value != default:
        raise NotImplementedError(f"{name} is not supported by Pascal Attention; got {value!r}")
