"""The candidates of ``pascal-attn bench``: torch, our routes, the peers that are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...attention import sdpa
from ...capture import CapturedCall
from ...config import AttentionConfig
from ...routes import route_names
from .choice import choose

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


def all_candidates(config: AttentionConfig, device_type: str = "cpu") -> tuple[list[Candidate], list[str]]:
    """Everything that can run in this installation, and one sentence for each peer that cannot. On ``"cuda"`` each of
    torch's kernels by name too: on a CPU its own function has no choice. No peer is imported before it runs."""
    found = route_candidates(config)
    if device_type == "cuda":
        found += [Candidate(f"torch-{name}", _torch_backend(backend)) for name, backend in _BACKENDS.items()]
    found.append(_ours("ours-tiled-online", replace(config, route="tiled", softmax="online")))
    missing = []
    for name, make in (("pascal_attn", _pascal_attn), ("noflash_attention", _noflash)):
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} is not installed: not compared")
        else:
            found += make()
    return found, missing


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


def _pascal_attn() -> list[Candidate]:
    def candidate(tile: int) -> Candidate:
        def prepare(call: CapturedCall) -> Attend:
            from pascal_attn import tiled_attention

            mask = _additive_mask(call)
            return lambda q, k, v: tiled_attention(q, k, v, call.scale, mask, tile).transpose(1, 2)

        return Candidate(f"pascal-attn-{tile}", prepare)

    return [candidate(tile) for tile in (64, 128, 256)]


def _additive_mask(call: CapturedCall) -> Tensor | None:
    """pascal-attn documents one kind of mask: float, added, of full size. Made before the clock starts."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    allowed = call.attn_mask
    if call.is_causal:
        allowed = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=call.query.device).tril()
    if allowed is None:
        return None
    if allowed.dtype == torch.bool:
        mask = torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -1e9)
    else:
        mask = allowed
    return mask.expand(*mask.shape[:-2], rows, keys)


def _noflash() -> list[Candidate]:
    def candidate(tier: int) -> Candidate:
        def prepare(call: CapturedCall) -> Attend:
            patch = _import_noflash()
            # The block sizes are those that its own dispatch picks for this shape.
            batch, heads, keys = call.query.shape[0], call.query.shape[1], call.key.shape[2]
            rows = patch._auto_block_m(batch, keys, heads, call.query.dtype, budget_factor=2 if tier == 1 else 1)
            sizes = {"block_m": rows}
            if tier == 2:
                sizes["block_n"] = patch._auto_block_n(batch, rows, heads, call.query.dtype)
            run = (patch.chunked_sdpa, patch.chunked_sdpa_online, patch.chunked_sdpa_inplace)[tier - 1]
            options = {"attn_mask": call.attn_mask, "is_causal": call.is_causal, **sizes}
            return lambda q, k, v: run(q, k, v, call.scale, **options)

        return Candidate(f"noflash-{tier}", prepare, extra_bytes=lambda call: 3 << 30)

    return [candidate(tier) for tier in (1, 2, 3)]


def _import_noflash() -> Any:
    """Importing noflash_attention replaces torch's function in the whole process: restore it at once."""
    original = F.scaled_dot_product_attention
    with contextlib.redirect_stdout(io.StringIO()):
        from noflash_attention import disable, patch

        disable()
    if F.scaled_dot_product_attention is not original:
        raise RuntimeError("noflash_attention left its own function in torch.nn.functional: exclude it from this run")
    return patch
