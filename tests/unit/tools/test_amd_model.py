"""The model of a gfx9 compute unit on events that are written here, where each limit can be worked out by hand, and on
a shipped kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import amd_model as model  # noqa: E402
from amd_model import ComputeUnit, Event, Pace, Speed  # noqa: E402
from support.amd.code import OBJDUMP, Instruction, Operand  # noqa: E402
from support.amd.memory import Memory  # noqa: E402
from support.amd.wave import Wave  # noqa: E402

VECTOR, SLOW, LDS, BARRIER = Event("vector"), Event("vector", 16), Event("lds", 8), Event("barrier")
WAIT = Event("wait", waits=(("lgkmcnt", 0),))


def _cycles(*waves: list[Event]) -> int:
    """Of one block. The last instruction ends the run in the cycle after it has been issued."""
    return ComputeUnit([waves]).run()


def test_a_simd_issues_every_fourth_cycle() -> None:
    assert _cycles([VECTOR] * 10) == 9 * 4 + 1
    assert _cycles([SLOW] * 10) == 9 * 16 + 1


def test_four_waves_have_a_simd_each_and_the_fifth_shares_one() -> None:
    assert _cycles(*[[VECTOR] * 10] * 4) == 9 * 4 + 3 + 1
    assert _cycles(*[[VECTOR] * 10] * 5) == 19 * 4 + 1


def test_instructions_of_other_kinds_are_issued_beside_arithmetic() -> None:
    """By another wave of the SIMD."""
    one, other = [VECTOR] * 20, [Event("scalar")] * 20
    assert _cycles(one, [VECTOR], [VECTOR], [VECTOR], other) == 19 * 4 + 1


def test_a_wait_lasts_until_the_answer() -> None:
    assert _cycles([LDS, WAIT, VECTOR]) == 8 + 64 + 4 + 1
    assert _cycles([LDS, VECTOR]) == 4 + 1


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


def test_the_last_round_has_the_blocks_that_are_left() -> None:
    paces = [Pace(100, 10, 1, 0), Pace(150, 20, 1, 0)]
    found = Speed(paces, 0.7, 128, 64)
    assert found.cycles(120, 640) == 20 + 10 * 150
    assert found.cycles(121, 640) == 20 + 10 * 150 + 10 + 10 * 100
    assert found.cycles(60, 640) == 10 + 10 * 100


@pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump-16 to read machine code (Debian: llvm-16)")
def test_most_of_what_a_shipped_kernel_issues_are_products() -> None:
    """Two products of 64 columns for 128 x 64 scores, two columns in an instruction, are 2,048 a thread and tile."""
    few, many = (model.block(64, torch.float16, tiles) for tiles in (1, 2))
    assert (few.rows, few.cols, len(few.waves)) == (128, 64, 4)
    counts = [sum(e.is_product for e in b.waves[0]) for b in (few, many)]
    products, issued = counts[1] - counts[0], len(many.waves[0]) - len(few.waves[0])
    assert 2048 <= products <= 2048 * 1.1
    assert products / issued > 0.7
    assert model.pace(few.waves, many.waves, 1, (1, 2)).computing > 0.5
