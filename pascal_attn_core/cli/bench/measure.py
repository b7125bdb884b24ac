"""Every candidate of ``pascal-attn bench`` on one attention call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...capture import CapturedCall
from ...checks import gap
from ...observe.memory import available_bytes
from ..oracle import reference, spread_rows
from .candidates import BASELINE, Attend, Candidate, torch_kernel
from .clock import Clock
from .contest import Entrant, Result, Settings, Work, compete, silent

_SHARE_OF_MEMORY = 0.7


def race(
    call: CapturedCall,
    candidates: list[Candidate],
    clock: Clock,
    settings: Settings,
    progress: Callable[[str], None] = silent,
) -> list[Result]:
    """One result per candidate, in their order; the first is the unit of the ratios."""
    oracle = _Oracle(call, settings)
    entrants = [
        Entrant(
            candidate.name,
            functools.partial(oracle.work, candidate),
            ran=torch_kernel(call) if candidate.name == BASELINE else "",
            note=_too_much(candidate, call, settings),
        )
        for candidate in candidates
    ]
    operations = needed_operations(call, backward=settings.backward)
    return compete(entrants, oracle.error_of, operations, clock, settings, progress)


def needed_operations(call: CapturedCall, *, backward: bool = False) -> int:
    """Operations of the products that the definition has, a multiply-add counted as two: 2 products forward, and 5 more
    for the gradients, one of them Q K^T again. What ``is_causal`` forbids is not counted, what a mask forbids is."""
    (rows, head_dim), keys, head_dim_v = call.query.shape[-2:], call.key.shape[-2], call.value.shape[-1]
    visible = sum(min(row + 1, keys) for row in range(rows)) if call.is_causal else rows * keys
    products = (4 * head_dim + 3 * head_dim_v) if backward else head_dim + head_dim_v
    return 2 * math.prod(call.query.shape[:-2]) * visible * products


def _too_much(candidate: Candidate, call: CapturedCall, settings: Settings) -> str:
    needed = candidate.extra_bytes(call) * (2 if settings.backward else 1)
    available = available_bytes(call.query.device)
    if available is None or needed <= _SHARE_OF_MEMORY * available:
        return ""
    return f"skipped: needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


class _Oracle:
    """The work of a candidate, and the check of its result."""

    def __init__(self, call: CapturedCall, settings: Settings):
        self.call, self.backward = call, settings.backward
        self.rows = spread_rows(call.query.shape[-2], settings.error_rows).to(call.query.device)
        self.tensors: tuple[Tensor, ...] = (call.query, call.key, call.value)
        if not self.backward:
            self.expected = reference(call, self.rows)
            return
        self.tensors = tuple(t.detach().clone().requires_grad_() for t in self.tensors)
        generator = torch.Generator().manual_seed(1)
        size = (*call.query.shape[:-1], call.value.shape[-1])
        self.grad = torch.randn(size, generator=generator).to(call.query)
        # The output gradient is zero but in some rows: the same work for every candidate, far less for the reference.
        self.sparse_grad = torch.zeros_like(self.grad)
        self.sparse_grad[..., self.rows, :] = self.grad[..., self.rows, :]
        self.expected = reference(call, self.rows, self.grad[..., self.rows, :])

    def work(self, candidate: Candidate) -> Work:
        """The call by one candidate, with gradients of the whole output to time, of some rows to check."""
        attend = candidate.prepare(self.call)
        if self.backward:
            return Work(*(functools.partial(self._gradients, attend, g) for g in (self.grad, self.sparse_grad)))
        forward = functools.partial(self._forward, attend)
        return Work(forward, forward)

    def _forward(self, attend: Attend) -> Tensor:
        with torch.no_grad():
            return attend(*self.tensors)

    def _gradients(self, attend: Attend, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*self.tensors), self.tensors, grad)

    def error_of(self, found: Any) -> float:
        """The largest difference divided by the largest value of the reference, the worst of the outputs."""
        outs = found if self.backward else (found[..., self.rows, :],)
        return max((gap(out, expected).relative for out, expected in zip(outs, self.expected)), default=0.0)
