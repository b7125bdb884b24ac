"""Which calls the fused kernels take, and how a call becomes launches."""

import itertools
from dataclasses import replace
from typing import Any

import amd as tool
import pytest
import torch
from attn_support.fused.cases import whole
from attn_support.fused.emulation import CARD, V100

from pascal_attn_core.call import check_call
from pascal_attn_core.call.lazy_mask import LazyMask
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.geometry.amd import ARCHS, RANGES_HEAD_DIMS, blocks_of_unit, wave_size
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, plan_call, tensor_plan, variant_of
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes import fused as route


def _call(q: tuple = (1, 2, 9, 16), k: tuple = (1, 2, 9, 16), mask=None, dtype=torch.float32, v: tuple = (), **options):
    tensors = [torch.empty(shape, dtype=dtype) for shape in (q, k, v or k)]
    return check_call(*tensors, mask, **options)


def _with_grad(head_dim: int = 16, **options):
    tensors = [torch.empty(1, 2, 9, head_dim, requires_grad=True) for _ in range(3)]
    return check_call(*tensors, **options)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: _call(dtype=torch.float64), "takes float32, float16 and bfloat16, got torch.float64"),
        (lambda: _call(dropout_p=0.5), "the fused kernel has no dropout"),
        (lambda: _with_grad(softcap=5.0), "no gradients with softcap or attention sinks"),
        (lambda: _with_grad(sinks=torch.zeros(2)), "no gradients with softcap or attention sinks"),
        (lambda: _with_grad(512), "its gradients end at head_dim 256, got 512"),
        (lambda: _call((1, 2, 0, 16)), "the call is empty"),
        (lambda: _call((1, 1, 4, 516), (1, 1, 4, 516)), "head_dim 516 > 512"),
        (lambda: _call((1, 1, 4, 18), (1, 1, 4, 18)), "head_dim must be a multiple of 4, got 18 and 18"),
        (lambda: _call(mask=torch.zeros(9, 9, dtype=torch.float64)), "attn_mask is torch.float64 and query"),
        (lambda: _call(mask=torch.zeros(9, 9, requires_grad=True)), "no gradient of attn_mask"),
        (lambda: _call(mask=torch.ones(9, 9, dtype=torch.bool), scale=-1.0), "a bool mask needs a positive scale"),
        (lambda: _call(mask=LazyMask((1, 1, 9, 9), lambda b, h, q, k: k <= q, device="cpu")), "attn_mask is a rule"),
    ],
)  # fmt: skip
def test_a_call_that_is_refused_says_why(call, reason: str) -> None:
    assert any(reason in line for line in call_reasons(call()))


def test_rows_that_cannot_be_read_four_at_a_time_are_refused() -> None:
    good = torch.zeros(1, 2, 9, 16)
    columns_first = torch.zeros(1, 2, 16, 9).transpose(2, 3)
    rows_of_17 = torch.zeros(2 * 9 * 17).as_strided((1, 2, 9, 16), (306, 153, 17, 1))
    one_element_on = torch.zeros(1000)[1:289].view(1, 2, 9, 16)
    assert call_reasons(_call((1, 1, 4, 512), (1, 1, 4, 512))) == []  # the largest head_dim without gradients
    for bad in (columns_first, rows_of_17, one_element_on):
        assert call_reasons(check_call(good, bad, good)) == [
            "key's rows must be contiguous and begin at multiples of 4 elements"
        ]
    inside_tokens = torch.zeros(1, 9, 2, 16).transpose(1, 2)
    wide = torch.zeros(1, 2, 9, 32)[..., :16]
    assert call_reasons(check_call(inside_tokens, wide, good)) == []


def test_nothing_is_copied_for_strides_that_broadcast() -> None:
    query = torch.zeros(2, 3, 4, 10, 64)
    key = torch.zeros(1, 64).expand(2, 3, 4, 30, 64)
    call = check_call(query, key, key, torch.zeros(30))
    (launch,) = forward_launches(call, whole(call), torch.empty_like(query))
    assert (launch.params.kb, launch.params.kh, launch.params.ks) == (0, 0, 0)
    assert launch.grid[1:] == (4, 6)
    assert launch.params.k == key.data_ptr()


