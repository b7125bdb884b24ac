"""Even distribution: tiles whose keys are cut within one launch, emulated with blocks that take turns in no order."""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, sized
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import RACES, T4, V100, LeftOut, Race, each_left_out, emulate
from attn_support.fused.modes import deterministic as poisoned_memory
from attn_support.oracle import exact
from attn_support.randomness import some, times
from attn_support.table import Case
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa, sdpa_with_lse
from pascal_attn_core.call import AttentionCall, check_call, empty_output
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch import plan, stream_k
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import Plan, Shape, key_tiles
from pascal_attn_core.fused.launch.stream_k import Piece, Pieces
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.reference import reference_sdpa


@pytest.fixture(params=[T4, V100], ids=lambda info: info.name)
def card(request: pytest.FixtureRequest) -> DeviceInfo:
    """Kernels for AMD's matrix units list no blocks."""
    return request.param


TENSOR = AttentionConfig(route="fused-tensor")
KINDS = ("tensor_even", "volta_even")


@pytest.fixture
def free_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans in which cutting a tile costs nothing and small tiles are slow, so that small calls are cut as well."""
    free = {"PART_KEYS": 0, "START_KEYS": 0, "_LEAST": 1, "_ZEROING": 0, "_LISTED_SPEED": 1.0, "_SMALL_SPEED": 1e-3}
    for name, value in free.items():
        monkeypatch.setattr(stream_k if hasattr(stream_k, name) else plan, name, value)
    caches = stream_k.distribute, plan._fastest, plan.tensor_splits
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


_case = functools.partial(sized, torch.float16)
TWO = {"heads": (2, 1)}
SINKS = torch.tensor([-torch.inf, 0.5, 40.0, -3.0])
# multiprocessors, and a call
SIZES = [
    (3, _case(64, 200, 600)),  # four tiles on three
    (40, _case(64, 200, 900, **TWO)),  # more multiprocessors than tiles: each is cut into many
    (3, _case(64, 500, 300, **TWO, **LOWER_RIGHT)),
    (3, _case(64, 300, 400, "bool blocks", **TWO, window=(150, 70))),
    (5, _case(64, 200, 500, "bool some rows empty")),
    (5, _case(64, 200, 500, "bool [L, S]", softcap=20.0)),
    (3, _case(64, 200, 500, softcap=3.0)),
    (3, _case(128, 200, 400)),
    (3, _case(128, 100, 400, "bool [B, 1, 1, S]", dim_v=64)),
    (3, _case(40, 140, 300, dim_v=48)),
    (5, _case(96, 140, 300, "bool nothing allowed")),
    (5, _case(80, 140, 300, "bool [B, H, L, S]")),
    (5, _case(32, 140, 300)),
    (3, _case(64, 150, 700, sinks=SINKS)),
    (3, _case(64, 150, 700, "bool expanded", sinks=SINKS)),
]


@pytest.mark.usefixtures("free_parts")
@pytest.mark.parametrize(("num_sms", "case"), some(SIZES, 16), ids=lambda value: getattr(value, "name", None))
def test_cut_tiles_have_the_answer_of_the_definition(num_sms: int, case: Case, card: DeviceInfo) -> None:
    """Sinks are added once to a tile in parts."""
    inputs, rules = case.build()
    with emulated_card(info=replace(card, num_sms=num_sms)) as kernels, poisoned_memory():
        found = sdpa_with_lse(*inputs, **rules, config=TENSOR)
    assert kernels.queued[-1].variant.is_even
    out, lse = exact(inputs, rules)
    torch.testing.assert_close(found.out.double(), out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found.lse.double(), lse, atol=1e-4, rtol=1e-5)


def _call(variant: Variant, heads: int = 1, rows: int = 70, key_tiles: int = 7) -> AttentionCall:
    generator = torch.Generator().manual_seed(variant.head_dim)
    keys = key_tiles * variant.geometry.cols - 5
    query, key, value = (torch.randn(1, heads, n, variant.head_dim, generator=generator) for n in (rows, keys, keys))
    key *= (torch.linspace(-3, 3, keys).abs() + 0.1)[:, None]  # the largest scores are those of the ends
    mask = torch.rand(rows, keys, generator=generator) < 0.5 if variant.mask == "bool" else None
    return check_call(query.half(), key.half(), value.half(), mask)


def _cut_at(call: AttentionCall, variant: Variant, *cuts: int, tile: int = 0, slot: int = 0) -> list[Piece]:
    """A tile of rows in parts."""
    bounds = [0, *cuts, key_tiles(Shape.of(call), variant.geometry)[0]]
    return [Piece(tile, bounds[i], bounds[i + 1], slot, i, len(bounds) - 1) for i in range(len(bounds) - 1)]


def _run(
    variant: Variant,
    call: AttentionCall,
    listed: list[Piece],
    seed: int = 1,
    text: str | LeftOut | None = None,
    flags: tuple[str, ...] = (),
) -> Tensor:
    out = empty_output(call).fill_(float("nan"))
    launches = forward_launches(call, Plan(variant, pieces=Pieces(0, tuple(listed))), out)
    with poisoned_memory():
        emulate(launches, seed=seed, mutated={variant.kind: text}, flags=flags)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_causal_rule_tiles_may_come_before_those_that_are_listed(kind: str) -> None:
    variant = Variant(kind, 64, "float16")
    query, key, value = (
        torch.randn(1, 2, 600, 64, generator=torch.Generator().manual_seed(i)).half() for i in range(3)
    )
    call, out = check_call(query, key, value, is_causal=True), torch.full_like(query, float("nan"))
    sizes = key_tiles(Shape.of(call), variant.geometry)
    longest, cut, shortest = sizes[2], sizes[1], sizes[0]
    listed = Piece(5, 0, longest), Piece(4, 0, 3, 0, 0, 2), Piece(4, 3, cut, 0, 1, 2), Piece(3, 0, shortest)
    emulate(forward_launches(call, Plan(variant, pieces=Pieces(3, listed)), out))
    expected = exact((query, key, value), {"is_causal": True})[0]
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


def _variants(kind: str) -> list[Variant]:
    return [Variant(kind, 64, "float16"), Variant(kind, 64, "float16", "bool")]


@pytest.mark.parametrize("cuts", [(2, 5), (1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_no_bit_which_block_is_the_last(kind: str, cuts: tuple[int, ...]) -> None:
    for variant in _variants(kind):
        call = _call(variant)
        listed = _cut_at(call, variant, *cuts)
        first = _run(variant, call, listed)
        for seed in range(2, 8):
            assert torch.equal(_run(variant, call, listed[::-1] if seed % 2 else listed, seed), first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_right_however_their_blocks_run(kind: str) -> None:
    """Heads in two and in three parts, several times, since blocks and warps run as chance has it."""
    for variant in _variants(kind):
        call = _call(variant, heads=4, rows=200, key_tiles=4)
        expected = reference_sdpa(call.query.double(), call.key.double(), call.value.double(), call.attn_mask)[0]
        listed = [*_cut_at(call, variant, 2), *_cut_at(call, variant, 1, 3, tile=1, slot=2)]
        listed += [*_cut_at(call, variant, 1, tile=2, slot=5), *_cut_at(call, variant, 1, 2, tile=3, slot=7)]
        for seed in range(1, times(3) + 1):
            error = (_run(variant, call, listed, seed).double() - expected).abs().max()
            assert error < 3e-3 * expected.abs().max()


_ORDERS = re.compile(r"(?<=    )(?:fence_block|__threadfence|__syncwarp)\(\);")


def _races(text: LeftOut | None, seeds: range) -> bool:
    """Whether tiles in two or three parts race: a block may be the last before it stores its sums, or behind that."""
    variant = Variant("tensor_even", 64, "float16")
    call = _call(variant, heads=2)
    listed = [*_cut_at(call, variant, 3), *_cut_at(call, variant, 2, 5, tile=1, slot=2)]
    try:
        for seed in seeds:
            _run(variant, call, listed, seed, text, flags=RACES)
    except Race:
        return True
    return False


def test_nothing_races_and_no_fence_can_be_missed() -> None:
    """By PTX's memory model, whatever has happened here. The first fence of ``signal`` is there for ptxas only."""
    text = source("tensor_even")
    assert not _races(None, range(3))
    mutants = list(enumerate(each_left_out(text, _ORDERS.finditer(text))))
    assert len(mutants) == 8
    for place, (mutant, line) in some(mutants, 3):
        assert _races(mutant, range(1, 9)) == (place > 0), line


