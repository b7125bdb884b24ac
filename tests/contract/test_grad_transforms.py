"""What programs ask of a backward pass besides one gradient: a graph of it that nobody uses, and many at once. Wherever
torch's own function serves them, so does every route that ``auto`` may take, also under the switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pascal_attn_core.sdpa_patch as switch
from pascal_attn_core import AttentionConfig, LazyMask, sdpa, sdpa_with_lse

CONFIGS = {
    "auto": AttentionConfig(),
    "auto, long": AttentionConfig(math_limit_mib=0),
    "tiled": AttentionConfig(route="tiled"),
    "small tiles": AttentionConfig(route="tiled", q_block=5, kv_block=4),
    "math": AttentionConfig(route="math"),
    "torch": AttentionConfig(route="torch"),
}
TILED = AttentionConfig(route="tiled", q_block=5, kv_block=4)


def _bias(length: int = 9) -> Tensor:
    return torch.randn(length, length, dtype=torch.float64)


def _calls() -> dict[str, dict[str, Any]]:
    sinks = torch.randn(2, dtype=torch.float64)
    rule = LazyMask((1, 1, 9, 9), lambda b, h, i, j: (i - j) % 3 > 0, device="cpu")
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "float mask": {"attn_mask": _bias()},
        "bool mask": {"attn_mask": torch.rand(9, 9) > 0.3},
        "rule and sinks": {"attn_mask": rule, "sinks": sinks},
    }


def _leaves(*, heads: tuple[int, int] = (2, 2), length: int = 9, width: int = 4) -> list[Tensor]:
    return [
        torch.randn(1, h, length, width, dtype=torch.float64, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    ]


def _takes(kind: str, name: str) -> bool:
    return name != "torch" or kind in ("plain", "causal", "bool mask", "float mask")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", _calls())
def test_a_graph_of_the_gradients_that_nobody_uses(kind: str, name: str) -> None:
    if not _takes(kind, name):
        pytest.skip("the route does not take it")
    leaves, options = _leaves(), _calls()[kind]
    out = sdpa(*leaves, **options, config=CONFIGS[name])
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    actual = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))
    assert all(a.requires_grad for a in actual)
    if name in ("tiled", "small tiles"):
        with pytest.raises(RuntimeError, match="gradients of gradients must be taken with route='math', got a tiled"):
            actual[0].square().sum().backward()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", _calls())
def test_many_gradients_at_once(kind: str, name: str, create_graph: bool) -> None:
    if not _takes(kind, name):
        pytest.skip("the route does not take it")
    leaves, options = _leaves(), _calls()[kind]
    out = sdpa(*leaves, **options, config=CONFIGS[name])
    grad_outs = torch.randn(3, *out.shape, dtype=out.dtype)
    singles = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in grad_outs]
    batched = torch.autograd.grad(
        out, leaves, grad_outs, is_grads_batched=True, create_graph=create_graph, retain_graph=True
    )
    for many, ones in zip(batched, zip(*singles)):
        torch.testing.assert_close(many, torch.stack(ones))
    by_func = torch.func.vmap(lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True))(grad_outs)
    for many, ones in zip(by_func, zip(*singles)):
        torch.testing.assert_close(many, torch.stack(ones))


def test_every_gradient_may_come_in_batches() -> None:
    leaves = [*_leaves(heads=(2, 1), length=4, width=2), _bias(4).requires_grad_()]
    leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))

    config = AttentionConfig(route="tiled", q_block=3, kv_block=3)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(sdpa_with_lse(query, key, value, mask, enable_gqa=True, sinks=sinks, config=config))

    assert torch.autograd.gradcheck(attend, leaves, check_batched_grad=True)
    for i in range(2):
        many = torch.autograd.functional.jacobian(lambda *x, i=i: attend(*x)[i].sum(-1), tuple(leaves), vectorize=True)
        each = torch.autograd.functional.jacobian(lambda *x, i=i: attend(*x)[i].sum(-1), tuple(leaves))
        for a, e in zip(many, each):
            torch.testing.assert_close(a, e)


def _long() -> Tensor:
    return torch.randn(1, 1, 1100, 8, requires_grad=True)


@pytest.mark.parametrize("under_the_switch", [False, True])
def test_where_auto_takes_tiles(under_the_switch: bool) -> None:
    """Causal, from 1024 tokens on, on a CPU."""
    leaf = _long()
    attend: Callable[..., Tensor] = sdpa
    if under_the_switch:
        with switch.patch_sdpa():
            out = F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
    else:
        out = attend(leaf, leaf, leaf, is_causal=True)
    (expected,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (actual,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert torch.equal(actual, expected)
    grad_outs = torch.randn(2, *out.shape)
    (many,) = torch.autograd.grad(out, leaf, grad_outs, is_grads_batched=True, retain_graph=True)
    for grad_out, one in zip(grad_outs, many):
        torch.testing.assert_close(one, torch.autograd.grad(out, leaf, grad_out, retain_graph=True)[0])


def test_nothing_stays_behind_when_a_batched_backward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pascal_attn_core.routes import grad_transforms
    from pascal_attn_core.routes import tiled as tiled_route

    leaves = _leaves()
    out = sdpa(*leaves, config=TILED)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiled_route, "tiled_backward", fails)
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(out, leaves, torch.randn(2, *out.shape, dtype=out.dtype), is_grads_batched=True)
    assert not grad_transforms._computes
