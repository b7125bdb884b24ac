"""``pascal_attn::derivative``: the functions of :mod:`.derivatives` as one node of a graph that records operators, as
``make_fx`` does, and so ``torch.func.linearize``. Imported at the first use only, see :mod:`.operator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_recorded: list[tuple[Callable[..., Any], list[Any]]] = []  # what a graph knows by a number: it may run at any time


@torch.library.custom_op(
    "pascal_attn::derivative", mutates_args=(), schema="(Tensor?[] tensors, int number) -> Tensor[]"
)
def _derivative(tensors: Sequence[Tensor | None], number: int) -> list[Tensor]:
    (compute, others), given = _recorded[number], iter(tensors)
    found = compute(*(next(given) if other is None else other for other in others))
    return [torch.empty(0, dtype=torch.bool) if t is None else t for t in found]


def derivative(compute: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """``compute(*inputs)`` as one node."""
    is_tensor = [t is None or isinstance(t, Tensor) for t in inputs]
    _recorded.append((compute, [None if each else t for t, each in zip(inputs, is_tensor)]))
    found = _derivative([t for t, each in zip(inputs, is_tensor) if each], len(_recorded) - 1)
    return tuple(None if t.dtype == torch.bool else t for t in found)


@torch.compiler.disable
def uncompiled(compute: Callable[..., Any], *inputs: Any) -> Any:
    """``compute(*inputs)``. A function that torch.compile leaves because of a transform runs as it is, but each one
    that it calls would be compiled by itself."""
    return compute(*inputs)
