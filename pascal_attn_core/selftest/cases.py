"""Every route on small calls of each kind, against float64: right, refused with a reason, or wrong."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention import sdpa, sdpa_with_lse
from ..config import AttentionConfig, UnsupportedAttention
from ..flash_attn import flash_attn_varlen_func
from ..reference import reference_sdpa
from ..reference.checks import exact_limit, gap
from ..routes import route_names

DTYPES = ("float32", "float16", "bfloat16")
AUTO = "auto"
ALL_ROUTES = (*route_names(), AUTO)
_VARLEN = ((60, 90), (1, 33), (130, 70))  # tokens of query and key of each sequence


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        way: ``"out"``, ``"lse"``, ``"gradients"``, ``"checkpoint"`` (gradients under gradient checkpointing),
            ``"compile"`` (gradients under ``torch.compile``), ``"varlen"`` (sequences of different lengths, by
            flash-attn's function and the default configuration).
        mask: ``""``, ``"bool"`` (half of the keys, and a row that sees none) or ``"float"``.
        is_strided: query, key and value are slices of one tensor ``[B, L, 3, H, D]``.
    """

    name: str
    way: str = "out"
    num_heads: int = 4
    num_kv_heads: int = 4
    seq_len_q: int = 150
    seq_len_kv: int = 210
    head_dim: int = 64
    mask: str = ""
    is_strided: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def has_gradients(self) -> bool:
        return self.way in ("gradients", "checkpoint", "compile")


CASES = (
    Case("plain"),
    Case("causal", options={"is_causal": True}),
    Case("bool mask", mask="bool"),
    Case("float mask", mask="float"),
    Case("grouped heads", num_heads=8, num_kv_heads=2, options={"enable_gqa": True}),
    Case("window", options={"window": (40, 20)}),
    Case("lse", "lse"),
    Case("varlen", "varlen"),
    Case("decode", num_heads=8, num_kv_heads=2, seq_len_q=1, seq_len_kv=1000, options={"enable_gqa": True}),
    Case("strides", seq_len_kv=150, is_strided=True),
    Case("gradients", "gradients", options={"is_causal": True}),
    Case("gradients, checkpointing", "checkpoint"),
    Case("gradients, torch.compile", "compile"),
)


class Check(NamedTuple):
    """The result of one call.

    Attributes:
        error: largest difference to float64, relative to the largest value; None where nothing was computed.
        limit: up to which ``error`` counts as right.
        refused: why the route does not take such a call: its own sentence.
        failed: what it raised instead.
    """

    case: str
    route: str
    dtype: str
    error: float | None = None
    limit: float = 0.0
    refused: str = ""
    failed: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failed and (bool(self.refused) or (self.error is not None and self.error <= self.limit))

    @property
    def text(self) -> str:
        """One line: what, and how it went."""
        if self.failed or self.refused:
            result = self.failed or f"refused: {self.refused}"
        else:
            result = f"differs from float64 by {self.error:.1e} (at most {self.limit:.0e})"
        return f"route {self.route}, {self.dtype}, {self.case}: {result}"


_Tensors = tuple[Tensor, ...]  # query, key, value


class _Sample(NamedTuple):
    """The tensors of a case, the float64 results on the CPU, and for each the largest relative error of an exact
    answer."""

    tensors: _Tensors
    mask: Tensor | None
    grad_out: Tensor
    expected: list[Tensor]
    limits: list[float]


def run_checks(device: torch.device, left: Callable[[], float]) -> Iterator[Check]:
    """Each route on each case in each dtype, while seconds are ``left``."""
    why_not_compiled = functools.cache(_why_not_compiled)
    for case in CASES:
        for dtype in DTYPES:
            try:
                sample = _sample(case, dtype, device)
            except RuntimeError as error:  # a device without this dtype, or one that no longer answers
                yield Check(case.name, "every", dtype, failed=in_one_line(error))
                continue
            for route in (AUTO,) if case.way == "varlen" else ALL_ROUTES:
                if left() <= 0:
                    return
                if case.way == "compile" and why_not_compiled():
                    yield Check(case.name, route, dtype, refused=why_not_compiled())
                else:
                    yield _check(case, route, dtype, sample)


def _check(case: Case, route: str, dtype: str, sample: _Sample) -> Check:
    # By name the math route takes everything; without a name no call is to go there for being short.
    config = AttentionConfig(route=route, math_limit_mib=1e6 if route == "math" else 0)
    try:
        found = _results(case, config, sample)
        errors = [gap(one, other).relative for one, other in zip(found, sample.expected)]
    except UnsupportedAttention as reason:
        return Check(case.name, route, dtype, refused="; ".join(reason.reasons))
    except Exception as failure:  # the test goes on: whatever it is belongs into the report
        return Check(case.name, route, dtype, failed=in_one_line(failure))
    error, limit = max(zip(errors, sample.limits), key=lambda pair: pair[0] / pair[1])
    return Check(case.name, route, dtype, error, limit)


