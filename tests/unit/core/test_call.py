"""The arguments of one call, checked once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from pascal_attn_core import AttentionConfig, explain, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.sdpa_patch import patch_sdpa


def _call(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...] | None = None, **options):
    return check_call(torch.empty(query), torch.empty(key), torch.empty(value or key), **options)


@pytest.mark.parametrize(
    ("query", "key", "gqa", "batch", "heads", "kv_heads"),
    [
        ((2, 4, 5, 8), (2, 4, 7, 8), False, (2,), 4, 4),
        ((2, 4, 5, 8), (2, 2, 7, 8), True, (2,), 4, 2),
        ((2, 4, 5, 8), (2, 4, 7, 8), True, (2,), 4, 4),
        ((2, 4, 5, 8), (2, 1, 7, 8), False, (2,), 4, 1),
        ((2, 1, 5, 8), (2, 4, 7, 8), False, (2,), 4, 4),
        ((2, 4, 5, 8), (1, 4, 7, 8), False, (2,), 4, 4),
        ((4, 5, 8), (4, 7, 8), False, (), 4, 4),
        ((5, 8), (7, 8), False, (), 1, 1),
        ((3, 2, 4, 5, 8), (4, 7, 8), False, (3, 2), 4, 4),
        ((2, 0, 5, 8), (2, 0, 7, 8), False, (2,), 0, 0),
    ],
)
def test_leading_dimensions_and_heads(query, key, gqa, batch, heads, kv_heads) -> None:
    call = _call(query, key, enable_gqa=gqa)
    assert (call.batch, call.num_heads, call.num_kv_heads) == (batch, heads, kv_heads)
    assert (call.seq_len_q, call.seq_len_kv, call.head_dim, call.head_dim_v) == (5, 7, 8, 8)
    expected = torch.matmul(torch.empty(query), torch.empty(key).transpose(-2, -1)) if not gqa else torch.empty(query)
    assert call.out_shape == (*expected.shape[:-1], 8)


def test_sizes_that_follow_from_it() -> None:
    call = _call((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), enable_gqa=True)
    assert (call.groups, call.batch_size, call.num_scores, call.out_shape) == (2, 2, 2 * 4 * 5 * 7, (2, 4, 5, 6))
    assert not call.is_empty
    assert _call((2, 4, 0, 8), (2, 4, 7, 8)).is_empty
    assert _call((2, 4, 5, 8), (2, 4, 0, 8)).is_empty
    assert not _call((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6)).is_empty


def test_scale_is_that_of_the_head_unless_given() -> None:
    assert _call((1, 1, 5, 64), (1, 1, 5, 64)).scale == 0.125
    assert _call((1, 1, 5, 64), (1, 1, 5, 64), scale=0).scale == 0.0
    assert _call((1, 1, 5, 0), (1, 1, 5, 0), (1, 1, 5, 8)).scale == 1.0


@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, (None, None, 0)),
        ({"is_causal": True}, (None, 0, 0)),
        ({"is_causal": True, "alignment": "lower_right"}, (None, 0, 3)),
        ({"window": (2, 1)}, (2, 1, 0)),
        ({"window": (-1, 1), "alignment": "lower_right"}, (None, 1, 3)),
        ({"window": (2, -1)}, (2, None, 0)),
        ({"window": (2, 5), "is_causal": True}, (2, 0, 0)),
        ({"window": (-1, -1)}, (None, None, 0)),
    ],
    ids=str,
)
def test_causal_rule_and_window_are_one_band(options: dict, band: tuple) -> None:
    call = _call((1, 1, 5, 8), (1, 1, 8, 8), **options)
    assert (call.left, call.right, call.offset) == band


@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
def test_a_window_longer_than_any_number_of_64_bits_bounds_nothing(route: str) -> None:
    query = torch.randn(1, 2, 70, 8)
    out = sdpa(query, query, query, window=(10**30, 10**30), config=AttentionConfig(route=route))
    torch.testing.assert_close(out, sdpa(query, query, query), atol=1e-5, rtol=1e-5)


def test_only_torchs_own_causal_rule_is_plain() -> None:
    assert _call((1, 1, 5, 8), (1, 1, 8, 8), is_causal=True).plain_causal
    assert not _call((1, 1, 5, 8), (1, 1, 8, 8), is_causal=True, alignment="lower_right").plain_causal
    assert not _call((1, 1, 5, 8), (1, 1, 8, 8), is_causal=True, window=(3, 0)).plain_causal
    assert not _call((1, 1, 5, 8), (1, 1, 8, 8), window=(-1, 0)).plain_causal


def test_gradients_are_needed_where_any_input_asks_and_nobody_forbids() -> None:
    query, key = torch.empty(1, 1, 5, 8), torch.empty(1, 1, 7, 8)
    bias = torch.zeros(7, requires_grad=True)
    assert not check_call(query, key, key).needs_grad
    assert check_call(query, key, key, bias).needs_grad
    assert check_call(query, key.requires_grad_(), key).needs_grad
    with torch.no_grad():
        assert not check_call(query, key, key, bias).needs_grad


def test_a_call_without_tensors_remembers_sizes_only() -> None:
    call = _call((2, 4, 5, 8), (2, 4, 7, 8))
    sizes = call.without_tensors()
    assert sizes.query is None
    query = torch.empty(2, 4, 5, 8)
    again = sizes.with_tensors(query, call.key, call.value, None)
    assert again.query is query
    assert again.out_shape == call.out_shape


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
def test_a_query_may_have_fewer_leading_dimensions_than_the_key(route: str, layout: str) -> None:
    query, key = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 2, 7, 8)
    key = key if layout == "contiguous" else key.mT.contiguous().mT
    expected = torch.softmax(query @ key.mT * 8**-0.5, dim=-1) @ key
    with patch_sdpa(AttentionConfig(route=route)):
        for out in (
            sdpa(query, key, key, config=AttentionConfig(route=route)),
            F.scaled_dot_product_attention(query, key, key),
        ):
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


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
    tensors = [torch._neg_view(torch.randn(1, 1, 5, 8)) for _ in range(3)]
    bias = torch._neg_view(torch.randn(5, 5))
    for query, mask in ((tensors[0], None), (torch.randn(1, 1, 5, 8), bias)):
        call = check_call(query, tensors[1], tensors[2], mask)
        given = [t for t in (call.query, call.key, call.value, call.attn_mask) if isinstance(t, torch.Tensor)]
        assert not any(t.is_neg() for t in given)
    plain = torch.randn(1, 1, 5, 8)
    call = check_call(plain, plain, plain, bias)
    assert isinstance(call.attn_mask, torch.Tensor)
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
