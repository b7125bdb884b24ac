"""The coins: a hash of seed, row and key."""

from __future__ import annotations

import math

import torch

from pascal_attn_core.tiled.dropout import BYTES_PER_SCORE, block_row_codes, draw_coins, draw_seed, key_codes, row_codes


def _keep(seed: torch.Tensor, rows: int, keys: int, p: float) -> torch.Tensor:
    shape = torch.Size((1, rows, keys))
    scratch = torch.empty(BYTES_PER_SCORE * shape.numel(), dtype=torch.uint8)
    coins = draw_coins(shape, row_codes(seed, torch.arange(rows))[None], key_codes(seed, 0, keys), p, scratch)
    assert set(coins.unique().tolist()) <= {0.0, 1.0}
    return coins[0] != 0


def test_the_share_is_right_for_every_p() -> None:
    seed = draw_seed(torch.device("cpu"))
    for p in (0.0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0):
        share = 1 - _keep(seed, 500, 1000, p).double().mean().item()
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 5e5) + 1e-12, p


def test_more_dropout_drops_more_of_the_same() -> None:
    seed = draw_seed(torch.device("cpu"))
    little, much = _keep(seed, 50, 60, 0.2), _keep(seed, 50, 60, 0.6)
    assert not (much & ~little).any()


def test_other_seeds_are_other_coins() -> None:
    one, other = (_keep(torch.tensor([seed]), 200, 200, 0.5) for seed in (1, 2))
    assert abs((one ^ other).double().mean().item() - 0.5) < 0.02


def test_parts_of_keys_have_the_codes_of_the_whole() -> None:
    seed = torch.tensor([123])
    assert torch.equal(key_codes(seed, 0, 100)[37:80], key_codes(seed, 37, 80))


def test_blocks_of_rows_have_the_codes_of_their_global_numbers() -> None:
    """Ordered by token, then by head of the group; numbered by unit, head, token."""
    seed, groups, length = torch.tensor([9]), 3, 10
    codes = block_row_codes(seed, 4, torch.Size((2, 4 * groups, 5)), groups, length, 6)
    expected = [[[((4 + u) * groups + g) * length + 6 + t for g in range(groups)] for t in range(4)] for u in range(2)]
    assert torch.equal(codes, row_codes(seed, torch.tensor(expected).flatten(1)))


def test_a_seed_comes_from_torchs_generator() -> None:
    torch.manual_seed(1)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(1)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64


def test_codes_are_spread_over_the_whole_range() -> None:
    codes = row_codes(torch.tensor([0]), torch.arange(100_000)).double() / 2**31
    assert abs(codes.mean().item()) < 0.01
    counts = torch.histc(codes, bins=64, min=-1, max=1)
    assert (counts - 100_000 / 64).abs().max() < 6 * math.sqrt(100_000 / 64)
    assert row_codes(torch.tensor([0]), torch.arange(1000)).unique().numel() == 1000
