"""Bands and masks, tile by tile, against the full matrix."""

from __future__ import annotations

import itertools

import pytest
import torch

from pascal_attn_core.call import check_call
from pascal_attn_core.reference import allowed_keys
from pascal_attn_core.tiled.mask_writer import MaskWriter
from pascal_attn_core.tiled.masks import Band, MaskTiles, Part, Rule, TileState, diagonal_schedule, padding_as_bool

BANDS = [
    {"is_causal": True},
    {"is_causal": True, "alignment": "lower_right"},
    {"window": (3, 2)},
    {"window": (0, 0), "alignment": "lower_right"},
    {"window": (-1, 4)},
    {"window": (5, -1), "alignment": "lower_right"},
    {"window": (6, 9), "is_causal": True},
]


def _band(length: int, keys: int, options: dict) -> tuple[Band, torch.Tensor]:
    query, key = torch.empty(length, 1), torch.empty(keys, 1)
    return Band.of(check_call(query, key, key, **options)), allowed_keys(length, keys, **options)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(("length", "keys"), [(12, 12), (7, 15), (15, 7)])
def test_the_key_range_holds_every_allowed_key_and_little_else(options: dict, length: int, keys: int) -> None:
    band, allowed = _band(length, keys, options)
    for q0, q1 in itertools.combinations(range(length + 1), 2):
        first, last = band.key_range(q0, q1, keys)
        seen = allowed[q0:q1].any(0).nonzero().flatten().tolist()
        if seen:
            assert (first, last) == (seen[0], seen[-1] + 1)
        else:
            assert last <= first


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("sub_tokens", [0, 4])
def test_the_schedule_visits_every_allowed_score_once(options: dict, sub_tokens: int) -> None:
    length, keys = 40, 200
    band, allowed = _band(length, keys, options)
    for q0, q1 in ((0, 40), (0, 13), (13, 40)):
        visits = torch.zeros(length, keys, dtype=torch.int64)
        first, last = band.key_range(q0, q1, keys)
        for t0, t1, ranges in diagonal_schedule(band, q0, q1, first, last, 64, sub_tokens, 16):
            for j0, j1 in ranges:
                visits[q0 + t0 : q0 + t1, j0:j1] += 1
        assert visits.max() <= 1
        assert (visits[q0:q1][allowed[q0:q1]] == 1).all()


def _tiles(mask: torch.Tensor, full: tuple[int, int, int, int]) -> MaskTiles:
    return MaskTiles(mask.expand(full), readable=True, look_at_tiles=True)


@pytest.mark.parametrize("as_float", [False, True])
def test_tiles_of_a_mask_are_empty_full_or_mixed(as_float: bool) -> None:
    allowed = torch.zeros(8, 12, dtype=torch.bool)
    allowed[:4, :6] = True
    allowed[4:, 6:] = torch.rand(4, 6) < 0.5
    allowed[4, 6:8] = torch.tensor([True, False])
    mask = torch.zeros(8, 12).masked_fill(~allowed, -torch.inf) if as_float else allowed
    tiles = _tiles(mask, (2, 3, 8, 12))
    assert tiles.state(0, 1, 0, 4, 0, 6) is TileState.FULL
    assert tiles.state(0, 1, 0, 4, 6, 12) is TileState.EMPTY
    assert tiles.state(0, 2, 4, 8, 6, 12) is TileState.MIXED


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([0, 0, 1, 1, 1, 0], (2, 5)),
        ([1, 0, 0, 0, 0, 1], (0, 6)),
        ([0, 0, 0, 0, 0, 0], (0, 0)),
        ([1, 1, 1, 1, 1, 1], (0, 6)),
        ([0, 0, 0, 0, 0, 1], (5, 6)),
    ],
)
def test_padding_is_cut_off_at_both_ends(as_float: bool, allowed: list[int], expected: tuple[int, int]) -> None:
    mask = torch.tensor(allowed, dtype=torch.bool)
    mask = torch.zeros(6).masked_fill(~mask, -torch.inf) if as_float else mask
    assert _tiles(mask, (2, 3, 8, 6)).key_range(0, 2) == expected


@pytest.mark.parametrize(
    ("row", "keep"),
    [
        ([0.0, 0.0, -torch.inf], [True, True, False]),
        ([0.0, 0.0, -3.4e38], [True, True, False]),
        ([5.0, 5.0, -1e4], [True, True, False]),
        ([-torch.inf, -torch.inf, -torch.inf], [False, False, False]),
        ([0.0, 1.0, -torch.inf], None),
        ([0.0, -100.0, -torch.inf], None),
        ([0.0, torch.nan, 0.0], None),
        ([-2e4, -2e4, -torch.inf], None),
    ],
)
def test_only_all_or_nothing_biases_are_padding(row: list[float], keep: list[bool] | None) -> None:
    found = padding_as_bool(torch.tensor(row).expand(2, 3, 8, 3), torch.float32)
    assert (found is None) == (keep is None)
    if found is not None:
        assert found[0][0, 0, 0].tolist() == keep


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -torch.inf])
@pytest.mark.parametrize(
    ("units", "tokens", "groups", "keys", "room"),
    [(2, 5, 3, 7, 1000), (2, 5, 3, 7, 50), (2, 5, 3, 7, 21), (2, 5, 3, 7, 20), (1, 1, 1, 7, 3), (3, 4, 2, 9, 2)],
)
def test_masks_are_written_through_a_buffer_of_any_size(dtype, value, units, tokens, groups, keys, room) -> None:
    scores = torch.randn(units, tokens * groups, keys, dtype=dtype)
    scores[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0], dtype=dtype)
    keep = torch.rand(units, groups, tokens, keys) < 0.5
    expected = scores.view(units, tokens, groups, keys).masked_fill(~keep.transpose(1, 2), value)
    writer = MaskWriter(groups, dtype, torch.device("cpu"), max_scores=room)
    writer.forbid(scores, Rule(masks=[Part(0, keep)]), value)
    actual = scores.view(expected.shape)
    assert torch.equal(actual.isnan(), expected.isnan())
    torch.testing.assert_close(actual.nan_to_num(), expected.nan_to_num(), rtol=0, atol=0)
