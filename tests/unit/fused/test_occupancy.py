"""How many blocks of each kernel a multiprocessor holds, by the registers and the shared memory that ptxas reports;
the tables of tile sizes."""

import functools
from pathlib import Path
from typing import NamedTuple

import fused as tool
import pytest

from pascal_attn_core.fused.code.source import Geometry, Variant
from pascal_attn_core.fused.geometry import tables
from pascal_attn_core.fused.geometry.tables import read_tables
from pascal_attn_core.fused.launch.plan import resident_blocks


class Multiprocessor(NamedTuple):
    """The limits of the CUDA C++ programming guide; ``shared_of_block``: what each block takes beside its own."""

    shared_bytes: int
    threads: int = 2048
    blocks: int = 32
    shared_of_block: int = 0


KIB = 1 << 10
Found = dict[tuple[Variant, int], int]  # blocks of a variant on an architecture
ARCHS = {
    50: Multiprocessor(64 * KIB),
    60: Multiprocessor(64 * KIB),
    61: Multiprocessor(96 * KIB),
    70: Multiprocessor(96 * KIB),
    75: Multiprocessor(64 * KIB, 1024, 16),
    80: Multiprocessor(164 * KIB, shared_of_block=KIB),
    90: Multiprocessor(228 * KIB, shared_of_block=KIB),
}
_REGISTERS_OF_SCHEDULER, _SCHEDULERS = 16384, 4


@functools.cache
def _table() -> dict[str, dict[int, str]]:
    return tool.read_table()


def blocks_per_sm(variant: Variant, arch: int) -> int:
    """Resident blocks of a variant's largest kernel."""
    functions, shared = tool.read_cell(_table()[variant.name][arch])
    sm, threads = ARCHS[arch], variant.geometry.threads
    of_warp = -(-max(registers for registers, _ in functions) * 32 // 256) * 256  # given out by 256
    by_registers = _SCHEDULERS * (_REGISTERS_OF_SCHEDULER // of_warp) // (threads // 32)
    shared += variant.dynamic_bytes
    by_memory = sm.shared_bytes // (-(-shared // 256) * 256 + sm.shared_of_block)
    return min(by_registers, by_memory, sm.threads // threads, sm.blocks)


@pytest.fixture(scope="module")
def found() -> Found:
    return {
        (variant, arch): blocks_per_sm(variant, arch)
        for variant in tool.all_variants()
        for arch in _table().get(variant.name, ())
    }


def test_a_multiprocessor_holds_the_blocks_that_a_kernel_is_compiled_for(found: Found) -> None:
    fewer = [
        f"{variant.name} sm_{arch}: {blocks}"
        for (variant, arch), blocks in found.items()
        if blocks < variant.geometry.blocks and not variant.is_small
    ]
    # Of 8-bit attention one: twice its tiles are more than the shared memory of a GTX 16xx. Gradients at head_dim 64
    # are compiled for three blocks, of which cards with 64 KiB of shared memory hold two.
    known = {("int8-128", "sm_75: 1"), *(("grad_key_value-64", f"sm_{arch}: 2") for arch in (50, 60, 75))}
    assert [line for line in fewer if not any(line.startswith(a) and line.endswith(b) for a, b in known)] == []


def test_keys_are_cut_for_the_blocks_that_a_multiprocessor_holds(found: Found) -> None:
    """Kernels for few queries lose at most half of their blocks to shared memory, of which their tiles are all."""
    fewer = set()
    for (variant, arch), blocks in found.items():
        if variant.kind == "split":
            planned, wanted = resident_blocks(variant, (arch // 10, arch % 10)), variant.geometry.blocks
            assert planned == min(blocks, wanted) >= wanted / 2, f"{variant.name} sm_{arch}"
            assert variant.tile_bytes == tool.read_cell(_table()[variant.name][arch])[1]
            fewer |= {(variant.head_dim, arch)} if planned < wanted else set()
    assert fewer >= {(128, 60), (128, 61), (64, 60)}
    assert resident_blocks(Variant("split", 128, "float32"), None) == 6


def test_a_line_is_a_geometry_of_its_head_dims_in_each_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# why\nhead_dims rows cols tx ty ahead\n[one, two]\n64,32 8 16 2 4 yes  # both\n[three]\n40 9 16 2 4 no\n"
    (tmp_path / "some.txt").write_text(text)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    first = Geometry(8, 16, 2, 4, ahead=True)
    found = read_tables("some", Geometry)
    assert found == {"one": {32: first, 64: first}, "two": {32: first, 64: first}, "three": {40: Geometry(9, 16, 2, 4)}}
    assert list(found["one"]) == [32, 64]
