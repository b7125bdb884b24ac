"""Which blocks a launch has whose tiles are distributed evenly, from sizes alone."""

import random
from typing import Any

import pytest
import torch
from attn_support.fused.emulation import T4, V100
from attn_support.randomness import seeds, times

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import Variant, all_variants
from pascal_attn_core.fused.geometry.tensor import MOST_PIECES
from pascal_attn_core.fused.launch.plan import Plan, tensor_plan
from pascal_attn_core.fused.launch.stream_k import busiest, distribute


def _cases() -> list[tuple[tuple[int, ...], int, int, int]]:
    draw = random.Random(seeds(1)[0])
    found: list[tuple[tuple[int, ...], int, int, int]] = [
        ((32,) * 8, 8, 64, 40), ((32,) * 8, 32, 64, 40), ((128,) * 32, 8, 64, 40), ((64,), 1, 32, 80),
        ((0, 0, 9), 7, 64, 3),
    ]  # fmt: skip
    for _ in range(times(60)):
        rows, places = draw.randint(1, 24), draw.choice((1, 3, 40, 68, 80))
        longest = draw.choice((3, 20, 300))
        sizes = [draw.randint(0, longest) for _ in range(rows)] if draw.random() < 0.6 else [longest] * rows
        found.append((tuple(sizes), draw.randint(1, 30), draw.choice((32, 64)), places))
    return [case for case in found if distribute(*case) is not None]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_each_tile_meets_each_of_its_keys_once(case: tuple[tuple[int, ...], int, int, int]) -> None:
    sizes, units, cols, places = case
    found = distribute(*case)
    assert found is not None
    assert len(found.listed) <= MOST_PIECES
    assert {piece.tile for piece in found.listed} == set(range(found.whole, len(sizes) * units))
    places_in_memory = []
    for tile in range(found.whole, len(sizes) * units):
        pieces = sorted((p for p in found.listed if p.tile == tile), key=lambda piece: piece.part)
        assert [piece.part for piece in pieces] == list(range(pieces[0].parts))
        assert [piece.first for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == sizes[tile % len(sizes)]
        assert all(piece.first < piece.end for piece in pieces) or len(pieces) == 1
        assert {(piece.parts, piece.slot) for piece in pieces} == {(len(pieces), pieces[0].slot)}
        if len(pieces) > 1:
            places_in_memory += [piece.slot + piece.part for piece in pieces]
    assert sorted(places_in_memory) == list(range(found.slots))
    total = units * sum(sizes) * cols
    costs = [size * cols for size in sizes * units][: found.whole] + [piece.cost(cols) for piece in found.listed]
    assert total / places <= busiest(costs, places) <= found.keys
    order = [piece.cost(cols) for piece in found.listed]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(("heads", "tokens", "most"), [(8, 2048, 0.12), (8, 8192, 0.02), (32, 2048, 0.04)])
@pytest.mark.parametrize("causal", [False, True])
def test_little_of_the_card_is_idle(heads: int, tokens: int, most: float, causal: bool) -> None:
    """A block for each tile leaves a T4 idle for a fifth of the time, or two fifths under a causal rule."""
    rows = tokens // 256
    sizes = tuple(4 * (i + 1) for i in range(rows)) if causal else (tokens // 64,) * rows
    found = distribute(sizes, heads, 64, 40)
    assert found is not None
    assert 1 - heads * sum(sizes) * 64 / 40 / found.keys < most
    # When the last block is done of a launch with one for each tile, those of a head first that have most keys.
    assert found.keys < busiest([size * 64 for size in sorted(sizes, reverse=True)] * heads, 40)


@pytest.mark.parametrize("places", [40, 80])
def test_more_tiles_than_a_launch_can_list_end_together(places: int) -> None:
    sizes = tuple(4 * (i + 1) for i in range(16))
    found = distribute(sizes, 32, 64, places)
    assert found is not None
    assert (found.whole, found.blocks) == (512 - MOST_PIECES + places, 512)
    assert 1 - 32 * sum(sizes) * 64 / places / found.keys < 0.03
    assert found.keys < 0.95 * busiest([size * 64 for size in sorted(sizes, reverse=True)] * 32, places)
    assert _plan(32, 4096, V100, is_causal=True).pieces == distribute(sizes, 32, 64, 80)


def _plan(heads: int, tokens: int, card: Any = T4, head_dim: int = 64, **rules: Any) -> Plan:
    query = torch.empty(1, heads, tokens, head_dim, dtype=torch.float16, device="meta")
    return tensor_plan(check_call(query, query, query, **rules), card.num_sms, card.capability)


def test_calls_that_leave_some_of_the_card_idle_are_distributed() -> None:
    found = _plan(8, 2048)
    assert (found.forward.kind, found.pieces is None) == ("tensor_even", False)
    assert found.unlisted == Plan(Variant("tensor", 64, "float16"))
    assert _plan(8, 2048, is_causal=True).forward.kind == "tensor_even"
    assert _plan(24, 4096, V100).forward.kind == "volta"  # 4 % are less than what is worth it
    assert _plan(10, 4096).pieces is None
    assert _plan(8, 2048, scale=-1.0).forward.kind == "tensor"  # where numbers are added there is no such kernel
    mask = torch.empty(2048, 2048, dtype=torch.bool, device="meta")
    assert _plan(8, 2048, attn_mask=mask).forward.kind == "tensor"  # with a mask its loop is slower
    assert _plan(8, 2048, attn_mask=mask, is_causal=True).forward.kind == "tensor_even"


def test_every_kernel_that_a_plan_may_name_is_among_all() -> None:
    cards = [(card, dim) for dim in (32, 36, 40, 64, 80, 96, 128, 256) for card in (T4, V100)[: 1 + (dim <= 128)]]
    assert {_plan(8, 2048, *card).forward for card in cards} <= set(all_variants())
