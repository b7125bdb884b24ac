"""Every candidate of ``pascal-attn bench`` on one attention call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...capture import CapturedCall
from ...reference.checks import gap
from ..oracle import reference, spread_rows
from .candidates import BASELINE, Candidate, torch_kernel
from .clock import Clock
from .contest import Entrant, Result, Settings, Work, compete, no_room, silent


def race(
    call: CapturedCall,
    candidates: list[Candidate],
    clock: Clock,
    settings: Settings,
    progress: Callable[[str], None] = silent,
) -> list[Result]:
    """One result per candidate, in their order; the first is the unit of the ratios."""
    rows = spread_rows(call.query.shape[-2], settings.error_rows).to(call.query.device)
    tensors: tuple[Tensor, ...] = (call.query, call.key, call.value)
    if settings.backward:
        tensors = tuple(t.detach().clone().requires_grad_() for t in tensors)
    grads = _gradients(call, rows) if settings.backward else (None, None)
    expected = reference(call, rows, None if grads[1] is None else grads[1][..., rows, :])

    def prepared(candidate: Candidate) -> Work:
        attend = candidate.prepare(call)

        def run(grad: Tensor | None) -> tuple[Tensor, ...]:
            if grad is not None:
                return torch.autograd.grad(attend(*tensors), tensors, grad)
            with torch.no_grad():
                return (attend(*tensors),)

        return Work(*(functools.partial(run, grad) for grad in grads))

    def error_of(found: tuple[Tensor, ...]) -> float:
        """The largest difference divided by the largest value of the reference, the worst of the outputs."""
        outs = found if settings.backward else (found[0][..., rows, :],)
        return max((gap(out, right).relative for out, right in zip(outs, expected)), default=0.0)

    entrants = []
    for candidate in candidates:
        note = no_room(candidate.extra_bytes(call) * (1 + settings.backward), clock.device)
        ran = torch_kernel(call) if candidate.name == BASELINE else ""
        entrants.append(Entrant(candidate.name, functools.partial(prepared, candidate), ran, note))
    operations = needed_operations(call, backward=settings.backward)
    return compete(entrants, error_of, operations, clock, settings, progress)


def _gradients(call: CapturedCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the output: one to time, and one to check, which is zero but in some rows: far less work for the
    reference, but a card draws less power over zeros and may run faster."""
    size = (*call.query.shape[:-1], call.value.shape[-1])
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(call.query)
    sparse = torch.zeros_like(drawn)
    sparse[..., rows, :] = drawn[..., rows, :]
    return drawn, sparse


def needed_operations(call: CapturedCall, *, backward: bool = False) -> int:
    """Operations of the products that the definition has, a multiply-add counted as two: 2 products forward, and 5 more
    for the gradients, one of them Q K^T again. What ``is_causal`` forbids is not counted, what a mask forbids is."""
    (rows, head_dim), keys, head_dim_v = call.query.shape[-2:], call.key.shape[-2], call.value.shape[-1]
    visible = sum(min(row + 1, keys) for row in range(rows)) if call.is_causal else rows * keys
    products = (4 * head_dim + 3 * head_dim_v) if backward else head_dim + head_dim_v
    return 2 * math.prod(call.query.shape[:-2]) * visible * products