def _results(case: Case, config: AttentionConfig, sample: _Sample) -> list[Tensor]:
    if case.way == "lse":
        query, key, value = sample.tensors
        return list(sdpa_with_lse(query, key, value, sample.mask, config=config, **case.options))
    if case.way == "varlen":
        return [_varlen(sample.tensors)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sdpa(query, key, value, sample.mask, config=config, **case.options)

    if not case.has_gradients:
        return [attend(*sample.tensors)]
    leaves = [t.detach().requires_grad_() for t in sample.tensors]
    with torch.enable_grad():
        if case.way == "checkpoint":
            out = checkpoint(attend, *leaves, use_reentrant=False)
        else:
            out = (_compiled(attend) if case.way == "compile" else attend)(*leaves)
        return [out, *torch.autograd.grad(out, leaves, sample.grad_out)]


def _compiled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled on its own: torch.compile keeps what it made with the code object, of which it takes only some versions,
    and a reset would throw away what the user has compiled."""

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value)

    code = alone.__code__.replace()  # another object, equal to it
    own = types.FunctionType(code, alone.__globals__, alone.__name__, None, alone.__closure__)
    return torch.compile(own, backend="aot_eager", fullgraph=True)


def _why_not_compiled() -> str:
    """Why torch.compile cannot be tested with this Python and torch, "" if it can."""
    try:
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(1))
    except Exception as error:
        return f"torch.compile does not work here: {in_one_line(error)}"
    return ""


def _varlen(tensors: _Tensors) -> Tensor:
    """``[1, H, total, D]``, the sequences one after another."""
    query, key, value = (t[0].transpose(0, 1) for t in tensors)
    q_ends, k_ends = (torch.tensor([0, *lengths]).cumsum(0).int().to(query.device) for lengths in zip(*_VARLEN))
    out = flash_attn_varlen_func(query, key, value, q_ends, k_ends, causal=True)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


# ---- the tensors, and what is right ----------------------------------------------------------------------------------


def _sample(case: Case, dtype: str, device: torch.device) -> _Sample:
    """The tensors of a case, drawn on the CPU: every machine gets the same numbers."""
    generator = torch.Generator().manual_seed(len(case.name))
    kind = getattr(torch, dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind)

    batch, rows, keys, dim = 2, case.seq_len_q, case.seq_len_kv, case.head_dim
    if case.way == "varlen":
        batch, (rows, keys) = 1, map(sum, zip(*_VARLEN))
    if case.is_strided:
        tensors = numbers(batch, rows, 3, case.num_heads, dim).permute(2, 0, 3, 1, 4).unbind()
    else:
        heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
        tensors = tuple(numbers(batch, count, size, dim) for count, size in zip(heads, (rows, keys, keys)))
    mask = None
    if case.mask:
        mask = numbers(1, case.num_heads, rows, keys)
        if case.mask == "bool":
            mask = mask > 0
            mask[..., 7, :] = False
    grad_out = numbers(batch, case.num_heads, rows, dim)
    expected, plain = (_expected(case, tensors, mask, grad_out, d) for d in (torch.float64, kind))
    gaps = [gap(one, other) for one, other in zip(plain, expected)]
    limits = [exact_limit(found, kind) / found.largest for found in gaps]
    there = tuple(_moved(t, device) for t in tensors)
    return _Sample(there, None if mask is None else mask.to(device), grad_out.to(device), expected, limits)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A view like this one of its whole memory on another device; moving the view itself would pack it."""
    base = tensor if tensor._base is None else tensor._base
    return torch.as_strided(base.to(device), tensor.shape, tensor.stride(), tensor.storage_offset())


def _expected(case: Case, tensors: _Tensors, mask: Tensor | None, grad_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The results of plain attention computed in ``dtype`` throughout."""
    query, key, value = (t.detach().to(dtype).requires_grad_(case.has_gradients) for t in tensors)
    mask = mask.to(dtype) if mask is not None and mask.dtype != torch.bool else mask
    if case.way == "varlen":
        q_lengths, k_lengths = map(list, zip(*_VARLEN))
        parts = zip(query.split(q_lengths, dim=2), key.split(k_lengths, dim=2), value.split(k_lengths, dim=2))
        outs = [reference_sdpa(q, k, v, is_causal=True, alignment="lower_right")[0] for q, k, v in parts]
        return [torch.cat(outs, dim=2)]
    with torch.set_grad_enabled(case.has_gradients):  # a host may have switched them off
        out, lse = reference_sdpa(query, key, value, mask, **case.options)
    if case.has_gradients:
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out.to(dtype))]
    return [out, lse] if case.way == "lse" else [out]


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
