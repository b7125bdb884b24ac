"""Tile shapes from facts made by hand: any card on a laptop; tiles that a rule or a mask leaves out."""

import itertools

import pytest
import torch
from attn_support.randomness import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import LARGEST_BUFFER, MIB, DeviceInfo
from pascal_attn_core.routes import why_not
from pascal_attn_core.tiled.mask_writer import MaskWriter
from pascal_attn_core.tiled.masks import Part, Rule
from pascal_attn_core.tiled.rule_bytes import RuleBytes
from pascal_attn_core.tiled.tiles import Workload, plan_tiles

CARDS = {
    "GTX 1080 Ti": DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), num_sms=28, l2_bytes=2816 << 10, total_bytes=11 << 30),
    "P40": DeviceInfo("cuda", "P40", (6, 1), num_sms=30, l2_bytes=3 << 20, total_bytes=24 << 30),
    "RTX 3090": DeviceInfo("cuda", "RTX 3090", (8, 6), num_sms=82, l2_bytes=6 << 20, total_bytes=24 << 30),
    "H200": DeviceInfo("cuda", "H200", (9, 0), num_sms=132, l2_bytes=50 << 20, total_bytes=141 << 30),
    "MI50": DeviceInfo("hip", "MI50", None, num_sms=60, l2_bytes=4 << 20, total_bytes=16 << 30, arch="gfx906"),
    "M1": DeviceInfo("mps", "Apple M1", num_sms=8, total_bytes=12 << 30),
    "A770": DeviceInfo("xpu", "Intel(R) Arc(TM) A770 Graphics", num_sms=32, total_bytes=16 << 30),
    "CPU": DeviceInfo("cpu", "CPU", num_sms=8, l2_bytes=32 << 20),
}
GPUS = [name for name in CARDS if name != "CPU"]

# (units, groups, L, S, D): what people run.
WAN = Workload(12, 1, 32760, 32760, 128, 128)
FLUX = Workload(24, 1, 4608, 4608, 128, 128, copies_query=True, copies_kv=True, copies_out=True)
SDXL = Workload(20, 1, 4096, 4096, 64, 64)
SDXL_TEXT = Workload(20, 1, 4096, 77, 64, 64)
LLM = Workload(
    8, 4, 2048, 2048, 128, 128, copies_query=True, copies_out=True, writes_mask=True, has_band=True, causal=True
)
DECODE = Workload(8, 4, 1, 8192, 128, 128)
WORKLOADS = {"wan": WAN, "flux": FLUX, "sdxl": SDXL, "sdxl text": SDXL_TEXT, "llm": LLM, "decode": DECODE,
             "decode batch": Workload(256, 4, 1, 8192, 128, 128)}  # fmt: skip

SIZES, HEAD_DIMS = st.integers(1, 1 << 20), st.sampled_from([8, 64, 128, 512])
FLAGS = ("copies_query", "copies_kv", "copies_out", "writes_mask", "has_band", "causal", "dropout", "backward")


@pytest.mark.parametrize("card", CARDS)
def test_a_plan_keeps_its_budget(card: str) -> None:
    for work, budget_mib, backward in itertools.product(WORKLOADS.values(), (0.5, 1, 4, 16, 64, 256), (False, True)):
        work = work._replace(backward=backward, dropout=backward)
        plan = plan_tiles(CARDS[card], work, int(budget_mib * MIB))
        assert plan.extra_bytes <= budget_mib * MIB
        assert 1 <= plan.q_block <= work.seq_len_q
        assert 1 <= plan.kv_block <= work.seq_len_kv
        assert 1 <= plan.units <= work.units


