"""Gradients against those of the definition in float64, and what cannot be differentiated says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_support.oracle import assert_gradients_close, cast, gradients, plain_dtype
from attn_support.table import GRADIENT_TABLE, ROUTES, Case, routes_for
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core import AttentionConfig, sdpa, sdpa_with_lse
from pascal_attn_core.reference import reference_sdpa

TILED = AttentionConfig(route="tiled")
WITH_GRADIENTS = ("auto", "tiled", "small_tiles", "tiny_tiles", "math")


def _leaves(inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in inputs if t is not None and t.requires_grad]


@pytest.mark.parametrize("case", GRADIENT_TABLE, ids=lambda case: case.name)
def test_gradients_are_those_of_the_definition(case: Case) -> None:
    inputs, options = case.build(requires_grad=True)
    wide = [cast(t, torch.float64) for t in inputs]
    # Out is saved in 16 bits, as every flash attention does: the yardstick is plain attention in those 16 bits.
    similar = [cast(t, plain_dtype(case.dtype, as_torch=True)) for t in inputs]
    exact_out, lse = reference_sdpa(*wide, **options)
    grad_out = torch.randn(exact_out.shape, dtype=torch.float64)
    oracle = gradients(exact_out, _leaves(wide), grad_out)
    yardstick = gradients(reference_sdpa(*similar, **options)[0], _leaves(similar), grad_out)
    for route in routes_for(case, of=WITH_GRADIENTS):
        out = sdpa(*inputs, **options, config=ROUTES[route])
        actual = gradients(out, _leaves(inputs), grad_out)
        assert [g.dtype for g in actual] == [t.dtype for t in _leaves(inputs)]
        assert_gradients_close(actual, oracle, yardstick, lse, case.dtype, by=route)


@pytest.mark.parametrize("case", GRADIENT_TABLE[::4], ids=lambda case: case.name)
def test_gradients_flow_through_lse_too(case: Case) -> None:
    inputs, options = case.build(requires_grad=True)
    wide = [cast(t, torch.float64) for t in inputs]
    similar = [cast(t, plain_dtype(case.dtype, as_torch=True)) for t in inputs]
    out, lse = sdpa_with_lse(*inputs, **options, config=TILED)
    grad_out = torch.randn(out.shape, dtype=torch.float64)
    actual = gradients(out, _leaves(inputs), grad_out, lse)
    oracle, yardstick = (
        gradients(o, _leaves(t), grad_out, s) for t in (wide, similar) for o, s in [reference_sdpa(*t, **options)]
    )
    assert_gradients_close(actual, oracle, yardstick, lse, case.dtype)


def test_the_gradient_of_lse_alone_needs_no_gradient_of_out() -> None:
    query, key, value = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sdpa_with_lse(query, key, value, config=TILED).lse.sum().backward()
    expected = torch.autograd.grad(reference_sdpa(query, key, value)[1].sum(), (query, key))
    torch.testing.assert_close((query.grad, key.grad), expected)
    assert not value.grad.any()


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_finite_differences_agree(mask: str, is_causal: bool, with_lse: bool) -> None:
    query = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 1, 5, width, dtype=torch.float64, requires_grad=True) for width in (2, 1))
    bias = torch.randn(2, 1, 5, dtype=torch.float64, requires_grad=True)
    allowed = torch.rand(3, 5) < 0.8
    allowed[:, 0] = True  # differences of -inf - -inf say nothing
    tail = {"none": (), "bool": (allowed,), "float": (bias,)}[mask]
    config = AttentionConfig(route="tiled", q_block=2, kv_block=3)

    def attend(query, key, value, *tail):
        outputs = sdpa_with_lse(query, key, value, *tail, is_causal=is_causal, enable_gqa=True, config=config)
        return outputs if with_lse else outputs.out

    assert torch.autograd.gradcheck(attend, (query, key, value, *tail))


def test_only_the_wanted_gradients_appear() -> None:
    query, key, value = (torch.randn(1, 1, 8, 4) for _ in range(3))
    value.requires_grad_()
    sdpa(query, key, value, config=TILED).sum().backward()
    assert query.grad is None
    assert key.grad is None
    assert value.grad is not None


def _second_derivative(out: torch.Tensor, leaf: torch.Tensor) -> None:
    torch.autograd.grad(out.sum(), leaf, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_of_gradients_say_what_to_do(is_compiled: bool) -> None:
    query, key, value = (torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3))
    attend = torch.compile(sdpa, backend="aot_eager") if is_compiled else sdpa
    with pytest.raises(RuntimeError, match=r"gradients of gradients|double backward"):
        _second_derivative(attend(query, key, value, config=TILED), query)


def test_gradients_of_gradients_by_the_route_math() -> None:
    query, key, value = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    config = AttentionConfig(route="math")
    assert torch.autograd.gradgradcheck(lambda *qkv: sdpa(*qkv, config=config), (query, key, value))


def test_views_that_require_gradients_pass_them_to_their_base() -> None:
    packed = torch.randn(2, 10, 3, 2, 4, requires_grad=True)  # [B, L, qkv, H, D]
    query, key, value = (t.transpose(1, 2) for t in packed.unbind(2))
    sdpa(query, key, value, config=TILED).square().sum().backward()
    expected = torch.autograd.grad(reference_sdpa(query, key, value)[0].square().sum(), packed)[0]
    torch.testing.assert_close(packed.grad, expected, atol=1e-5, rtol=1e-4)


def test_checkpointing_computes_the_same_again() -> None:
    query, key, value = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))

    def attend(query, key, value):
        return sdpa(query, key, value, None, 0.3, config=TILED)

    torch.manual_seed(7)
    plain_grads = torch.autograd.grad(attend(query, key, value).square().sum(), (query, key, value))
    torch.manual_seed(7)
    out = torch.utils.checkpoint.checkpoint(attend, query, key, value, use_reentrant=False)
    torch.randn(5)  # the generator moves on between forward and backward
    again = torch.autograd.grad(out.square().sum(), (query, key, value))
    for first, second in zip(plain_grads, again):
        assert torch.equal(first, second)


@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min, -torch.inf])
def test_masked_rows_and_keys_get_the_gradients_of_plain_attention(low: float) -> None:
    query, key, value = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3))
    bias = torch.zeros(6, 6)
    bias[:, 3:] = low
    bias[2] = low
    actual = torch.autograd.grad(sdpa(query, key, value, bias, config=TILED).sum(), (query, key, value))
    expected = torch.autograd.grad(reference_sdpa(query, key, value, bias)[0].sum(), (query, key, value))
    torch.testing.assert_close(actual, tuple(g.nan_to_num() for g in expected), atol=2e-6, rtol=1e-5)


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


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 1, 20, 8), (1, 1, 20, 8)),
        ((2, 3, 20, 8), (1, 3, 20, 8)),
        ((2, 3, 1, 20, 8), (20, 8)),
        ((3, 20, 8), (20, 8)),
    ],
)
def test_units_that_share_a_sum_are_added_one_after_the_other(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in (query, key, key)]
    bias = torch.randn(20, requires_grad=True)
    out = sdpa(*tensors, bias, config=TILED)
    expected = torch.autograd.grad(reference_sdpa(*tensors, bias)[0].sum(), (*tensors, bias))
    with _NoOverlappingWrites():
        actual = torch.autograd.grad(out.sum(), (*tensors, bias))
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
