"""The model of a multiprocessor on machine code that is written here, where each limit can be worked out by hand."""

import struct
from pathlib import Path

import pytest
from attn_support.randomness import at_night, some

from tools.models import sass, tensor_table
from tools.models import tensor as model

T4, V100 = model.MACHINES["T4"], model.MACHINES["V100"]
_OPCODES = {
    "HMMA.1688": 0x23C, "HMMA.884": 0x236, "LDSM": 0x83B, "LDS": 0x984, "STS": 0x388, "LDG": 0x381, "MUFU": 0x308,
    "FFMA": 0x223, "BAR": 0xB1D, "BRA": 0x947, "EXIT": 0x94D, "IADD3": 0x210,
}  # fmt: skip
_SIZES = {1: 0, 2: 2, 4: 4, 8: 5, 16: 6}


def code(kind: str, *, stall: int = 1, size: int = 16, to: int = 0, predicate: int = 7, **control: int) -> bytes:
    """One instruction. ``to``: a branch's distance in instructions, from the one behind it."""
    low, high = _OPCODES[kind] | predicate << 12, 0
    if kind == "BRA":
        low |= (to * 16 & 0xFFFFFFFF) << 32
        high |= 7 << 23
    elif kind == "LDSM":
        high |= {4: 0, 8: 1, 16: 2}[size] << 8
    else:
        high |= _SIZES[size] << 9
    bits = stall | control.get("writes", 7) << 5 | control.get("reads", 7) << 8 | control.get("waits", 0) << 11
    return struct.pack("<QQ", low, high | bits << 41)


def loop(*body: bytes) -> list[sass.Instruction]:
    """One round of a loop of these instructions."""
    return sass.usual_path(sass.product_loops(sass.volta(b"".join(body) + code("BRA", to=-len(body) - 1)))[0])


def test_the_fields_of_an_instruction_are_read() -> None:
    (x,) = sass.volta(code("LDSM", size=8, stall=5, writes=2, reads=3, waits=0b101))
    assert x == sass.Instruction(0, "LDSM", lane_bytes=8, stall=5, writes=2, reads=3, waits=0b101)
    assert sass.volta(code("FFMA", predicate=3))[0].guarded
    branch = sass.volta(code("FFMA") + code("BRA", to=-2))[1]
    assert (branch.target, branch.guarded) == (0, False)
    assert sass.volta(code("IADD3"))[0].kind == "other"


def test_rare_work_is_not_on_the_usual_path() -> None:
    rare = [code("FFMA")] * 5
    assert len(loop(code("HMMA.1688"), code("BRA", to=5, predicate=0), *rare)) == 3
    tile = [code("LDG")] * 5
    assert len(loop(code("HMMA.1688"), code("BRA", to=5, predicate=0), *tile)) == 8
    assert len(loop(code("HMMA.1688"), code("BRA", to=5), *tile)) == 3  # never run


def test_products_alone_keep_the_tensor_cores_busy() -> None:
    path = loop(*[code("HMMA.1688", stall=8)] * 32)
    assert model.simulate(path, T4, 8, 1) == pytest.approx(1, abs=0.02)
    assert model.counts(path, T4).tensor == 32 * 8
    assert model.simulate(loop(*[code("HMMA.884", stall=2)] * 64), V100, 8, 1) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("work", "counted"),
    [
        # Two ldmatrix.x4 are 1024 bytes, of four schedulers 4096: 64 cycles. Four products are 32.
        ([code("LDSM")] * 2, ("shared", 64)),
        ([code("MUFU")] * 8, ("conversions", 64)),
        ([*[code("IADD3")] * 31, code("FFMA")], ("issued", 37)),  # with the branch
    ],
    ids=["shared memory", "conversions", "issue"],
)
def test_other_work_is_the_limit_where_it_takes_longer(work: list[bytes], counted: tuple[str, int]) -> None:
    path = loop(*work, *[code("HMMA.1688", stall=8)] * 4)
    assert getattr(model.counts(path, T4), counted[0]) == counted[1]
    assert model.simulate(path, T4, 8, 1, rounds=60) == pytest.approx(0.5, abs=0.1)
    twice = model.Machine("twice", T4.product, 128, 40, 75)
    assert (model.simulate(path, twice, 8, 1, rounds=60) >= 0.9) == (counted[0] == "shared")


