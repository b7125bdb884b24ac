"""The model of a multiprocessor on machine code that is written here, where each limit can be worked out by hand."""

import struct
from pathlib import Path

import pytest
from attn_support.randomness import some

from tools.models import tensor as model
from tools.models import tensor_table

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


def test_waste_of_a_causal_call() -> None:
    """Four blocks of 64 rows and 64-column tiles of 256 tokens: 10 tiles of which the diagonal ones are half empty."""
    found = model.waste(64, 64, 256, 256, heads=1, places=4, allowed=lambda i: (0, i + 1))
    assert found.unwanted == pytest.approx(1 - 256 * 257 / 2 / (10 * 64 * 64))
    assert found.idle == pytest.approx(1 - 10 / 16)  # three of four wait for the longest


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
