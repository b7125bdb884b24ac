"""The emulation of a GPU on a CPU, as far as warps go: fragments, votes and bank conflicts.

Where the elements of a fragment lie is written here as in the PTX ISA, per lane and element; the emulation has it the
other way round, and neither reads the other.
"""

import ctypes
from collections.abc import Callable

import pytest
import torch
from attn_support.fused.emulation import Deadlock, blocks_and_passes, build_text, run
from torch import Tensor

WARP = 32
Layout = Callable[[int, int], tuple[int, int]]  # of (lane, element) to (row, column)


class Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in "abc"]


_TENSORS = "struct Tensors { uint32_t* a; uint32_t* b; float* c; };\n"


def _run(body: str, *tensors: Tensor) -> ctypes.CDLL:
    """Runs ``body`` as one block with the tensors as p.a, p.b and p.c."""
    library = build_text(
        f"{_TENSORS}__shared__ __align__(128) uint32_t shared[1024];\n"
        f'extern "C" __global__ void tested(const Tensors p) {{\n{body}\n}}',
        {"tested": "Tensors"},
    )
    run(library, "tested", (1, 1, 1), WARP, Tensors(*(t.data_ptr() for t in tensors)))
    return library


# Of both factors and the sum of m16n8k8, and of those of m8n8k4, whose factors lie by rows or by columns.
LAYOUTS: dict[str, Layout] = {
    "A 16 8 8": lambda lane, i: ((lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)),
    "B 16 8 8": lambda lane, i: (lane % 4 * 2 + i, lane >> 2),
    "A rows": lambda lane, i: (lane % 4 + (0 if lane < 16 else 4), i),
    "A columns": lambda lane, i: (i % 4 + (0 if lane < 16 else 4), lane % 4),
    "B rows": lambda lane, i: (lane % 4, i + (0 if lane < 16 else 4)),
    "B columns": lambda lane, i: (i, lane % 4 + (0 if lane < 16 else 4)),
    "C 8 8 4": lambda lane, i: (
        (lane & 0b1) + (i & 0b10) + (0 if lane < 16 else 4), (i & 0b100) + (lane & 0b10) + (i & 0b1)
    ),
}  # fmt: skip


