"""Even distribution: tiles whose keys are cut within one launch, emulated with blocks that take turns in no order."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import GXX, T4, V100, Deadlock, emulate
from attn_support.fused.packed import poisoned_memory
from attn_support.oracle import cast
from attn_support.table import MASKS
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa, sdpa_with_lse
from pascal_attn_core.call import AttentionCall, check_call, empty_output
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch import plan, stream_k
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, key_tiles
from pascal_attn_core.fused.launch.stream_k import Piece, Pieces
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
TENSOR = AttentionConfig(route="fused-tensor")
CARDS = {"T4": T4, "V100": V100}
KINDS = ("tensor_even", "volta_even")


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest) -> DeviceInfo:
    return CARDS[request.param]


@pytest.fixture
def free_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans in which cutting a tile costs nothing and small tiles are slow, so that small calls are cut as well."""
    for name, keys in (("PART_KEYS", 0), ("START_KEYS", 0), ("_LEAST", 1)):
        monkeypatch.setattr(stream_k, name, keys)
    for name, value in (("_ZEROING", 0), ("_LISTED_SPEED", 1.0), ("_SMALL_SPEED", 1e-3)):
        monkeypatch.setattr(plan, name, value)
    caches = stream_k.distribute, plan._fastest, plan._splits
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


LOWER_RIGHT = {"is_causal": True, "alignment": "lower_right"}
# multiprocessors, head_dim, head_dim_v, query heads, queries, keys, mask, rules
SIZES: list[tuple[int, int, int, int, int, int, str, dict[str, Any]]] = [
    (3, 64, 64, 4, 200, 600, "none", {}),  # four tiles on three
    (40, 64, 64, 2, 200, 900, "none", {}),  # more multiprocessors than tiles: each is cut into many
    (3, 64, 64, 2, 500, 300, "none", LOWER_RIGHT),
    (3, 64, 64, 2, 300, 400, "bool blocks", {"window": (150, 70)}),
    (5, 64, 64, 4, 200, 500, "bool some rows empty", {}),
    (5, 64, 64, 4, 200, 500, "bool [L, S]", {"softcap": 20.0}),
    (3, 64, 64, 4, 200, 500, "none", {"softcap": 3.0}),
    (3, 128, 128, 4, 200, 400, "none", {}),
    (3, 128, 64, 4, 100, 400, "bool [B, 1, 1, S]", {}),
    (3, 40, 48, 4, 140, 300, "none", {}),
    (5, 96, 96, 4, 140, 300, "bool nothing allowed", {}),
    (5, 80, 80, 4, 140, 300, "bool [B, H, L, S]", {}),
    (5, 32, 32, 4, 140, 300, "none", {}),
]


