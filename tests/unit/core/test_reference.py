"""The definition of correct, against torch's own and by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pascal_attn_core.reference import allowed_keys, reference_sdpa


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_what_torch_means(mask: str | None, is_causal: bool, scale: float | None) -> None:
    if mask and is_causal:
        pytest.skip("torch takes one or the other")
    query, key, value = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (9, 12, 12))
    bias = {None: None, "bool": torch.rand(9, 12) < 0.7, "float": torch.randn(2, 1, 9, 12).double()}[mask]
    expected = F.scaled_dot_product_attention(query, key, value, bias, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(reference_sdpa(query, key, value, bias, is_causal, scale)[0], expected)


@pytest.mark.torch_2_5
def test_grouped_heads_share_keys_and_values() -> None:
    query, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(reference_sdpa(query, key, value, enable_gqa=True)[0], expected)


def test_lse_by_hand() -> None:
    query, key = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    out, lse = reference_sdpa(query, key, torch.tensor([[0.0], [1.0]]), scale=1.0)
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0), math.log(10.0)]))
    torch.testing.assert_close(out, torch.tensor([[0.75], [0.9]]))


def test_rows_without_keys_are_zero_with_finite_gradients() -> None:
    query, key, value = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    allowed = torch.tensor([[True] * 3, [False] * 3, [True, False, False]])
    out, lse = reference_sdpa(query, key, value, allowed)
    assert not out[1].any()
    assert lse[1] == -torch.inf
    (out.sum() + lse[[0, 2]].sum()).backward()
    assert query.grad.isfinite().all()
    assert not query.grad[1].any()


def test_the_rules_as_matrices() -> None:
    assert allowed_keys(2, 4, is_causal=True).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    lower = allowed_keys(2, 4, is_causal=True, alignment="lower_right")
    assert lower.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert allowed_keys(3, 4, window=(1, 0)).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert allowed_keys(2, 3, window=(-1, -1)).all()
    assert allowed_keys(3, 2, is_causal=True, alignment="lower_right").int().tolist() == [[0, 0], [1, 0], [1, 1]]
