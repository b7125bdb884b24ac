"""Gradients against those of the definition in float64, and a graph of them that nobody uses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_support.oracle import assert_gradients_close, cast, gradients, plain_dtype
from attn_support.randomness import some
from attn_support.table import GRADIENT_TABLE, ROUTES, Case, on_mps, routes_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core import AttentionConfig, LazyMask, sdpa
from pascal_attn_core.flex import flex_attention
from pascal_attn_core.reference import reference_sdpa

TILED = AttentionConfig(route="tiled")


def _leaves(inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in inputs if t is not None and t.requires_grad]


@pytest.mark.parametrize(
    ("device", "case"),
    some([("cpu", case) for case in GRADIENT_TABLE] + [("mps", case) for case in on_mps(GRADIENT_TABLE)], 3),
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_gradients_are_those_of_the_definition(device: str, case: Case) -> None:
    inputs, options = case.build(requires_grad=True)
    wide = [cast(t, torch.float64) for t in inputs]
    # Out is saved in 16 bits, as every flash attention does: the yardstick is plain attention in those 16 bits.
    similar = [cast(t, plain_dtype(case.dtype, as_torch=True)) for t in inputs]
    exact_out, lse = reference_sdpa(*wide, **options)
    grad_out = torch.randn(exact_out.shape, dtype=torch.float64)
    oracle = gradients(exact_out, _leaves(wide), grad_out)
    yardstick = gradients(reference_sdpa(*similar, **options)[0], _leaves(similar), grad_out)
    inputs, _ = case.build(requires_grad=True, device=device)
    for route in routes_for(case, of=("auto", "tiled", "small_tiles", "tiny_tiles", "math")):
        out = sdpa(*inputs, **options, config=ROUTES[route]).cpu()
        actual = [grad.cpu() for grad in gradients(out, _leaves(inputs), grad_out)]
        assert [g.dtype for g in actual] == [t.dtype for t in _leaves(inputs)]
        assert_gradients_close(actual, oracle, yardstick, lse, case.dtype, by=route)


def test_gradients_of_gradients_of_a_compiled_call_say_what_to_do() -> None:
    torch.compiler.reset()  # torch refuses a graph of any size, made after others, on its own
    query, key, value = (torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3))
    out = torch.compile(sdpa, backend="aot_eager")(query, key, value, config=TILED)
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradients of gradients|double backward"):
        grad.sum().backward()


def test_gradients_of_gradients_by_the_route_math() -> None:
    leaves = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *qkv: sdpa(*qkv, config=CONFIGS["math"]), leaves)


def test_checkpointing_computes_the_same_again() -> None:
    query, key, value = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))

    def attend(query, key, value):
        return sdpa(query, key, value, None, 0.3, config=TILED)

    torch.manual_seed(7)
    plain_grads = torch.autograd.grad(attend(query, key, value).square().sum(), (query, key, value))
    torch.manual_seed(7)
    out = torch.utils.checkpoint.checkpoint(attend, query, key, value, use_reentrant=False)
    torch.randn(5)  # the generator moves on between forward and backward
    assert all(map(torch.equal, plain_grads, torch.autograd.grad(out.square().sum(), (query, key, value))))


class _NoOverlappingWrites(TorchDispatchMode):
    """Fails where an operator writes to a tensor whose elements share memory: on a GPU that is a race."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for argument, tensor in zip(func._schema.arguments, args):
            self._check(func, argument, tensor)
        for argument in func._schema.arguments:
            self._check(func, argument, (kwargs or {}).get(argument.name))
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, argument: Any, tensor: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(tensor, torch.Tensor):
            return
        overlaps = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
        assert not overlaps, f"{func} writes to shape {tuple(tensor.shape)} with strides {tensor.stride()}"


@pytest.mark.parametrize(("query", "key"), [
    ((2, 1, 20, 8), (1, 1, 20, 8)), ((2, 3, 20, 8), (1, 3, 20, 8)), ((2, 3, 1, 20, 8), (20, 8)), ((3, 20, 8), (20, 8)),
])  # fmt: skip
def test_units_that_share_a_sum_are_added_one_after_the_other(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in (query, key, key)]
    bias = torch.randn(20, requires_grad=True)
    out = sdpa(*tensors, bias, config=TILED)
    expected = torch.autograd.grad(reference_sdpa(*tensors, bias)[0].sum(), (*tensors, bias))
    with _NoOverlappingWrites():
        actual = torch.autograd.grad(out.sum(), (*tensors, bias))
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


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


def _three() -> list[Tensor]:
    return [_random(1, 2, 9, 4).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_graph_of_the_gradients_that_nobody_uses(kind: str, name: str) -> None:
    leaves = _three()
    out = sdpa(*leaves, **CALLS[kind](), config=CONFIGS[name])
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    actual = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))
    assert all(a.requires_grad for a in actual)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["plain", "score_mod"])
def test_many_gradients_at_once(kind: str, create_graph: bool) -> None:
    leaves = _three()
    out = sdpa(*leaves, config=CONFIGS["tiled"])
    if kind == "score_mod":
        out = flex_attention(*leaves, lambda score, b, h, i, j: score * 1.5 + h + (i - j) * 0.1)
    grad_outs = torch.randn(3, *out.shape, dtype=out.dtype)

    def gradients(grad_out: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True, create_graph=create_graph, **options)

    expected = tuple(torch.stack(each) for each in zip(*map(gradients, grad_outs)))
    for found in (torch.func.vmap(gradients)(grad_outs), gradients(grad_outs, is_grads_batched=True)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tiled", "auto"])
def test_jacobians_and_hessians_of_autograd_functional(name: str) -> None:
    leaves, functional = _three(), torch.autograd.functional

    def ours(*inputs: Tensor) -> Tensor:
        return sdpa(*inputs, config=CONFIGS[name])

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.mT * 0.5, dim=-1) @ value

    def squares(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: attend(*inputs).square().sum()

    jacobians = [functional.jacobian(attend, tuple(leaves), vectorize=True) for attend in (ours, plain)]
    hessians = [functional.hessian(squares(attend), tuple(leaves), vectorize=True) for attend in (ours, plain)]
    torch.testing.assert_close(*jacobians, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*hessians, rtol=1e-12, atol=1e-12)
