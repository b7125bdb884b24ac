"""The model of a compute unit, on events with limits worked out by hand, and on shipped kernels."""

import pytest
import torch
from attn_support.amd.code import OBJDUMP
from attn_support.randomness import some

from tools.models import amd as model
from tools.models.amd import ComputeUnit, Event, main_blocks
from tools.models.compute_unit import GCN, Timing

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
