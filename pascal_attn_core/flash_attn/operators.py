"""flash-attn's operators, ``torch.ops.flash_attn._flash_attn_forward`` and its likes, for as long as our modules stand
in for it. Programs call them by their ``_wrapped_`` names, or name them in a policy of what to keep for the backward
pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .modules import raw

_NAMESPACE = "flash_attn"
_OPTIONS = (
    "float dropout_p, float? softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes"
)
_OPTIONS_WITH_DEFAULTS = (
    "float dropout_p, float? softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None"
)
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_RESULTS = "-> (Tensor, Tensor, Tensor, Tensor)"
_SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
_TARGETS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_SCHEMAS = {
    "flash_attn_forward": f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool return_softmax) {_RESULTS}",
    "flash_attn_backward": f"({_SAVED}, {_TARGETS}, {_OPTIONS}, bool deterministic, Tensor? rng_state=None) -> Tensor",
    "flash_attn_varlen_forward": f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_OPTIONS_WITH_DEFAULTS}, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    f"bool zero_tensors=False, SymInt num_splits=0) {_RESULTS}",
    "flash_attn_varlen_backward": f"({_SAVED}, {_TARGETS}, {_LENGTHS}, {_OPTIONS}, bool deterministic, "
    "Tensor? rng_state=None, bool zero_tensors=False) -> Tensor",
}


def define() -> Callable[[], None]:
    """Define those operators that do not exist; returns what takes them away."""
    library = Library(_NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        operator = f"_{name}"
        if hasattr(getattr(torch.ops, _NAMESPACE), operator):
            continue  # the real package's, which has been imported in this process
        library.define(operator + schema)
        library.impl(operator, getattr(raw, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{operator}", _FAKES[name], lib=library)
        _defined.add(name)

    def take_away() -> None:
        _defined.clear()
        library._destroy()

    return take_away


def __getattr__(name: str) -> Callable[..., Any]:
    """``wrapped_flash_attn_forward`` ...: the operator, which torch.compile takes as one node, or the function where
    the operator is the real package's."""
    own = name.removeprefix("wrapped_")
    if own == name or own not in _SCHEMAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.ops.flash_attn, f"_{own}") if own in _defined else getattr(raw, own)


_defined: set[str] = set()


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    batch, tokens, heads, _dim = q.shape
    return _results(q, q.new_empty(batch, tokens, heads, v.shape[-1]), (batch, heads, tokens), 1)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *given: Any, **named: Any
) -> tuple[Tensor, ...]:
    total, heads, _dim = q.shape
    dropout_p = given[3] if len(given) > 3 else named["dropout_p"]
    sequences = cu_seqlens_q.shape[0] - 1 if dropout_p else 1
    return _results(q, q.new_empty(total, heads, v.shape[-1]), (heads, total), sequences)


def _results(q: Tensor, out: Tensor, lse_shape: tuple[int, ...], sequences: int) -> tuple[Tensor, ...]:
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse, q.new_empty(0), q.new_empty(max(2, sequences), dtype=torch.int64)


def _backward(dout: Tensor, q: Tensor, *_: Any, **__: Any) -> Tensor:
    batch, tokens, heads, _dim = q.shape
    return q.new_empty(batch, heads, tokens + -tokens % 128, dtype=torch.float32)


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[1], q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1), dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "flash_attn_forward": _forward,
    "flash_attn_backward": _backward,
    "flash_attn_varlen_forward": _varlen_forward,
    "flash_attn_varlen_backward": _varlen_backward,
}