def test_a_result_is_waited_for() -> None:
    """One warp for each scheduler has nothing else to do during 400 cycles."""
    path = loop(code("LDG", writes=0), code("HMMA.1688", waits=1, stall=8))
    assert model.simulate(path, T4, 4, 1) < 0.03


def test_a_barrier_holds_warps_together() -> None:
    """One of two warps of a scheduler multiplies while the other converts; a barrier keeps both in step."""
    apart = [*[code("MUFU", writes=0)] * 7, code("MUFU", stall=2, writes=0), *[code("HMMA.1688", stall=8, waits=1)] * 8]
    free, held = (model.simulate(loop(*apart, *end), T4, 8, 1, rounds=60) for end in ((), (code("BAR"),)))
    assert held < free - 0.1


def test_our_own_kernels_are_found() -> None:
    """The loops have the products of their tiles: 64 x 32 scores of one warp, three products, 32 deep."""
    try:
        name, cubin, warps, blocks = next(model.own_cubins(["tensor_grad_query"], T4))
    except SystemExit:
        pytest.skip("needs NVRTC 12.6")
    assert (name, warps, blocks) == ("tensor_grad_query-32-float16-none", 8, 1)
    (path,) = (path for function, path in model.paths(cubin) if function == "pa_tensor_grad_query")
    assert model.counts(path, T4).by_kind["HMMA.1688"] == 3 * 2 * 8 * 4
    assert 0.5 < model.simulate(path, T4, warps, blocks) < 1


@at_night
def test_a_tile_that_a_mask_cuts_takes_longer() -> None:
    try:
        found = {name: cubin for name, cubin, *_ in model.own_cubins(["tensor"], T4, "bool")}
    except SystemExit:
        pytest.skip("needs NVRTC 12.6")
    cubin = found["tensor-64-float16-bool"]
    ((_, free),), ((_, cut),) = (list(model.paths(cubin, masked=masked)) for masked in (False, True))
    more = model.counts(cut, T4).by_kind - model.counts(free, T4).by_kind
    assert more["R2P"] == 8  # two bytes of each of a lane's four rows
    assert more["SHFL"] == more["LDG"] == 0  # each lane has read its own bits before
    assert model.simulate(cut, T4, 8, 1) < model.simulate(free, T4, 8, 1)


def test_waste_of_a_causal_call() -> None:
    """Four blocks of 64 rows and 64-column tiles of 256 tokens: 10 tiles of which the diagonal ones are half empty."""
    found = model.waste(64, 64, 256, 256, heads=1, places=4, allowed=lambda i: (0, i + 1))
    assert found.unwanted == pytest.approx(1 - 256 * 257 / 2 / (10 * 64 * 64))
    assert found.idle == pytest.approx(1 - 10 / 16)  # three of four wait for the longest


def test_waste_of_blocks_that_do_not_fill_the_card() -> None:
    assert model.waste(256, 64, 2048, 2048, heads=1, places=40) == model.Waste(0, 1 - 8 / 40)
    assert model.waste(256, 64, 2048, 2048, heads=10, places=40).idle == 0
    assert model.waste(256, 64, 300, 64, heads=40, places=40).unwanted == pytest.approx(1 - 300 / 512)


def test_the_page_has_the_table_that_the_model_gives() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "fused-kernel.md").read_text(encoding="utf-8")
    text = page.partition(tensor_table.BEGIN)[2].partition(tensor_table.END)[0]
    assert tensor_table.made_from() in text, "the kernels have changed: python -m tools.models.tensor_table --write"
    (_, *head_dims), _, *body = ([*map(str.strip, x.split("|")[1:-1])] for x in text.splitlines() if x.startswith("|"))
    found = {label: dict(zip(map(int, head_dims), words)) for label, *words in body}
    assert list(found) == [row.label for row in tensor_table.ROWS]
    for row, head_dim in some(tensor_table.cells(), 50):
        try:
            assert found[row.label][head_dim] == tensor_table.cell(row, head_dim)
        except SystemExit:
            pytest.skip("needs NVRTC 12.6")


def test_machine_code_of_later_cards_is_refused() -> None:
    header = bytearray(64)
    header[0x30] = 90
    with pytest.raises(ValueError, match="must be for sm_70 to sm_89, got sm_90"):
        next(model.paths(bytes(header)))
