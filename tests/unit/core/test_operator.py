"""The custom operator behind torch.compile."""

from __future__ import annotations

import torch

from pascal_attn_core import AttentionConfig, sdpa, sdpa_with_lse
from pascal_attn_core.call import Options
from pascal_attn_core.routes import operator

TILED = AttentionConfig(route="tiled")


class Tagged(torch.Tensor):
    """A tensor subclass: its calls go through the operator, so that others may see them."""


def test_the_operator_is_registered_under_its_name() -> None:
    assert torch.ops.pascal_attn.sdpa.default is not None
    assert torch.ops.pascal_attn.sdpa_backward.default is not None


def test_tensor_subclasses_go_through_the_operator() -> None:
    query, key, value = (torch.randn(1, 2, 30, 8) for _ in range(3))
    out = sdpa(query.as_subclass(Tagged), key, value, config=TILED)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), sdpa(query, key, value, config=TILED))


def test_the_operator_has_gradients_for_masks_and_lse() -> None:
    tensors = [torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3)]
    bias = torch.randn(30, 30, requires_grad=True)
    out, lse = operator.call(*tensors, bias, Options(), TILED, with_lse=True)
    actual = torch.autograd.grad(out.square().sum() + lse.sum(), (*tensors, bias))
    out, lse = sdpa_with_lse(*tensors, bias, config=TILED)
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), (*tensors, bias))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_parameters_are_plain_tensors() -> None:
    query = torch.nn.Parameter(torch.randn(1, 2, 30, 8))
    sdpa(query, query, query, config=TILED).sum().backward()
    assert query.grad is not None