def _inputs(head_dim: int, head_dim_v: int, heads: int, queries: int, keys: int, mask: str) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = (1, heads, queries, head_dim), (1, heads // 2, keys, head_dim), (1, heads // 2, keys, head_dim_v)
    tensors = [torch.randn(shape, generator=generator).half() for shape in shapes]
    return [*tensors, MASKS[mask]((1, heads, queries, keys), torch.float16, generator)]


def _is_close(found: tuple[Tensor, Tensor], inputs: list[Tensor | None], rules: dict[str, Any]) -> None:
    wide = [cast(t, torch.float64) for t in inputs]
    out, lse = reference_sdpa(*wide, **rules)  # type: ignore[arg-type]
    torch.testing.assert_close(found[0].double(), out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("free_parts")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cut_tiles_have_the_answer_of_the_definition(size: tuple[Any, ...], card: DeviceInfo) -> None:
    num_sms, *shape, mask, rules = size
    inputs = _inputs(*shape, mask)  # type: ignore[arg-type]
    rules = {"enable_gqa": True, **rules}
    with emulated_card(info=replace(card, num_sms=num_sms)) as kernels, poisoned_memory():
        found = sdpa_with_lse(*inputs, **rules, config=TENSOR)  # type: ignore[arg-type]
    launch = kernels.queued[-1]
    assert launch.variant.is_even
    _is_close(found, inputs, rules)


@pytest.mark.usefixtures("free_parts")
@pytest.mark.parametrize("mask", ["none", "bool expanded"])
def test_sinks_are_added_once_to_a_tile_in_parts(card: DeviceInfo, mask: str) -> None:
    inputs = _inputs(64, 64, 4, 150, 700, mask)
    rules = {"enable_gqa": True, "sinks": torch.tensor([-torch.inf, 0.5, 40.0, -3.0])}
    with emulated_card(info=replace(card, num_sms=3)) as kernels:
        found = sdpa_with_lse(*inputs, **rules, config=TENSOR)  # type: ignore[arg-type]
    assert kernels.queued[-1].variant.is_even
    _is_close(found, inputs, {**rules, "sinks": rules["sinks"].double()})  # type: ignore[attr-defined]


@pytest.mark.usefixtures("free_parts")
def test_a_batch_that_is_no_one_dimension_is_not_cut(card: DeviceInfo) -> None:
    """Its views have fewer heads than the plan was made for."""
    query, key = (torch.randn(2, 3, 2, n, 64).half().transpose(0, 1) for n in (70, 640))
    assert query.stride()[:2] == (2 * 70 * 64, 3 * 2 * 70 * 64)
    with emulated_card(info=replace(card, num_sms=5)) as kernels:
        out = sdpa(query, key, key, config=TENSOR)
        whole = sdpa(query.contiguous(), key.contiguous(), key.contiguous(), config=TENSOR)
    assert {launch.variant.is_even for launch in kernels.queued} == {True}
    assert len(kernels.queued) > 2
    torch.testing.assert_close(out, whole, atol=2e-3, rtol=2e-3)


# ---- the parts -------------------------------------------------------------------------------------------------------


def _call(variant: Variant, heads: int = 1, rows: int = 70, key_tiles: int = 7) -> AttentionCall:
    generator = torch.Generator().manual_seed(variant.head_dim)
    keys = key_tiles * variant.geometry.cols - 5
    query, key, value = (torch.randn(1, heads, n, variant.head_dim, generator=generator) for n in (rows, keys, keys))
    key *= (torch.linspace(-3, 3, keys).abs() + 0.1)[:, None]  # the largest scores are those of the ends
    mask = torch.rand(rows, keys, generator=generator) < 0.5 if variant.mask == "bool" else None
    return check_call(query.half(), key.half(), value.half(), mask)


def _cut_at(ends: list[int], *cuts: int, tile: int = 0, slot: int = 0) -> list[Piece]:
    """A tile of rows in parts."""
    bounds = [0, *cuts, ends[0]]
    return [Piece(tile, bounds[i], bounds[i + 1], slot, i, len(bounds) - 1) for i in range(len(bounds) - 1)]


def _run(variant: Variant, call: AttentionCall, listed: list[Piece], seed: int = 1, text: str | None = None) -> Tensor:
    out = empty_output(call).fill_(float("nan"))
    mutated = None if text is None else {variant.kind: text}
    with poisoned_memory():
        emulate(forward_launches(call, Plan(variant, pieces=Pieces(0, tuple(listed))), out), seed=seed, mutated=mutated)
    return out


def _variants(kind: str) -> list[Variant]:
    return [Variant(kind, 64, "float16"), Variant(kind, 64, "float16", "bool")]


@pytest.mark.parametrize("cuts", [(3,), (2, 5), (1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_no_bit_which_block_is_the_last(kind: str, cuts: tuple[int, ...]) -> None:
    for variant in _variants(kind):
        call = _call(variant)
        listed = _cut_at(list(key_tiles(call, variant.geometry)), *cuts)
        first = _run(variant, call, listed)
        for seed in range(2, 12):
            assert torch.equal(_run(variant, call, listed[::-1] if seed % 2 else listed, seed), first)


def _mixed(variant: Variant) -> AttentionCall:
    return _call(variant, heads=4, rows=200, key_tiles=4)


@functools.cache
def _oracle(variant: Variant) -> Tensor:
    call = _mixed(variant)
    mask = call.attn_mask
    assert mask is None or isinstance(mask, Tensor)
    return reference_sdpa(call.query.double(), call.key.double(), call.value.double(), mask)[0]


def _worst(kind: str, text: str | None, seeds: int = 10) -> float:
    """The largest error of heads in two and in three parts, or the first that leaves no doubt; several times, since
    blocks and warps run as chance has it."""
    worst = 0.0
    for variant in _variants(kind):
        call = _mixed(variant)
        ends = list(key_tiles(call, variant.geometry))
        listed = [*_cut_at(ends, 2), *_cut_at(ends, 1, 3, tile=1, slot=2)]
        listed += [*_cut_at(ends, 1, tile=2, slot=5), *_cut_at(ends, 1, 2, tile=3, slot=7)]
        for seed in range(1, seeds + 1):
            try:
                error = (_run(variant, call, listed, seed, text).double() - _oracle(variant)).abs().max()
            except Deadlock:
                return float("inf")
            worst = max(worst, error.nan_to_num(nan=torch.inf).item())
            if worst > 1e-2:
                return worst
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_right_however_their_blocks_run(kind: str) -> None:
    assert _worst(kind, None) < 3e-3


# What is wrong with the source, and how it is made so.
MISTAKES = {
    "counted before all sums are there": ("        __syncthreads();  // all of this", "        // all of this"),
    "nobody counts": (
        "is_last = __syncthreads_or(t.tid == 0 && atomicAdd(arrived, 1u) == others);",
        "",
    ),
    "the last one of a tile is the first": ("atomicAdd(arrived, 1u) == others", "atomicAdd(arrived, 1u) == 0"),
    "nobody looks whether the other is done": ("*(volatile u32*)arrived == others)", "others)"),
    "a part is added twice": ("others > 1 || i != piece.part", "true"),
    "the own sums are kept where all are added": (
        "    if (others > 1) {\n        FOR(e",
        "    if (false) {\n        FOR(e",
    ),
    "sums are not scaled": ("fmaf(other[j], fade[r], mine)", "mine + other[j]"),
    "own sums are not scaled": ("fmaf(mine, fade[r], other[j])", "mine + other[j]"),
    "the fade of another row": ("const int r = (4 * f + j) / (CHUNKS * PER_8);", "const int r = 0;"),
    "the fade the other way round": ("(below - (above", "(above - (above"),
    "the sum of probabilities is not scaled": ("fmaf(row_sum, fade, other_sum)", "row_sum + other_sum"),
    "the other sum of probabilities is not scaled": ("fmaf(other_sum, fade, row_sum)", "row_sum + other_sum"),
    "each tile has the first one's place": ("(i64)piece.slot *", "(i64)0 *"),
    "all parts lie in one place": ("store_part(parts + piece.part *", "store_part(parts + 0 *"),
    "all tiles have one counter": ("p.arrived + (piece.tile - p.whole)", "p.arrived"),
    "the keys end a tile too early": ("piece.end * PA_BC);", "(piece.end - 1) * PA_BC);"),
    "each part begins with the first key": ("at.k_begin += piece.first * PA_BC;", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_is_noticed(kind: str, name: str) -> None:
    right, wrong = MISTAKES[name]
    text = source(kind)
    assert text.count(right) == 1
    assert _worst(kind, text.replace(right, wrong)) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_barrier_of_the_parts_is_among_the_mistakes(kind: str) -> None:
    text = source(kind)
    own = text[text.index("INLINE bool join_parts") : text.index("PA_FORWARD_NAME")]
    assert len(re.findall(r"__syncthreads", own)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_emulation_cannot_tell_is_in_the_source(kind: str) -> None:
    """A fence between the sums and the count, and one between the count and the sums of the others, which are read past
    the caches of a multiprocessor."""
    text = source(kind)
    own = text[text.index("INLINE bool join_parts") : text.index("PA_FORWARD_NAME")]
    steps = ("store_part(", "__threadfence()", "__syncthreads()", "atomicAdd(", "__threadfence()", "add_part(")
    places = [0]
    for step in steps:
        places.append(own.index(step, places[-1] + 1))
    assert "ld.global.cg.v4.f32" in text


# ---- memory, several launches and several devices --------------------------------------------------------------------


@pytest.mark.usefixtures("free_parts")
def test_parts_stay_within_the_budget(card: DeviceInfo) -> None:
    inputs = _inputs(64, 64, 4, 200, 600, "none")[:3]
    kinds = []
    for budget in (64, 0.1):
        with emulated_card(info=replace(card, num_sms=3)) as kernels:
            config = AttentionConfig(route="fused-tensor", budget_mib=budget)
            sdpa(*inputs, enable_gqa=True, config=config)  # type: ignore[arg-type]
        kinds.append(kernels.queued[-1].variant.is_even)
    assert kinds == [True, False]


@pytest.mark.usefixtures("free_parts")
def test_a_long_call_is_launched_in_parts_by_the_kernel_that_can_be(card: DeviceInfo) -> None:
    inputs = _inputs(64, 64, 4, 200, 600, "none")[:3]
    for work_per_sm, is_even in ((1 << 30, True), (1 << 20, False)):
        with emulated_card(info=replace(card, num_sms=3), work_per_sm=work_per_sm) as kernels:
            sdpa(*inputs, enable_gqa=True, config=TENSOR)  # type: ignore[arg-type]
        assert {launch.variant.is_even for launch in kernels.queued} == {is_even}


@pytest.mark.usefixtures("free_parts")
def test_a_card_without_its_machine_code_takes_the_kernel_that_ships(card: DeviceInfo) -> None:
    inputs = _inputs(64, 64, 4, 200, 600, "none")[:3]
    options: dict[str, Any] = {"find_compiler": lambda arch: None}
    options["shipped"] = lambda variant, arch: None if variant.is_even else prebuilt.find(variant, arch)
    with emulated_card(lambda launch: None, info=replace(card, num_sms=3), **options) as kernels:
        sdpa(*inputs, enable_gqa=True, config=TENSOR)  # type: ignore[arg-type]
    assert {launch.variant.is_even for launch in kernels.queued} == {False}


@pytest.mark.usefixtures("free_parts")
def test_parts_of_a_call_on_several_devices_are_not_cut(card: DeviceInfo) -> None:
    """How they would be depends on how many heads a device has."""
    inputs = _inputs(64, 64, 4, 200, 600, "none")[:3]
    shared = AttentionConfig(route="fused-tensor", devices=("cpu", "cpu"), share_from_tokens=1)
    with emulated_card(info=replace(card, num_sms=3)) as kernels:
        alone = sdpa(*inputs, enable_gqa=True, config=TENSOR)  # type: ignore[arg-type]
        assert kernels.queued[-1].variant.is_even
        kernels.queued.clear()
        found = sdpa(*inputs, enable_gqa=True, config=shared)  # type: ignore[arg-type]
    assert {launch.variant.is_even for launch in kernels.queued} == {False}
    assert len(kernels.queued) >= 2
    torch.testing.assert_close(found, alone, atol=2e-3, rtol=2e-3)
