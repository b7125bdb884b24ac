"""The candidates of ``pascal-attn bench``: torch and our routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import AttentionConfig, sdpa
from ...capture import CapturedCall
from ...routes import route_names
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
    prepare: Callable[[CapturedCall], Attend]
    extra_bytes: Callable[[CapturedCall], int] = lambda call: 0


#: what a program adds to the candidates, see tools/peers.py
MORE: list[Candidate] = []


def all_candidates(config: AttentionConfig, device_type: str = "cpu") -> list[Candidate]:
    """Everything that can run in this installation. On ``"cuda"`` each of torch's kernels by name too: on a CPU its own
    function has no choice."""
    found = route_candidates(config)
    if device_type == "cuda":
        found += [Candidate(f"torch-{name}", _torch_backend(backend)) for name, backend in _BACKENDS.items()]
    return [*found, _ours("ours-tiled-online", replace(config, route="tiled", softmax="online")), *MORE]


def route_candidates(config: AttentionConfig) -> list[Candidate]:
    """Torch's own function, its math kernel, our choice and each of our routes by name."""
    found = [
        Candidate(BASELINE, _torch_fused, extra_bytes=_torch_bytes),
        Candidate("torch-math", _torch_backend(SDPBackend.MATH), extra_bytes=_score_bytes),
        _ours("ours-auto", config),
    ]
    found += [_ours(f"ours-{route}", replace(config, route=route)) for route in route_names() if route != "math"]
    math_route = _ours("ours-math", replace(config, route="math", math_limit_mib=1e9))  # it is chosen by name
    return [*found, replace(math_route, extra_bytes=_score_bytes)]


def choose_candidates(candidates: list[Candidate], patterns: str) -> list[Candidate]:
    """The candidates named by a comma-separated list of names or patterns; ``ours-`` may be left out. The baseline is
    always in.

    Raises:
        ValueError: a pattern that matches no candidate.
    """
    wanted = choose("candidate", candidates, patterns, prefix="ours-")
    return [c for c in candidates if c.name == BASELINE or c in wanted]


def torch_kernel(call: CapturedCall) -> str:
    """The kernel that torch's own function picks for a call: ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``."""
    try:
        choice = torch._fused_sdp_choice(call.query, call.key, call.value, call.attn_mask, **_options(call))
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):  # private: may change, or lack a device
        return "?"
    return next((name for name, backend in _BACKENDS.items() if int(backend) == choice), "math")


def _torch_fused(call: CapturedCall) -> Attend:
    return _bound(F.scaled_dot_product_attention, call)


def _torch_backend(backend: SDPBackend) -> Callable[[CapturedCall], Attend]:
    def prepare(call: CapturedCall) -> Attend:
        attend = _bound(F.scaled_dot_product_attention, call)

        def attend_by_it(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(query, key, value)

        return attend_by_it

    return prepare


def _ours(name: str, config: AttentionConfig) -> Candidate:
    return Candidate(name, lambda call: _bound(sdpa, call, config=config))


def _bound(attend: Callable[..., Tensor], call: CapturedCall, **more: Any) -> Attend:
    """The function with the mask and the options of a call."""
    mask, options = call.attn_mask, {**_options(call), **more}
    return lambda query, key, value: attend(query, key, value, mask, **options)


def _options(call: CapturedCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}


def _score_bytes(call: CapturedCall) -> int:
    """Scores and probabilities in float32, as torch's math attention keeps them."""
    return 2 * 4 * math.prod(call.query.shape[:-1]) * call.key.shape[-2]


def _torch_bytes(call: CapturedCall) -> int:
    return _score_bytes(call) if torch_kernel(call) == "math" else 0