@pytest.mark.parametrize("card", CARDS)
def test_more_budget_never_means_smaller_steps(card: str) -> None:
    for name, work in WORKLOADS.items():
        plans = [plan_tiles(CARDS[card], work, budget_mib * MIB) for budget_mib in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
        sizes = [plan.units * plan.q_block * work.groups * plan.kv_block for plan in plans]
        assert all(after >= before * 0.7 for before, after in itertools.pairwise(sizes)), (name, sizes)


@pytest.mark.parametrize("card", GPUS)
@pytest.mark.parametrize("work", [WAN, FLUX, SDXL, LLM], ids=["wan", "flux", "sdxl", "llm"])
def test_steps_on_a_gpu_are_millions_of_scores_of_rows_for_every_multiprocessor(card: str, work: Workload) -> None:
    """Each operator costs some microseconds to launch, however small its work."""
    plan = plan_tiles(CARDS[card], work)
    rows = plan.units * plan.q_block * work.groups
    assert rows * plan.kv_block >= 2e6
    assert work is not WAN or rows >= 128 * CARDS[card].num_sms


@pytest.mark.parametrize("card", CARDS)
def test_a_tile_asked_for_is_the_tile_used(card: str) -> None:
    plan = plan_tiles(CARDS[card], SDXL, 16 * MIB, q_block=100, kv_block=30)
    assert (plan.q_block, plan.kv_block) == (100, 30)
    assert plan_tiles(CARDS[card], SDXL, 16 * MIB, q_block=100).q_block == 100
    assert plan_tiles(CARDS[card], SDXL, 1 * MIB, kv_block=4096).kv_block == 4096
    assert plan_tiles(CARDS[card], SDXL_TEXT, 16 * MIB, kv_block=4096).kv_block == 77


@pytest.mark.parametrize("card", CARDS)
def test_what_cannot_fit_says_how_much_it_needs(card: str) -> None:
    with pytest.raises(ValueError, match=r"budget_mib must be at least .* got 1\.000"):
        plan_tiles(CARDS[card], SDXL, 1 * MIB, q_block=4096, kv_block=4096)
    with pytest.raises(ValueError, match="budget_mib must be at least"):
        plan_tiles(CARDS[card], FLUX, 64)


def test_a_window_keeps_the_rows_few() -> None:
    """A tile of R rows covers R + window keys, of which each row uses the window."""
    wide = plan_tiles(CARDS["CPU"], LLM)
    narrow = plan_tiles(CARDS["CPU"], LLM._replace(window=64))
    assert narrow.q_block < wide.q_block


@pytest.mark.parametrize(
    ("l2_kib", "tile"), [(0, (1024, 512)), (1024, (1024, 512)), (2048, (512, 512)), (8192, (1024, 512))]
)
def test_half_of_a_cores_own_cache_holds_the_scores_of_a_tile_where_it_is_large(l2_kib: int, tile: tuple) -> None:
    plan = plan_tiles(DeviceInfo("cpu", "CPU", core_l2_bytes=l2_kib << 10), SDXL)
    assert (plan.q_block, plan.kv_block) == tile


@examples(300)
@given(
    card=st.sampled_from(sorted(CARDS)),
    work=st.builds(
        Workload,
        units=st.integers(1, 4096),
        groups=st.sampled_from([1, 4, 32, 71]),
        seq_len_q=SIZES,
        seq_len_kv=SIZES,
        head_dim=HEAD_DIMS,
        head_dim_v=HEAD_DIMS,
        acc_size=st.sampled_from([4, 8]),
        mask_keys=st.sampled_from([0, 4096]),
        window=st.sampled_from([None, 64]),
        rules=st.builds(RuleBytes, *[st.integers(0, 64)] * 4),
        **{name: st.booleans() for name in FLAGS},
    ),
    budget_mib=st.sampled_from([None, 64, 4096, 1 << 20, 1 << 40]),
)
def test_no_buffer_has_2_to_the_31_scores_or_more_than_4_gib_and_no_product_is_too_long(card, work, budget_mib) -> None:
    plan = plan_tiles(CARDS[card], work, None if budget_mib is None else budget_mib * MIB)
    if card == "M1":  # the forward pass adds up over keys, the backward pass over rows too
        assert max(plan.kv_block, plan.q_block * work.groups) < 1 << 15
    scores = plan.units * plan.q_block * work.groups * plan.kv_block
    assert scores * work.acc_size <= plan.extra_bytes <= LARGEST_BUFFER == 4 << 30
    assert scores < 1 << 31


def test_tiles_that_are_asked_for_are_cut_where_a_product_would_be_too_long() -> None:
    long = WAN._replace(seq_len_q=1 << 16, groups=2)
    assert plan_tiles(CARDS["M1"], long, 4096 * MIB, q_block=1 << 16, kv_block=8).q_block == 1 << 13
    assert plan_tiles(CARDS["M1"], WAN, 4096 * MIB, q_block=8, kv_block=32760).kv_block == 1 << 14


def test_plain_attention_stores_no_larger_matrix_either() -> None:
    query = torch.empty(1, 1, 40_000, 8, device="meta")
    generous = AttentionConfig(route="math", math_limit_mib=1e6)
    (reason,) = why_not("math", check_call(query, query, query), generous)
    assert reason == "its score matrix of 6,104 MiB is above 4 GiB, the largest buffer that the device allows"
    assert sdpa(query, query, query).shape == query.shape


KEYS = torch.arange(256)
HALF = torch.ones(256, 256, dtype=torch.bool)
HALF[:128, 128:] = False


def padding(low: float, shared: float = 0.0) -> torch.Tensor:
    """A float mask that leaves the keys from 28 to 127, the same number for all of them."""
    return (torch.where((KEYS >= 28) & (KEYS < 128), 0.0, low) + shared)[None, None, None]


# Of 16 tiles, 4 x 4, how many are computed in blocks of 64 and of 256 queries, and whether their scores are bounded.
COMPUTED = {
    "nothing": ({}, 16, 16, True),
    "causal": ({"is_causal": True}, 10, 12, True),
    "causal lower right": ({"is_causal": True, "alignment": "lower_right"}, 10, 12, True),
    "window of one key": ({"window": (0, 0)}, 4, 12, True),
    "window": ({"window": (64, 64)}, 10, 14, True),
    "bool mask": ({"attn_mask": HALF}, 12, 16, True),
    "float mask": ({"attn_mask": torch.zeros(256, 256).masked_fill(~HALF, -torch.inf)}, 12, 16, False),
    "bool padding": ({"attn_mask": padding(-torch.inf) == 0.0}, 6.25, 6.25, True),
    "padding": ({"attn_mask": padding(-torch.inf)}, 6.25, 6.25, True),
    "padding by the lowest number": ({"attn_mask": padding(-3.4e38)}, 6.25, 6.25, True),
    "padding by a low number": ({"attn_mask": padding(-1e4)}, 6.25, 6.25, True),
    "padding and what all keys share": ({"attn_mask": padding(-1e4, 5.0)}, 6.25, 6.25, True),
    "padding and what swallows scores": ({"attn_mask": padding(-torch.inf, -2e4)}, 6.25, 6.25, False),
    "padding and NaN": ({"attn_mask": padding(-torch.inf, torch.nan)}, 16, 16, False),
    "a bias": ({"attn_mask": padding(-100.0)}, 16, 16, False),
    "no key": ({"attn_mask": torch.zeros(1, 1, 1, 256, dtype=torch.bool)}, 0, 0, True),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_tiles_that_no_query_may_look_at_are_not_computed(case: str) -> None:
    options, *computed, is_bounded = COMPUTED[case]
    query, key, value = torch.randn(3, 1, 2, 256, 8).unbind()
    outs = []
    for rows, tiles in zip((64, 256), computed):
        config = AttentionConfig(route="tiled", q_block=rows, kv_block=64)
        with FlopCounterMode(display=False) as counter, record() as report:
            outs.append(sdpa(query, key, value, **options, config=config))
        assert counter.get_total_flops() == tiles * 2 * 64 * 64 * 2 * (8 + 8)
        (stats,) = report.calls.values()
        assert (stats.bounded_blocks == stats.blocks) is is_bounded
    torch.testing.assert_close(*outs, equal_nan=True)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, -torch.inf), (torch.float64, 0.0)])
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
