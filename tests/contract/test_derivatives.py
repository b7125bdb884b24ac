"""Tangents, gradients of gradients and their transforms on the route ``tiled``: against the route ``math``, and within
the budget."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, linearize, vmap

from pascal_attn_core import AttentionConfig, explain, patch_sdpa, sdpa, sdpa_with_lse
from pascal_attn_core.machine.device import MIB
from pascal_attn_core.observe.memory import measure

TILED = AttentionConfig(route="tiled", q_block=8, kv_block=16)
MATH = AttentionConfig(route="math")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _some_keys() -> Tensor:
    keep = torch.rand(19, 23) > 0.3
    keep[4] = False
    return keep


# Without sinks: those have a test of their own, since no transform of the route math returns lse.
KINDS: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True, "alignment": "lower_right"},
    "window": lambda: {"window": (5, 2)},
    "softcap": lambda: {"softcap": 1.5, "scale": -0.7},
    "bool mask": lambda: {"attn_mask": _some_keys()},
    "float mask": lambda: {"attn_mask": _random(2, 1, 23).masked_fill(torch.rand(2, 1, 23) > 0.8, -torch.inf)},
    "grouped heads": lambda: {"enable_gqa": True},
}
DERIVATIVES: dict[str, Any] = {
    "jvp": lambda f, x, t: jvp(f, x, t)[1],
    "some tangents": lambda f, x, t: jvp(lambda key: f(x[0], key, x[2]), x[1:2], t[1:2])[1],
    "dual numbers": lambda f, x, t: _dual(f, x, t),
    "vmap of jvp": lambda f, x, t: vmap(lambda *s: jvp(f, x, s)[1])(*(torch.stack([s, -2 * s]) for s in t)),
    "per sample": lambda f, x, t: vmap(grad(_loss(f), (0, 1, 2)), (0, None, 0))(*_twice(x, t)),
    "linearize": lambda f, x, t: linearize(f, *x)[1](*t),
    "jvp of grad": lambda f, x, t: jvp(grad(_loss(f), (0, 1, 2)), x, t)[1],
    "grad of jvp": lambda f, x, t: grad(lambda *y: jvp(f, y, t)[1].square().sum(), (0, 1, 2))(*x),
    "double backward": lambda f, x, t: _double_backward(f, x, t),
}


def _loss(attend: Any) -> Any:
    return lambda *inputs: attend(*inputs).square().sum()


def _twice(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.stack([x[0], t[0]]), x[1], torch.stack([x[2], t[2]])


def _dual(attend: Any, inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(*map(forward_ad.make_dual, inputs, tangents))).tangent


def _double_backward(attend: Any, inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    grads = torch.autograd.grad(_loss(attend)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum((g * t).sum() for g, t in zip(grads, tangents)), leaves)


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_route_math(kind: str, name: str) -> None:
    torch.manual_seed(0)
    options, heads = KINDS[kind](), 1 if kind == "grouped heads" else 2
    shapes = (2, 2, 19, 4), (2, heads, 23, 4), (2, heads, 23, 3)
    inputs, tangents = (tuple(_random(*shape) for shape in shapes) for _ in range(2))
    found, expected = (
        DERIVATIVES[name](lambda *t, config=config: sdpa(*t, **options, config=config), inputs, tangents)
        for config in (TILED, MATH)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_all_inputs_and_lse_pass_torchs_own_checks() -> None:
    torch.manual_seed(0)
    leaves = [_random(1, 2, 6, 3).requires_grad_() for _ in range(3)]
    leaves += [_random(6, 6).requires_grad_(), _random(2).requires_grad_()]

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"is_causal": True, "softcap": 1.5, "sinks": sinks}
        return tuple(sdpa_with_lse(query, key, value, mask, **options, config=TILED))

    assert torch.autograd.gradcheck(attend, leaves, check_forward_ad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(attend, leaves, check_fwd_over_rev=True)


def test_dropout_keeps_its_coins() -> None:
    inputs, tangents = (tuple(_random(1, 2, 30, 4) for _ in range(3)) for _ in range(2))

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return sdpa(*inputs, dropout_p=0.4, config=TILED)

    def at(step: float) -> tuple[Tensor, ...]:
        return tuple(x + step * t for x, t in zip(inputs, tangents))

    for f in (attend, grad(_loss(attend))):
        expected = (f(*at(1e-5)) - f(*at(-1e-5))) / 2e-5
        torch.testing.assert_close(jvp(f, inputs, tangents)[1], expected, rtol=1e-6, atol=1e-6)


def test_jacobians() -> None:
    query = _random(1, 2, 5, 3)
    for transform in (jacfwd, lambda f: hessian(lambda x: f(x).square().sum())):
        found, expected = (transform(lambda x, c=c: sdpa(x, x, x, config=c))(query) for c in (TILED, MATH))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_no_derivative_stores_the_scores() -> None:
    inputs, tangents = (tuple(torch.randn(1, 2, 2048, 16) for _ in range(3)) for _ in range(2))
    sizes = {"jvp": 6, "dual numbers": 6, "double backward": 12, "jvp of grad": 12}
    for name, most in sizes.items():
        # Torch's kernel cannot know in the forward pass that its gradients will be differentiated.
        with patch_sdpa(AttentionConfig(route="tiled") if name == "double backward" else None):
            attend = torch.nn.functional.scaled_dot_product_attention
            assert measure(DERIVATIVES[name], attend, inputs, tangents).extra_bytes <= most * MIB, name


def test_a_call_without_tangents_stays_with_torchs_kernel() -> None:
    query = torch.randn(1, 2, 600, 16)
    with forward_ad.dual_level():
        assert explain(query, query, query).startswith("route torch")
        dual = forward_ad.make_dual(query, query)
        assert "no forward mode" in explain(dual, query, query)


@pytest.mark.parametrize(
    ("what", "derivative"),
    [
        ("tangents of tangents", lambda f, x: jvp(lambda y: jvp(f, (y,), (x,))[1], (x,), (x,))),
        ("third derivatives", lambda f, x: grad(lambda y: grad(_loss(lambda z: grad(_loss(f))(z)))(y).sum())(x)),
    ],
)
def test_derivatives_beyond_these_say_what_to_do(what: str, derivative: Any) -> None:
    query = _random(1, 1, 6, 3)
    with pytest.raises(RuntimeError, match=f"{what} must be taken with route='math'"):
        derivative(lambda x: sdpa(x, x, x, config=TILED), query)
    derivative(lambda x: sdpa(x, x, x), query)
