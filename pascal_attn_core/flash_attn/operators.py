"""flash-attn's operators, ``torch.ops.flash_attn._flash_attn_forward`` and three more, while our modules stand in for
it. Programs call them by their ``_wrapped_`` names, or name them in a policy of what to keep for the
backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..call import accumulate_dtype
from .install import RAW_NAMES
from .modules import raw

_NAMESPACE = "flash_attn"
# The types of parameters in a schema; all others are tensors, optional ones if they have the default None.
_TYPES = {
    **dict.fromkeys(("dropout_p", "softcap"), "float"),
    **dict.fromkeys(("causal", "return_softmax", "deterministic", "zero_tensors"), "bool"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "window_size_left", "window_size_right", "num_splits"), "SymInt"),
    "softmax_scale": "float?",
    "dq": "Tensor(a!)",
    "dk": "Tensor(b!)",
    "dv": "Tensor(c!)",
}


def define() -> Callable[[], None]:
    """Define those operators that do not exist; returns a function that removes them."""
    library = Library(_NAMESPACE, "FRAGMENT")
    for name in RAW_NAMES:
        operator = f"_{name}"
        if hasattr(getattr(torch.ops, _NAMESPACE), operator):
            continue  # the real package's, which has been imported in this process
        library.define(operator + _schema(name))
        library.impl(operator, getattr(raw, name), "CompositeExplicitAutograd")
        fake = _backward if "backward" in name else _forward
        torch.library.register_fake(f"{_NAMESPACE}::{operator}", fake, lib=library)
        _defined.add(name)

    def take_away() -> None:
        _defined.clear()
        library._destroy()

    return take_away


def __getattr__(name: str) -> Callable[..., Any]:
    """``wrapped_flash_attn_forward`` ...: the operator, which torch.compile takes as one node, or the function where
    the operator is the real package's."""
    own = name.removeprefix("wrapped_")
    if own == name or own not in RAW_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.ops.flash_attn, f"_{own}") if own in _defined else getattr(raw, own)


_defined: set[str] = set()


def _schema(name: str) -> str:
    """The schema of an operator, with the parameters and defaults of its function."""
    parts = []
    for parameter in inspect.signature(getattr(raw, name)).parameters.values():
        has_default = parameter.default is not parameter.empty
        kind = _TYPES.get(parameter.name, "Tensor?" if has_default else "Tensor")
        parts.append(f"{kind} {parameter.name}" + (f"={parameter.default}" if has_default else ""))
    results = "Tensor" if "backward" in name else "(Tensor, Tensor, Tensor, Tensor)"
    return f"({', '.join(parts)}) -> {results}"


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Empty results of a forward pass."""
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=accumulate_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _backward(dout: Tensor, q: Tensor, *_: Any, **__: Any) -> Tensor:
    """An empty result of a backward pass."""
    return q.new_empty(0)
