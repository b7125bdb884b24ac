"""Tangents, gradients of gradients and their transforms on the route ``tiled``: against the route ``math``, and within
the budget."""

from typing import Any

import pytest
import torch
import torch._dynamo
from attn_support.randomness import at_night
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from pascal_attn_core import AttentionConfig, LazyMask, UnsupportedAttention, explain, patch_sdpa, sdpa, sdpa_with_lse
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.flex import flex_attention
from pascal_attn_core.machine.device import MIB
from pascal_attn_core.observe.memory import measure

TILED = AttentionConfig(route="tiled", q_block=8, kv_block=16)
MATH = AttentionConfig(route="math")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Without sinks: those have a test of their own, since no transform of the route math returns lse.
KINDS: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True, "alignment": "lower_right"},
    "window": lambda: {"window": (5, 2)},
    "softcap": lambda: {"softcap": 1.5, "scale": -0.7},
    "bool mask": lambda: {"attn_mask": (torch.rand(19, 23) > 0.3) & (torch.arange(19) != 4)[:, None]},
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
    leaves = [_random(1, 2, 3, 2).requires_grad_() for _ in range(3)]
    leaves += [_random(3, 3).requires_grad_(), _random(2).requires_grad_()]

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"is_causal": True, "softcap": 1.5, "sinks": sinks}
        return tuple(sdpa_with_lse(query, key, value, mask, **options, config=TILED))

    assert torch.autograd.gradcheck(attend, leaves, check_forward_ad=True)
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
        with patch_sdpa():
            attend = torch.nn.functional.scaled_dot_product_attention
            assert measure(DERIVATIVES[name], attend, inputs, tangents).extra_bytes <= most * MIB, name


@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "grouped heads"])
@pytest.mark.parametrize("tokens", [19, 600])
def test_gradients_of_torchs_kernel_are_differentiated_in_tiles(tokens: int, kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"causal": {"is_causal": True}, "grouped heads": {"enable_gqa": True}}.get(kind, {})
    if kind == "bool mask":
        options = {"attn_mask": torch.rand(tokens, tokens) > 0.3}
    heads = 1 if kind == "grouped heads" else 2
    shapes = (2, 2, tokens, 4), (2, heads, tokens, 4), (2, heads, tokens, 4)
    inputs, tangents = (tuple(_random(*shape) for shape in shapes) for _ in range(2))
    assert explain(*inputs, **options).startswith("route torch")
    expected = _double_backward(
        lambda *t: sdpa(*t, **options, config=AttentionConfig(route="math", math_limit_mib=64)), inputs, tangents
    )
    with patch_sdpa():
        for attend in (sdpa, torch.nn.functional.scaled_dot_product_attention):
            found = _double_backward(lambda *t, attend=attend: attend(*t, **options), inputs, tangents)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_hooks_on_the_output_of_torchs_kernel_are_the_callers_own() -> None:
    query, seen = torch.randn(1, 1, 19, 4, requires_grad=True), []
    first, second = (sdpa(query, query, query) for _ in range(2))
    first.register_hook(seen.append)
    (first.sum() + second.sum()).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("config", [TILED, AttentionConfig()])
def test_third_derivatives_and_tangents_of_tangents_are_those_of_math(config: AttentionConfig) -> None:
    torch.manual_seed(0)
    query, mask, sinks = _random(1, 2, 6, 3), _random(6, 6), _random(2)

    def repeated(config: AttentionConfig, more: int) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (query, mask, sinks)]
        found = sdpa(leaves[0], leaves[0], leaves[0], leaves[1], sinks=leaves[2], softcap=1.5, config=config)
        for _ in range(more):
            found = sum(g.square().sum() for g in torch.autograd.grad(found.square().sum(), leaves, create_graph=True))
        return torch.autograd.grad(found, leaves)

    for more in (2, 3):
        torch.testing.assert_close(repeated(config, more), repeated(MATH, more), rtol=1e-9, atol=1e-9)
    if config is TILED:
        with pytest.raises(UnsupportedAttention, match="third derivatives, and tangents of tangents"):
            jvp(lambda y: jvp(lambda x: sdpa(x, x, x, config=config), (y,), (y,))[1], (query,), (query,))
        return

    def of(config: AttentionConfig) -> tuple[Tensor, ...]:
        f = lambda x: sdpa_with_lse(x, x, x, config=config) if config is not MATH else (sdpa(x, x, x, config=config),)  # noqa: E731
        twice = jvp(lambda y: jvp(f, (y,), (query,))[1], (query,), (query,))[1]
        return twice[0], grad(lambda y: grad(_loss(lambda z: grad(_loss(lambda x: f(x)[0]))(z)))(y).sum())(query)

    torch.testing.assert_close(of(config), of(MATH), rtol=1e-9, atol=1e-9)


