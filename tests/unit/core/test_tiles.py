"""Tile shapes from facts made by hand: any card on a laptop. Bands and masks, tile by tile, against the full matrix."""

import itertools

import pytest
import torch
from attn_support.randomness import examples
from hypothesis import given
from hypothesis import strategies as st

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import LARGEST_BUFFER, MIB, DeviceInfo
from pascal_attn_core.reference import allowed_keys
from pascal_attn_core.routes import why_not
from pascal_attn_core.tiled.mask_writer import MaskWriter
from pascal_attn_core.tiled.masks import Band, MaskTiles, Part, Rule, TileState, diagonal_schedule, padding_as_bool
from pascal_attn_core.tiled.rule_bytes import RuleBytes
from pascal_attn_core.tiled.tiles import (
    Workload,
    cpu_bases,
    describe_plan,
    even_ranges,
    plan_tiles,
    recommended_tile_size_for,
    step_bytes,
)

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
DECODE_BATCH = Workload(256, 4, 1, 8192, 128, 128)
WORKLOADS = {"wan": WAN, "flux": FLUX, "sdxl": SDXL, "sdxl text": SDXL_TEXT, "llm": LLM, "decode": DECODE,
             "decode batch": DECODE_BATCH}  # fmt: skip

SIZES, HEAD_DIMS = st.integers(1, 1 << 20), st.sampled_from([8, 64, 128, 512])
FLAGS = ("copies_query", "copies_kv", "copies_out", "writes_mask", "has_band", "causal", "dropout", "backward")


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("budget_mib", [0.5, 1, 4, 16, 64, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_keeps_its_budget(card: str, budget_mib: float, backward: bool) -> None:
    for work in WORKLOADS.values():
        work = work._replace(backward=backward, dropout=backward)
        plan = plan_tiles(CARDS[card], work, int(budget_mib * MIB))
        assert plan.extra_bytes <= budget_mib * MIB
        assert 1 <= plan.q_block <= work.seq_len_q
        assert 1 <= plan.kv_block <= work.seq_len_kv
        assert 1 <= plan.units <= work.units


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_more_budget_never_means_smaller_steps(card: str, name: str) -> None:
    work = WORKLOADS[name]
    sizes = []
    for budget_mib in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        plan = plan_tiles(CARDS[card], work, budget_mib * MIB)
        sizes.append(plan.units * plan.rows(work.groups) * plan.kv_block)
    assert all(after >= before * 0.7 for before, after in itertools.pairwise(sizes)), sizes


@pytest.mark.parametrize("card", GPUS)
@pytest.mark.parametrize("work", [WAN, FLUX, SDXL, LLM], ids=["wan", "flux", "sdxl", "llm"])
def test_steps_on_a_gpu_are_millions_of_scores_of_rows_for_every_multiprocessor(card: str, work: Workload) -> None:
    """Each operator costs some microseconds to launch, however small its work."""
    plan = plan_tiles(CARDS[card], work)
    rows = plan.units * plan.rows(work.groups)
    assert rows * plan.kv_block >= 2e6
    assert work is not WAN or rows >= 128 * CARDS[card].num_sms


@pytest.mark.parametrize("card", GPUS)
def test_decoding_batches_units(card: str) -> None:
    """One query token has one row per head: only many heads together fill a GPU."""
    assert plan_tiles(CARDS[card], DECODE).units == 8
    assert plan_tiles(CARDS[card], DECODE_BATCH).units > 16


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


def test_the_bytes_of_a_step_hold_its_scores() -> None:
    work = Workload(1, 2, 100, 100, 64, 64)
    bare = step_bytes(work, 1, 10, 20)
    assert 10 * 2 * 20 * 4 <= bare < 10 * 2 * 20 * 4 + 2500
    for change in [{"acc_size": 8}, *({name: True} for name in FLAGS if name != "causal")]:
        assert step_bytes(work._replace(**change), 1, 10, 20) > bare, change


def test_a_window_keeps_the_rows_few() -> None:
    """A tile of R rows covers R + window keys, of which each row uses the window."""
    wide = plan_tiles(CARDS["CPU"], LLM)
    narrow = plan_tiles(CARDS["CPU"], LLM._replace(window=64))
    assert narrow.q_block < wide.q_block


@pytest.mark.parametrize(
    ("l2_kib", "bases"),
    [
        (0, [(1024, 512), (512, 1024)]),
        (512, [(1024, 512), (512, 1024)]),
        (1024, [(1024, 512), (512, 1024), (512, 256)]),
        (2048, [(512, 512), (1024, 512), (512, 1024)]),
        (8192, [(1024, 512), (512, 1024)]),
    ],
)
def test_half_of_a_cores_own_cache_is_one_of_the_shapes_on_a_cpu(l2_kib: int, bases: list[tuple[int, int]]) -> None:
    info = DeviceInfo("cpu", "CPU", core_l2_bytes=l2_kib << 10)
    assert list(cpu_bases(info)) == bases
    assert (plan_tiles(info, SDXL).q_block, plan_tiles(info, SDXL).kv_block) == bases[0]
    for basis in cpu_bases(info):
        plan = plan_tiles(info, SDXL, basis=basis)
        assert (plan.q_block, plan.kv_block) == basis


@pytest.mark.parametrize(
    ("first", "last", "longest", "count"),
    [(0, 129, 128, 2), (5, 1000, 100, 10), (3, 3, 8, 0), (9, 2, 8, 0), (0, 7, 1, 7), (0, 1000, 333, 4)],
)
def test_even_ranges_cover_everything_once_in_even_parts(first: int, last: int, longest: int, count: int) -> None:
    ranges = even_ranges(first, last, longest)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(first, last))
    assert len(ranges) == count
    assert all(b - a <= longest for a, b in ranges)


@pytest.mark.parametrize(
    ("l2_mib", "tile"),
    [(2.75, 64), (3, 64), (4, 64), (5.5, 128), (6, 128), (40, 256), (72, 256)],
    ids=["GTX 1080 Ti", "P40", "T4", "RTX 2080 Ti", "V100, RTX 3090", "A100", "RTX 4090"],
)
def test_the_tile_sizes_that_pascal_attn_states(l2_mib: float, tile: int) -> None:
    assert recommended_tile_size_for(int(l2_mib * 2**20)) == tile


def test_a_plan_in_words() -> None:
    words = describe_plan(CARDS["P40"], (1, 32, 8, 2048, 2048, 128))
    assert "4 query heads" in words
    assert words.endswith("MiB")


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
def test_no_buffer_has_2_to_the_31_scores_or_more_than_4_gib_and_no_product_is_too_long(
    card: str, work: Workload, budget_mib: int | None
) -> None:
    plan = plan_tiles(CARDS[card], work, None if budget_mib is None else budget_mib * MIB)
    if card == "M1":  # the forward pass adds up over keys, the backward pass over rows too
        assert max(plan.kv_block, plan.rows(work.groups)) < 1 << 15
    scores = plan.units * plan.rows(work.groups) * plan.kv_block
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