def _is_even(card: DeviceInfo, config: AttentionConfig = TENSOR, **how: Any) -> bool:
    """Whether a call takes the kernel of parts. It is right either way."""
    inputs, options = _case(64, 200, 600).build()
    with emulated_card(info=replace(card, num_sms=3), **how) as kernels:
        out = sdpa(*inputs, **options, config=config)
    torch.testing.assert_close(out.double(), exact(inputs, options)[0], atol=2e-3, rtol=2e-3)
    (is_even,) = {launch.variant.is_even for launch in kernels.queued}
    return is_even


@pytest.mark.usefixtures("free_parts")
def test_elsewhere_a_call_takes_the_kernel_of_whole_tiles(card: DeviceInfo) -> None:
    """Beyond the budget, or where a launch would take too long, or without its machine code. Parts of a call on several
    devices are not cut, since how they would be depends on how many heads a device has."""

    def shipped(variant: Variant, arch: str) -> bytes | None:
        return None if variant.is_even else prebuilt.find(variant, arch)

    assert _is_even(card, replace(TENSOR, budget_mib=64))
    assert not _is_even(card, replace(TENSOR, budget_mib=0.1))
    assert _is_even(card, work_per_sm=1 << 30)
    assert not _is_even(card, work_per_sm=1 << 20)
    assert not _is_even(card, find_compiler=lambda arch: None, shipped=shipped)
    assert not _is_even(card, replace(TENSOR, devices=("cpu", "cpu"), share_from_tokens=1))
