"""The model of a compute unit, on events with limits worked out by hand, and on shipped kernels."""

import numpy as np
import pytest
import torch
from attn_support.amd.code import OBJDUMP, Instruction, Operand, instruction
from attn_support.amd.memory import Memory
from attn_support.amd.wave import Wave
from attn_support.randomness import some

from tools.models import amd as model
from tools.models.amd import ComputeUnit, Event, Pace, Speed, Trace, main_blocks
from tools.models.compute_unit import GCN, RDNA2, Timing

VECTOR, SLOW, LDS, BARRIER = Event("vector"), Event("vector", 16), Event("lds", 8), Event("barrier")
needs_objdump = pytest.mark.skipif(
    OBJDUMP is None, reason="needs llvm-objdump-16 to read machine code (Debian: llvm-16)"
)
WAIT = Event("wait", waits=(("lgkmcnt", 0),))


def _cycles(*waves: list[Event], timing: Timing = GCN) -> int:
    """Cycles of one block. The last instruction ends the run in the cycle after it has been issued."""
    return ComputeUnit([waves], timing).run()


@pytest.mark.parametrize(
    ("waves", "cycles"),
    [
        ([[VECTOR] * 10], 9 * 4 + 1),  # a SIMD issues every fourth cycle
        ([[SLOW] * 10], 9 * 16 + 1),
        ([[VECTOR] * 10] * 4, 9 * 4 + 3 + 1),  # four waves have a SIMD each, the fifth shares one
        ([[VECTOR] * 10] * 5, 19 * 4 + 1),
        ([[VECTOR] * 20, *[[VECTOR]] * 3, [Event("scalar")] * 20], 19 * 4 + 1),  # another wave's other instructions
        ([[LDS, WAIT, VECTOR]], 8 + 64 + 4 + 1),  # a wait lasts until the answer
        ([[LDS, VECTOR]], 4 + 1),
    ],
)
def test_instructions_take_their_cycles(waves: list[list[Event]], cycles: int) -> None:
    assert _cycles(*waves) == cycles


def test_shared_memory_is_shared() -> None:
    """Four waves at the same time: the last answer comes after the work for all of them."""
    assert 4 * 8 + 64 <= _cycles(*[[LDS, WAIT, VECTOR]] * 4) < 4 * 8 + 64 + 12


def test_waves_of_a_block_meet_at_a_barrier() -> None:
    alone = _cycles([BARRIER, VECTOR])
    assert _cycles([BARRIER, VECTOR], [SLOW] * 10 + [BARRIER]) > alone + 9 * 16


@pytest.mark.parametrize(
    ("name", "step", "cycles"),
    [
        ("ds_read_b32", 4, 2),
        ("ds_read_b32", 0, 2),  # all lanes the same word
        ("ds_read_b32", 8, 4),
        ("ds_read_b32", 128, 64),  # all words in one bank
        ("ds_read_b128", 16, 8),
        ("ds_read_b128", 0, 8),
    ],
)
def test_bank_conflicts_are_those_of_the_addresses(name: str, step: int, cycles: int) -> None:
    wave = Wave(0, Memory(()), np.zeros(1, np.uint32), [])
    wave.vectors[1] = step * np.arange(64)
    instruction = Instruction(name, (Operand("v", 4), Operand("v", 1)), {}, 0, name)
    assert model.lds_cycles(wave, instruction) == cycles


def _events(*texts: str) -> list[Event]:
    """Events of a wave of 32 lanes."""
    trace, wave = Trace(RDNA2), Wave(0, Memory(()), np.zeros(1, np.uint32), [], size=32)
    for text in texts:
        name, _, rest = text.partition(" ")
        trace.add(wave, instruction(name, rest, 0))
    return trace.events


FMA, EXP = "v_fmac_f32_e32 v{}, v2, v3", "v_exp_f32_e32 v1, v2"
CHAIN = [FMA.format(1)] * 10


def _dual(n: int) -> str:
    return f"v_dual_fmac_f32 v{10 + 2 * n}, v2, v3 :: v_dual_fmac_f32 v{11 + 2 * n}, v4, v5"


@pytest.mark.parametrize(
    ("texts", "cycles"),
    [
        (["v_mov_b32_e32 v1, v2"] * 10, 10),
        ([EXP] * 10, 9 * 4 + 1),
        (CHAIN, 9 * 5 + 1),  # a result is read after five cycles
        ([FMA.format(10 + n % 5) for n in range(10)], 10),
        ([EXP, "v_add_f32_e32 v3, v1, v1"], 10 + 1),
        (["v_add_co_u32 v1, vcc_lo, v2, v3", "v_add_co_ci_u32_e32 v4, vcc_lo, v5, v6, vcc_lo"], 5 + 1),
        (["v_mov_b32_e32 v3, v2", "ds_write_b32 v9, v3"], 5 + 1),
        (["v_mov_b32_e32 v4, v2", "ds_write_b32 v9, v3"], 2),
        ([_dual(n % 5) for n in range(10)], 10),
        ([_dual(0)] * 10, 9 * 5 + 1),
    ],
)
def test_a_simd_of_rdna_issues_every_cycle_what_need_not_wait(texts: list[str], cycles: int) -> None:
    assert _cycles(_events(*texts), timing=RDNA2) == cycles


