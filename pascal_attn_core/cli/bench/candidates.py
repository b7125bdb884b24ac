"""The candidates of ``pascal-attn bench``, torch and our routes, and all of them on one attention call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import AttentionConfig, sdpa
from ...call import Arguments
from ...reference.checks import gap
from ...routes import route_names
from ..oracle import reference, spread_rows
from .contest import BenchSettings, Entrant, Result, Step, compete, no_room
from .shapes import choose

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

BASELINE = "torch-fused"
_BACKENDS: dict[str, Any] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    Attributes:
        name: as on the command line.
        prepare: makes, outside of the time measured, a function of (query, key, value) for one call.
        extra_bytes: a rough estimate of the memory it needs, to skip it before it fills the machine.
    """

    name: str
    prepare: Callable[[Arguments], Attend]
    extra_bytes: Callable[[Arguments], int] = lambda call: 0


#: what a program adds to the candidates, see tools/peers.py
MORE: list[Candidate] = []


def all_candidates(config: AttentionConfig, device_type: str = "cpu") -> list[Candidate]:
    """Everything that can run in this installation. On ``"cuda"`` each of torch's kernels by name too: on a CPU its own
    function has no choice."""
    found = route_candidates(config)
    if device_type == "cuda":
        found += [Candidate(f"torch-{name}", _torch_by(backend)) for name, backend in _BACKENDS.items()]
    return [*found, _ours("tiled-online", replace(config, route="tiled", softmax="online")), *MORE]


def route_candidates(config: AttentionConfig) -> list[Candidate]:
    """Torch's own function, its math kernel, our choice and each of our routes by name."""
    by_name = {route: replace(config, route=route) for route in route_names() if route != "math"}
    math_route = _ours("math", replace(config, route="math", math_limit_mib=1e9))  # it is chosen by name
    return [
        Candidate(BASELINE, _by(F.scaled_dot_product_attention), extra_bytes=_torch_bytes),
        Candidate("torch-math", _torch_by(SDPBackend.MATH), extra_bytes=_score_bytes),
        *(_ours(name, its_config) for name, its_config in {"auto": config, **by_name}.items()),
        replace(math_route, extra_bytes=_score_bytes),
    ]


def choose_candidates(candidates: list[Candidate], patterns: str) -> list[Candidate]:
    """The candidates that :func:`choose` finds, whose ``ours-`` may be left out; the baseline is always among them."""
    wanted = choose("candidate", candidates, patterns, prefix="ours-")
    return [c for c in candidates if c.name == BASELINE or c in wanted]


def torch_kernel(call: Arguments) -> str:
    """The kernel that torch's own function picks for a call: ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``."""
    try:
        choice = torch._fused_sdp_choice(call.query, call.key, call.value, call.attn_mask, **_options(call))
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):  # private: may change, or lack a device
        return "?"
    return next((name for name, backend in _BACKENDS.items() if int(backend) == choice), "math")


def _by(attend: Callable[..., Tensor], **more: Any) -> Callable[[Arguments], Attend]:
    """``prepare`` of a candidate that takes the mask and the options of a call as torch's function does."""

    def prepare(call: Arguments) -> Attend:
        options = {"attn_mask": call.attn_mask, **_options(call), **more}
        return lambda query, key, value: attend(query, key, value, **options)

    return prepare


def _torch_by(backend: SDPBackend) -> Callable[[Arguments], Attend]:
    return _by(sdpa_kernel(backend)(F.scaled_dot_product_attention))


def _ours(name: str, config: AttentionConfig) -> Candidate:
    return Candidate(f"ours-{name}", _by(sdpa, config=config))


def _options(call: Arguments) -> dict[str, Any]:
    return {name: getattr(call, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}


def _score_bytes(call: Arguments) -> int:
    """Scores and probabilities in float32, as torch's math attention keeps them."""
    return 2 * 4 * math.prod(call.query.shape[:-1]) * call.key.shape[-2]


def _torch_bytes(call: Arguments) -> int:
    return _score_bytes(call) if torch_kernel(call) == "math" else 0


# ---- on one call -----------------------------------------------------------------------------------------------------


def race(call: Arguments, candidates: list[Candidate], settings: BenchSettings, *progress: Any) -> list[Result]:
    """One result per candidate, in their order; the first is the unit of the ratios."""
    rows = spread_rows(call.query.shape[-2], settings.error_rows).to(call.query.device)
    tensors: tuple[Tensor, ...] = (call.query, call.key, call.value)
    if settings.backward:
        tensors = tuple(t.detach().clone().requires_grad_() for t in tensors)
    grads = _gradients(call, rows) if settings.backward else (None, None)
    expected = reference(call, rows, None if grads[1] is None else grads[1][..., rows, :])

    def prepared(candidate: Candidate) -> tuple[Step, Step]:
        attend = candidate.prepare(call)

        def run(grad: Tensor | None) -> tuple[Tensor, ...]:
            if grad is not None:
                return torch.autograd.grad(attend(*tensors), tensors, grad)
            with torch.no_grad():
                return (attend(*tensors),)

        return functools.partial(run, grads[0]), functools.partial(run, grads[1])

    def error_of(found: tuple[Tensor, ...]) -> float:
        """The largest difference divided by the largest value of the reference, the worst of the outputs."""
        outs = found if settings.backward else (found[0][..., rows, :],)
        return max((gap(out, right).relative for out, right in zip(outs, expected)), default=0.0)

    entrants = []
    for candidate in candidates:
        note = no_room(candidate.extra_bytes(call) * (1 + settings.backward), call.query.device)
        ran = torch_kernel(call) if candidate.name == BASELINE else ""
        entrants.append(Entrant(candidate.name, functools.partial(prepared, candidate), ran, note))
    operations = needed_operations(call, backward=settings.backward)
    return compete(entrants, error_of, operations, call.query.device, settings, *progress)


def _gradients(call: Arguments, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the output: one to time, and one to check, which is zero but in some rows: far less work for the
    reference, but a card draws less power over zeros and may run faster."""
    size = (*call.query.shape[:-1], call.value.shape[-1])
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(call.query)
    sparse = torch.zeros_like(drawn)
    sparse[..., rows, :] = drawn[..., rows, :]
    return drawn, sparse


def needed_operations(call: Arguments, *, backward: bool = False) -> int:
    """Operations of the products that the definition has, a multiply-add counted as two: 2 products forward, and 5 more
    for the gradients, one of them Q K^T again. What ``is_causal`` forbids is not counted, what a mask forbids is."""
    (rows, head_dim), keys, head_dim_v = call.query.shape[-2:], call.key.shape[-2], call.value.shape[-1]
    visible = sum(min(row + 1, keys) for row in range(rows)) if call.is_causal else rows * keys
    products = (4 * head_dim + 3 * head_dim_v) if backward else head_dim + head_dim_v
    return 2 * math.prod(call.query.shape[:-2]) * visible * products