def _fragments(matrices: Tensor, elements: int, name: str) -> Tensor:
    """``[4, rows, columns]``, one for each quad pair, or ``[1, ...]``: as the lanes hold it, int32 ``[32, n]``."""
    layout = LAYOUTS[name]
    lanes = torch.empty(WARP, elements, dtype=matrices.dtype)
    for lane in range(WARP):
        of = matrices[lane % 16 // 4 % len(matrices)]
        for i in range(elements):
            lanes[lane, i] = of[layout(lane, i)]
    return lanes if lanes.dtype == torch.float32 else lanes.view(torch.int32)


def _factors(count: int, rows: int, cols: int, k: int) -> tuple[Tensor, Tensor]:
    """Whole numbers whose products are exact in float32, all rows and columns different."""
    a, b = (torch.randint(-99, 100, shape).float() for shape in ((count, rows, k), (count, k, cols)))
    return a, b


def test_m16n8k8_is_the_product_of_its_fragments() -> None:
    a, b = _factors(1, 16, 8, 8)
    c = torch.randint(-99, 100, (1, 16, 8)).float()
    lanes = _fragments(c, 4, "A 16 8 8")  # C lies as A does
    body = """
    const int lane = threadIdx.x;
    const uint32_t a[2] = {p.a[lane * 2], p.a[lane * 2 + 1]};
    float c[4];
    memcpy(c, p.c + lane * 4, sizeof c);
    emu_mma_m16n8k8(c, a, p.b[lane]);
    memcpy(p.c + lane * 4, c, sizeof c);"""
    _run(body, _fragments(a.half(), 4, "A 16 8 8"), _fragments(b.half(), 2, "B 16 8 8"), lanes)
    assert torch.equal(lanes, _fragments(c + a @ b, 4, "A 16 8 8"))


@pytest.mark.parametrize("of_a", ["rows", "columns"])
@pytest.mark.parametrize("of_b", ["rows", "columns"])
def test_m8n8k4_is_the_product_of_its_fragments(of_a: str, of_b: str) -> None:
    a, b = _factors(4, 8, 8, 4)
    c = torch.randint(-99, 100, (4, 8, 8)).float()
    lanes = _fragments(c, 8, "C 8 8 4")
    body = f"""
    const int lane = threadIdx.x;
    float c[8];
    memcpy(c, p.c + lane * 8, sizeof c);
    emu_mma_m8n8k4<{int(of_a == "rows")}, {int(of_b == "rows")}>(
        c, p.a[lane * 2], p.a[lane * 2 + 1], p.b[lane * 2], p.b[lane * 2 + 1]);
    memcpy(p.c + lane * 8, c, sizeof c);"""
    _run(body, _fragments(a.half(), 4, f"A {of_a}"), _fragments(b.half(), 4, f"B {of_b}"), lanes)
    assert torch.equal(lanes, _fragments(c + a @ b, 8, "C 8 8 4"))


def _ldmatrix(blocks: int, transposed: bool, pitch: int) -> tuple[Tensor, Tensor, int]:
    """The content of shared memory, ``[blocks, 8, 8]``; what the lanes got, ``[32, blocks, 2]``; passes that took, with
    rows ``pitch`` bytes apart."""
    halves = torch.arange(blocks * 64, dtype=torch.int16)
    out = torch.zeros(WARP, blocks, dtype=torch.int32)
    body = f"""
    const int lane = threadIdx.x;
    if (lane < 8 * {blocks}) memcpy((char*)shared + lane * p.b[0], p.a + lane * 4, 16);
    __syncwarp();
    uint32_t r[{blocks}];
    emu_ldmatrix<{blocks}, {int(transposed)}>(r, emu_shared_address((char*)shared + lane % (8 * {blocks}) * p.b[0]));
    memcpy(p.c + lane * {blocks}, r, sizeof r);"""
    args = halves, torch.tensor([pitch], dtype=torch.int32), out
    before, after = (blocks_and_passes(_run(body, *args)) for _ in range(2))
    assert after[0] - before[0] == blocks
    return halves.view(blocks, 8, 8), out.view(torch.int16).view(WARP, blocks, 2), after[1] - before[1]


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row(blocks: int, transposed: bool) -> None:
    memory, got, passes = _ldmatrix(blocks, transposed, 16)
    for lane in range(WARP):
        for block in range(blocks):
            matrix = memory[block].T if transposed else memory[block]
            assert torch.equal(got[lane, block], matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])
    assert passes == blocks


@pytest.mark.parametrize(("pitch", "passes"), [(16, 1), (32, 2), (48, 1), (64, 4), (80, 1), (128, 8), (144, 1), (0, 1)])
def test_ldmatrix_counts_the_passes_that_bank_conflicts_cost(pitch: int, passes: int) -> None:
    """Rows at the same address are read at once; those of another one in the same banks are not."""
    assert _ldmatrix(1, False, pitch)[2] == passes


def test_votes_and_shuffles_reach_the_lanes_they_name() -> None:
    out = torch.zeros(4, WARP)
    body = """
    const int lane = threadIdx.x;
    p.c[lane] = __ballot_sync(~0u, lane % 3 == 0) == 0x49249249u;
    p.c[32 + lane] = __all_sync(~0u, lane < 31) * 2 + __any_sync(~0u, lane == 31);
    p.c[64 + lane] = __shfl_sync(~0u, lane * 3, lane + 9, 8);
    p.c[96 + lane] = __shfl_xor_sync(~0u, (unsigned)lane, 5);"""
    _run(body, out, out, out)
    lanes = torch.arange(WARP)
    assert out[0].all()
    assert (out[1] == 1).all()
    assert torch.equal(out[2], ((lanes & -8 | (lanes + 9) % 8) * 3).float())
    assert torch.equal(out[3], (lanes ^ 5).float())


def test_a_lane_that_misses_a_product_is_a_deadlock() -> None:
    out = torch.zeros(WARP)
    body = """
    float c[4] = {};
    const uint32_t a[2] = {0, 0};
    if (threadIdx.x) emu_mma_m16n8k8(c, a, 0);"""
    with pytest.raises(Deadlock):
        _run(body, out, out, out)