def test_leading_dimensions_that_no_stride_joins_are_refused() -> None:
    query = torch.zeros(3, 2, 4, 10, 64).transpose(0, 1)
    assert call_reasons(check_call(query, query, query)) == ["its batch dimensions must be one by their strides"]
    assert call_reasons(check_call(query[:1], query[:1], query[:1])) == []


def test_one_query_fills_the_places_of_a_card_once() -> None:
    decode = _call((1, 32, 1, 128), (1, 8, 65536, 128), enable_gqa=True)
    plan = plan_call(decode, CARD.num_sms, CARD.capability)
    units, places = 8, 4 * CARD.num_sms  # a GTX 1080 Ti holds four blocks on a multiprocessor, not six
    assert plan.splits == -(-places // units)
    assert plan_call(decode, CARD.num_sms).splits == -(-6 * CARD.num_sms // units)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "head_dim", "packs"),
    [
        (1, 32, 8, 128, True),  # a large batch of new tokens: no need to cut the keys, but 63 of 64 rows would be empty
        (16, 32, 32, 128, True),
        (16, 32, 8, 128, True),
        (64, 32, 8, 128, True),
        (128, 32, 8, 128, False),
        (4096, 10, 10, 64, False),
        (77, 8, 8, 64, False),
    ],
)
def test_few_queries_take_small_tiles(queries: int, heads: int, kv_heads: int, head_dim: int, packs: bool) -> None:
    call = _call((64, heads, queries, head_dim), (64, kv_heads, 4096, head_dim), enable_gqa=heads != kv_heads)
    assert plan_call(call, CARD.num_sms).splits == packs


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "options", "ranges"),
    [
        (1, 4096, 77, {}, (1, 8)),
        (2, 4096, 77, {}, (1, 8)),
        (5, 4096, 77, {}, (1, 1)),  # one batch element after the other, each an eighth
        (1, 1026, 77, {}, (1, 4)),  # at least 256 queries
        (1, 77, 4096, {}, (8, 1)),
        (1, 1024, 1024, {}, (2, 2)),
        (1, 2048, 2048, {}, (1, 1)),
        (1, 2000, 2000, {"is_causal": True}, (1, 1)),
        (1, 1500, 1500, {"is_causal": True}, (2, 2)),
        (1, 4096, 77, {"mask": torch.ones(77, dtype=torch.bool)}, (1, 1)),
    ],
)
def test_ranges_of_columns_fill_a_card(batch, queries, keys, options: dict, ranges: tuple[int, int]) -> None:
    call = _call((batch, 10, queries, 64), (batch, 10, keys, 64), dtype=torch.float16, **options)
    assert tensor_plan(call, V100.num_sms, V100.capability, for_grad=True).ranges == ranges
    assert tensor_plan(call, V100.num_sms, V100.capability).ranges == (1, 1)


@pytest.mark.parametrize(
    ("queries", "options", "ranges"), [(4096, {}, 4), (1026, {}, 3), (1028, {}, 4), (4096, {"is_causal": True}, 1)]
)
def test_on_plain_cores_ranges_are_equal(queries: int, options: dict, ranges: int) -> None:
    call = _call((1, 10, queries, 64), (1, 10, 77, 64), **options)
    assert plan_call(call, CARD.num_sms, CARD.capability, for_grad=True).ranges == (1, ranges)


def test_a_negative_scale_takes_the_variant_that_scales_first() -> None:
    assert variant_of(_call(scale=-0.5), "forward").mask == "float"
    assert variant_of(_call(scale=0.5), "forward").mask == "none"


@pytest.mark.parametrize("as_it_came", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_thinks_of_it_where_torch_has_no_tensor_cores(dtype: torch.dtype, as_it_came: bool) -> None:
    for capability in ((5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (9, 0), None):
        on_tensor_cores = capability is not None and capability >= (7, 0) and dtype != torch.float32
        expected = capability is not None and not (on_tensor_cores and as_it_came)
        with using(Runtime("cpu", replace(CARD, capability=capability))):
            assert route.may_win(_call(dtype=dtype), as_it_came=as_it_came) == expected


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
