"""The arguments of one call, checked once."""

from __future__ import annotations

import pytest
import torch

from pascal_attn_core import AttentionConfig, explain, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call


@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
def test_a_window_longer_than_any_number_of_64_bits_bounds_nothing(route: str) -> None:
    query = torch.randn(1, 2, 70, 8)
    out = sdpa(query, query, query, window=(10**30, 10**30), config=AttentionConfig(route=route))
    torch.testing.assert_close(out, sdpa(query, query, query), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
@pytest.mark.parametrize("mask", [torch.tensor(True), torch.tensor(False), torch.tensor(0.5)], ids=str)
def test_a_mask_may_be_one_number(route: str, mask: torch.Tensor) -> None:
    query, config = torch.randn(1, 2, 20, 8), AttentionConfig(route=route)
    expected = sdpa(query, query, query, mask.expand(20, 20), config=config)
    for out in (sdpa(query, query, query, mask, config=config), sdpa_with_lse(query, query, query, mask)[0]):
        torch.testing.assert_close(out, expected)
    assert explain(query, query, query, mask).startswith("route ")


def test_no_tensor_of_a_checked_call_is_a_negated_view() -> None:
    """Kernels read the memory as it lies."""
    negated, bias = torch._neg_view(torch.randn(1, 1, 5, 8)), torch._neg_view(torch.randn(5, 5))
    for query, mask in ((negated, None), (torch.randn(1, 1, 5, 8), bias)):
        call = check_call(query, negated, negated, mask)
        assert not any(t.is_neg() for t in (call.query, call.key, call.value))
    assert not call.attn_mask.is_neg()
    assert torch.equal(call.attn_mask, bias)