def test_jacobians_with_dropout_are_of_one_draw_of_coins() -> None:
    query = _random(1, 2, 6, 3)

    def attend(query: Tensor) -> Tensor:
        torch.manual_seed(3)
        return sdpa(query, query, query, dropout_p=0.4, config=TILED)

    steps = torch.eye(query.numel(), dtype=query.dtype).view(-1, *query.shape) * 1e-5
    expected = torch.stack([(attend(query + s) - attend(query - s)) / 2e-5 for s in steps], dim=-1)
    for transform in (jacfwd, jacrev):
        found = transform(attend)(query)
        torch.testing.assert_close(found, expected.view(found.shape), rtol=1e-6, atol=1e-6)


RECORDED: dict[str, Any] = {
    "call": lambda f, x: f,
    "jvp": lambda f, x: lambda y: jvp(f, (y,), (x,))[1],
    "grad": lambda f, x: grad(_loss(f)),
    "vmap of jvp": lambda f, x: lambda y: vmap(lambda t: jvp(f, (y,), (t,))[1])(torch.stack([x, y])),
}


@pytest.mark.parametrize("name", RECORDED)
def test_graphs_of_operators_hold_for_other_values(name: str) -> None:
    """Recorded operator by operator they would hold values, and buffers written in place."""
    torch.manual_seed(0)
    query, ends = _random(1, 2, 70, 4), torch.tensor([0, 30, 70], dtype=torch.int32)

    def packed(x: Tensor) -> Tensor:
        three = (x[0].transpose(0, 1),) * 3
        return flash_attn_varlen_func(*three, ends, ends, 40, 40).transpose(0, 1)[None]

    doors = [lambda x: sdpa(x, x, x, config=TILED), lambda x: sdpa_with_lse(x, x, x).lse]
    if hasattr(torch, "accelerator"):  # make_fx of older ones does not let lengths be read under a transform
        doors.append(packed)
    for attend in doors:
        function = RECORDED[name](attend, query)
        torch.testing.assert_close(make_fx(function)(query + 1)(30 * query), function(30 * query))


def test_a_recorded_graph_has_gradients_itself() -> None:
    query = _random(1, 2, 19, 4).requires_grad_()
    function = grad(_loss(lambda x: sdpa(x, x, x, config=TILED)))
    found, expected = (torch.autograd.grad(f(query).sum(), query) for f in (make_fx(function)(query), function))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_rule_that_is_not_registered_is_recorded_in_a_derivative_only() -> None:
    query, mask = _random(1, 2, 6, 4), LazyMask((1, 1, 6, 6), lambda b, h, i, j: i >= j, device="cpu")
    function = grad(_loss(lambda x: sdpa(x, x, x, mask)))
    torch.testing.assert_close(make_fx(function)(query)(3 * query), function(3 * query))
    with pytest.raises(TypeError, match="under make_fx mask_rule must register the rule"):
        make_fx(lambda x: sdpa(x, x, x, mask))(query)


@at_night
@pytest.mark.slow
def test_a_compiled_function_leaves_its_graph_for_a_tangent() -> None:
    query, tangent = _random(1, 2, 70, 4), _random(1, 2, 70, 4)

    def attend(x: Tensor) -> Tensor:
        return sdpa(x, query, query, config=TILED)

    for name, f in {
        "jvp": attend,
        "dual numbers": attend,
        "jvp of grad": grad(lambda x: attend(x).square().sum()),
    }.items():
        make = DERIVATIVES["dual numbers" if name == "dual numbers" else "jvp"]
        derivative = lambda x, f=f, make=make: make(f, (x,), (tangent,))  # noqa: E731
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(derivative, backend="aot_eager")(query), derivative(query))


def test_a_score_mod_has_gradients_only_and_says_so() -> None:
    query = torch.randn(1, 1, 16, 4, requires_grad=True)
    out = flex_attention(query, query, query, lambda score, b, h, i, j: score * 2)
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"a score_mod; pass a float attn_mask or a LazyMask"):
        first.sum().backward()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query.detach(), query.detach())
        with pytest.raises(RuntimeError, match="a score_mod; pass a float attn_mask"):
            flex_attention(dual, dual, dual, lambda score, b, h, i, j: score * 2)
