"""Dropout: real, repeatable, and the same in the backward pass, whatever the tiles."""

import math

import pytest
import torch
from attn_support.table import ROUTES

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.reference import reference_sdpa

TILED = AttentionConfig(route="tiled")
SMALL = AttentionConfig(route="tiled", q_block=7, kv_block=13)


def _kept(config: AttentionConfig, p: float, shape: tuple[int, ...] = (2, 3, 40, 50), **options) -> torch.Tensor:
    """Which probabilities [B, H, L, S] a call keeps, read off through an identity as value."""
    batch, heads, length, keys = shape
    query, key = torch.zeros(batch, heads, length, 4), torch.zeros(batch, heads, keys, 4)
    value = torch.eye(keys).expand(batch, heads, keys, keys)
    return sdpa(query, key, value, None, p, config=config, **options) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_share_asked_for(p: float) -> None:
    kept = _kept(TILED, p, (4, 4, 128, 128))
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
    # Nor is any row, key or head favoured.
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):
        shares = kept.double().mean(dim=dims)
        assert (shares - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) * shares.numel() / kept.numel())


def test_neighbouring_coins_are_independent() -> None:
    kept = _kept(TILED, 0.5, (2, 4, 128, 128)).double() - 0.5
    count = kept.numel()
    for shift in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 1)):
        correlation = (kept * kept.roll(shift, (0, 1, 2, 3))).mean().item() / 0.25
        assert abs(correlation) < 5 / math.sqrt(count), shift
    rows = kept.flatten(0, 2)
    products = (rows @ rows.T / rows.shape[1] / 0.25).fill_diagonal_(0.0)
    assert products.abs().max() < 0.75  # of 128 coins: no two rows are alike or opposite


@pytest.mark.parametrize("route", ["online", "small_tiles", "tiny_tiles", "small_budget"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_coins_do_not_depend_on_the_tiles(route: str, is_causal: bool) -> None:
    torch.manual_seed(3)
    expected = _kept(TILED, 0.4, is_causal=is_causal)
    torch.manual_seed(3)
    assert torch.equal(_kept(ROUTES[route], 0.4, is_causal=is_causal), expected)


def test_the_coins_do_not_depend_on_strides_and_grouping() -> None:
    def attend(query, key, value, **options):
        torch.manual_seed(3)
        return sdpa(query, key, value, None, 0.4, config=SMALL, **options)

    query, key, value = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    grouped = attend(query, key, value, enable_gqa=True)
    alone = attend(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    views = attend(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)), enable_gqa=True)
    torch.testing.assert_close(grouped, alone, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grouped, views, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
def test_the_seed_of_torch_repeats_it_and_every_call_differs(route: str) -> None:
    torch.manual_seed(11)
    first, second = _kept(ROUTES[route], 0.5), _kept(ROUTES[route], 0.5)
    torch.manual_seed(11)
    assert torch.equal(_kept(ROUTES[route], 0.5), first)
    assert 0.4 < (first ^ second).double().mean() < 0.6


@pytest.mark.parametrize("config", [TILED, SMALL], ids=["tiled", "small_tiles"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 3)}], ids=str)
def test_the_backward_pass_drops_the_same(config: AttentionConfig, options: dict) -> None:
    """Against plain attention with the mask that the forward pass is seen to have used."""
    query, key, value = (torch.randn(2, 4, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    p, seed = 0.3, 5
    torch.manual_seed(seed)
    out = sdpa(query, key, value, None, p, config=config, **options)
    torch.manual_seed(seed)
    identity = torch.eye(40, dtype=torch.float64).expand(2, 4, 40, 40)
    dropped = sdpa(query.detach(), key.detach(), identity, None, p, config=config, **options)
    scores = query @ key.transpose(-2, -1) / math.sqrt(8)
    keep = (dropped != 0).double() / (1 - p)
    allowed = reference_sdpa(query.detach(), key.detach(), identity, **options)[0] != 0
    expected = (scores.masked_fill(~allowed, -torch.inf).softmax(-1) * keep) @ value
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, (query, key, value), grad_out)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (query, key, value), grad_out))
