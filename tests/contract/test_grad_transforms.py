"""Programs ask for a graph of the gradients that nobody uses. Wherever torch's own function serves them, so does every
route that ``auto`` may take, also under the switch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pascal_attn_core.sdpa_patch as switch
from pascal_attn_core import AttentionConfig, LazyMask, sdpa

CONFIGS = {
    "auto": AttentionConfig(),
    "auto, long": AttentionConfig(math_limit_mib=0),
    "tiled": AttentionConfig(route="tiled"),
    "small tiles": AttentionConfig(route="tiled", q_block=5, kv_block=4),
    "math": AttentionConfig(route="math"),
    "torch": AttentionConfig(route="torch"),
}
RULE = LazyMask((1, 1, 9, 9), lambda b, h, i, j: (i - j) % 3 > 0, device="cpu")
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "causal": lambda: {"is_causal": True},
    "float mask": lambda: {"attn_mask": _random(9, 9)},
    "bool mask": lambda: {"attn_mask": torch.rand(9, 9) > 0.3},
    "rule and sinks": lambda: {"attn_mask": RULE, "sinks": _random(2)},
}
ALL = [(kind, name) for kind in CALLS for name in CONFIGS if (kind, name) != ("rule and sinks", "torch")]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _leaves() -> list[Tensor]:
    return [_random(1, 2, 9, 4).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_graph_of_the_gradients_that_nobody_uses(kind: str, name: str) -> None:
    leaves = _leaves()
    out = sdpa(*leaves, **CALLS[kind](), config=CONFIGS[name])
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    actual = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))
    assert all(a.requires_grad for a in actual)
    if name in ("tiled", "small tiles"):
        for ask in (torch.Tensor.backward, lambda result: torch.autograd.grad(result, leaves[0], allow_unused=True)):
            with pytest.raises(RuntimeError, match="gradients of gradients must be taken with route"):
                ask(actual[0].square().sum())


@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_at_once_are_refused(create_graph: bool) -> None:
    leaves = _leaves()
    out = sdpa(*leaves, config=CONFIGS["tiled"])
    grad_outs = torch.randn(3, *out.shape, dtype=out.dtype)
    with pytest.raises(RuntimeError, match="many gradients at once must be taken with route='math', got a tiled call"):
        torch.autograd.grad(out, leaves, grad_outs, is_grads_batched=True, create_graph=create_graph)


@pytest.mark.parametrize("under_the_switch", [False, True])
def test_where_auto_takes_tiles(under_the_switch: bool) -> None:
    """Causal, from 1024 tokens on, on a CPU."""
    leaf = torch.randn(1, 1, 1100, 8, requires_grad=True)
    with switch.patch_sdpa() if under_the_switch else nullcontext():
        attend = F.scaled_dot_product_attention if under_the_switch else sdpa
        out = attend(leaf, leaf, leaf, is_causal=True)
    (expected,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (actual,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert torch.equal(actual, expected)
