"""Fragments and bank conflicts of the emulation. Where elements lie is written here as in the PTX ISA, per lane and
element; the emulation has it the other way round, and neither reads the other."""

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


@pytest.mark.parametrize(("pitch", "passes"), [(16, 1), (32, 2), (48, 1), (64, 4), (80, 1), (128, 8), (144, 1), (0, 1)])
def test_ldmatrix_counts_the_passes_that_bank_conflicts_cost(pitch: int, passes: int) -> None:
    """Rows, ``pitch`` bytes apart, at the same address are read at once; others in the same banks are not."""
    body = f"""
    uint32_t r[1];
    emu_ldmatrix<1, 0>(r, emu_shared_address((char*)shared + threadIdx.x % 8 * {pitch}));"""
    nothing = torch.zeros(1)
    before, after = (blocks_and_passes(_run(body, *3 * [nothing])) for _ in range(2))
    assert [now - then for then, now in zip(before, after)] == [1, passes]


def test_a_lane_that_misses_a_product_is_a_deadlock() -> None:
    out = torch.zeros(WARP)
    body = """
    float c[4] = {};
    const uint32_t a[2] = {0, 0};
    if (threadIdx.x) emu_mma_m16n8k8(c, a, 0);"""
    with pytest.raises(Deadlock):
        _run(body, out, out, out)
