"""The definition of correct by hand; the contract tests compare torch's own attention with it."""

from __future__ import annotations

import math

import torch

from pascal_attn_core.reference import allowed_keys, reference_sdpa


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
