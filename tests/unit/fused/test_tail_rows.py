"""Which rows of a call on AMD's cards have their keys cut, and the launches that this becomes."""

import itertools
from typing import Any

import amd as tool
import pytest
import torch

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.geometry.amd import ARCHS, RANGES_HEAD_DIMS, blocks_of_unit, wave_size
from pascal_attn_core.fused.launch.plan import Plan, plan_call

MI50, RX_6800 = {"num_sms": 60, "arch": "gfx906"}, {"num_sms": 30, "arch": "gfx1030"}


def _plan(*shape: int, card: dict[str, Any] = MI50, dtype: torch.dtype = torch.float16, **options: Any) -> Plan:
    query = torch.empty(shape, dtype=dtype, device="meta")
    return plan_call(check_call(query, query, query, **options), **card)


def test_the_blocks_of_an_almost_empty_round_get_ranges_of_keys() -> None:
    """512 blocks where 480 are four rounds: 256 rows of each of 16 heads are the other 32."""
    plan = _plan(1, 16, 4096, 64)
    assert plan.tail is not None
    assert (plan.forward.kind, plan.tail.variant.kind, plan.splits) == ("forward", "ranges", 0)
    assert (plan.tail.first, 16 * (4096 - plan.tail.first) // 128) == (3840, 32)
    assert plan.tail.ranges * 32 <= 3 * 120  # whole rounds once more
    assert plan.variants == (plan.forward, plan.tail.variant)
    assert _plan(1, 16, 4096, 64, card=RX_6800).tail is not None


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 15, 4096, 64), {}),  # four whole rounds
        ((1, 119, 128, 64), {}),  # one round, all but full
        ((1, 16, 4096, 64), {"is_causal": True}),
        ((1, 16, 4096, 64), {"window": (100, 100)}),
        ((1, 16, 4096, 64), {"dtype": torch.float32}),
        ((1, 16, 4096, 64), {"softcap": 3.0}),
        ((1, 16, 4096, 60), {}),
        ((1, 16, 4096, 48), {}),
        ((1, 16, 4096, 64), {"attn_mask": torch.ones(4096, 4096, dtype=torch.bool, device="meta")}),
        ((1, 2, 40, 64), {}),
        ((1, 16, 4096, 64), {"card": {"num_sms": 60, "capability": (6, 1)}}),  # NVIDIA's
    ],
    ids=str,
)
def test_other_calls_are_computed_as_ever(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert _plan(*shape, **options).tail is None


def test_blocks_of_a_unit_are_those_that_registers_and_shared_memory_leave_room_for() -> None:
    table = tool.read_table()
    for arch, head_dim, kind in itertools.product(ARCHS, RANGES_HEAD_DIMS, ("forward", "ranges")):
        variant = Variant(kind, head_dim, "float16", arch=arch)
        waves_of_block = variant.geometry.threads // wave_size(arch)
        waves = tool.read_cell(table[tool.row_name(variant)][arch]).waves
        assert blocks_of_unit(arch, variant.geometry) <= 4 * waves // waves_of_block, variant.name