def test_two_products_that_are_issued_at_once_count_twice() -> None:
    assert sum(e.products for e in _events(_dual(0))) == 2


def test_another_wave_computes_meanwhile() -> None:
    one_simd = [_events(*CHAIN) if n % 4 == 0 else [] for n in range(5 * 4)]
    assert _cycles(*one_simd, timing=RDNA2) == 9 * 5 + 4 + 1


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("v_fma_f32 v1, v0, v4, v8", 2),
        ("v_fma_f32 v1, v0, v4, v9", 1),
        ("v_fma_f32 v1, v0, v5, v10", 0),
        ("v_fma_f32 v1, v0, v0, v10", 0),  # read once
        ("v_fmac_f32_e32 v8, v4, v1", 1),
        ("v_add_f32_e32 v4, v0, v1", 0),
    ],
)
def test_operands_in_one_bank_of_registers_are_read_one_after_the_other(text: str, more: int) -> None:
    (e,) = _events(text)
    assert e.stall == more
    assert ComputeUnit([[[e, e]]], RDNA2, banks=True).run() == 2 + more


def test_blocks_have_shared_memory_in_one_of_two_halves() -> None:
    """Two blocks do not wait for each other, three do."""
    block = [[Event("lds", 60), WAIT, VECTOR]]
    one, two, three = (ComputeUnit([block] * count, RDNA2, apart=0).run() for count in (1, 2, 3))
    assert one == two == 60 + 64 + 2
    assert three == one + 60


def test_stretches_with_many_products_are_the_main_blocks() -> None:
    product = Event("vector", products=1)
    few, many = [product] * 10, [product] * 70
    main = [VECTOR, *many, Event("branch")]
    assert main_blocks([VECTOR, *few, BARRIER, *main, *few]) == main


def test_the_last_round_has_the_blocks_that_are_left() -> None:
    paces = [Pace(100, 10, 1, 0), Pace(150, 20, 1, 0)]
    found = Speed(paces, 0.7, 0.8, 128, 64)
    full, rest = 20 + 10 * 150, 10 + 10 * 100
    assert [found.cycles(blocks, 10) for blocks in (60, 120, 121)] == [rest, full, full + rest]


@needs_objdump
@pytest.mark.parametrize(
    ("arch", "lanes", "head_dim"), some([("gfx1030", 32, 64), ("gfx906", 64, 64), ("gfx1030", 32, 128)], 3)
)
def test_most_of_what_a_shipped_kernel_issues_are_products(arch: str, lanes: int, head_dim: int) -> None:
    """Two products of all columns for 128 x 64 scores, or 64 x 128, two columns in an instruction."""
    variant = model.forward_variant(head_dim, torch.float16, arch)
    timing = next(card.timing for card in model.CARDS.values() if card.arch == arch)
    few, many = (model.block(variant, tiles, timing) for tiles in (1, 2))
    assert (few.rows * few.cols, len(few.waves)) == (128 * 64, 4)
    needed = 128 * 64 * head_dim // (lanes * len(few.waves))
    counts = [sum(e.products for e in b.waves[0]) for b in (few, many)]
    products, issued = counts[1] - counts[0], len(many.waves[0]) - len(few.waves[0])
    assert needed <= products <= needed * 1.1
    assert products / issued > 0.7
    main = [main_blocks(b.waves[0]) for b in (few, many)]
    of_main = sum(e.products for e in main[1]) - sum(e.products for e in main[0])
    assert of_main / (len(main[1]) - len(main[0])) >= 0.8
    full = model.pace(few.waves, many.waves, few.resident, (1, 2), timing)
    assert full.computing > 0.7


@needs_objdump
def test_a_call_takes_the_launches_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """480 blocks of 64 tiles, then 32 times 11 with 6 of them, then the time in which memory takes and gives parts."""
    paces = {"forward": [Pace(100, 0, 1, 0), Pace(150, 0, 1, 0)], "ranges": [Pace(90, 5, 1, 0), Pace(140, 6, 1, 0)]}
    monkeypatch.setattr(
        model, "speed", lambda variant, name, *, banks: Speed(paces[variant.kind], 0.7, 0.8, 128, variant.geometry.cols)
    )
    card, variant = model.CARDS["MI50"], model.forward_variant(64, torch.float16)
    found = model.time_of(16, 4096, variant, "MI50")
    assert (found.ranges, found.rows) == (11, 256)
    cycles = 4 * 64 * 150 + 3 * (6 + 6 * 140)
    moved = 16 * 256 * (2 * 11 * 66 * 4 + 64 * 2)
    expected = cycles / card.hertz + moved / card.bandwidth + 2 * model.LAUNCH
    assert found.seconds == pytest.approx(expected)
    assert model.time_of(15, 4096, variant, "MI50") == (pytest.approx(4 * 64 * 150 / card.hertz), 0, 4096)
