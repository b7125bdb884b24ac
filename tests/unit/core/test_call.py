"""The arguments of one call, checked once."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

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


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"softcap": float("inf")}, ValueError, "softcap must be greater than 0 and finite, or None, got inf"),
        ({"softcap": 0.0}, ValueError, "softcap must be greater than 0"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, r"sinks must be \[2\] on cpu, got \[2\] on meta"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[2\] on cpu, got \[3\]"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, TypeError, "sinks must be a float tensor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [8, 700])
def test_softcap_and_sinks_that_do_not_fit_are_refused(
    options: dict, error: type[Exception], words: str, tokens: int
) -> None:
    query = torch.randn(1, 2, tokens, 8)
    for attend in (sdpa, sdpa_with_lse, explain):
        with pytest.raises(error, match=words):
            attend(query, query, query, **options)


def test_no_tensor_of_a_checked_call_is_a_negated_view() -> None:
    """Kernels read the memory as it lies."""
    negated, bias = torch._neg_view(torch.randn(1, 1, 5, 8)), torch._neg_view(torch.randn(5, 5))
    for query, mask in ((negated, None), (torch.randn(1, 1, 5, 8), bias)):
        call = check_call(query, negated, negated, mask)
        assert not any(t.is_neg() for t in (call.query, call.key, call.value))
    assert not call.attn_mask.is_neg()
    assert torch.equal(call.attn_mask, bias)


@pytest.mark.parametrize(("sizes", "options", "words"), [
    ((5, 8), {"is_causal": True}, "is_causal must be False with a CausalBias"),
    ((2, 4), {}, r"a CausalBias must be made for \(L, S\) = \(5, 8\), got \(2, 4\)"),
])  # fmt: skip
def test_a_causal_bias_that_does_not_fit_is_refused(sizes: tuple[int, int], options: dict, words: str) -> None:
    query, key = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match=words):
        sdpa(query, key, key, causal_lower_right(*sizes), **options)
