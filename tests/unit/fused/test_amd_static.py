"""The kernels for AMD's cards as clang compiles them: no scratch, the registers of the table, the metadata."""

import ctypes
import random
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import amd as tool
import pytest
from attn_support.fused.code_objects import metadata, threads_of
from attn_support.fused.emulation import structure_of
from attn_support.randomness import at_night, seeds, some, times

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.amd_code import NotACodeObject, arch_of, renamed, unbundled
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.kinds import GGUF_LINEAR
from pascal_attn_core.fused.code.source import Variant, amd_variants, digest
from pascal_attn_core.fused.geometry import amd as amd_geometry
from pascal_attn_core.fused.geometry.amd import ARCHS, kernel_arch

needs_clang = pytest.mark.skipif(
    tool.compiler() is None, reason=f"needs clang {tool.CLANG} with the AMDGPU target (Debian: clang-16 lld-16)"
)
ONE = Variant("forward", 64, "float16", arch="gfx906")


def _shipped(variant: Variant) -> bytes:
    code = prebuilt.find(variant)
    assert code is not None, f"{variant.name} has changed: python tools/amd.py prebuilt"
    return code


@pytest.mark.parametrize(
    ("reported", "true", "arch", "base", "target"),
    [
        ("gfx906:sramecc+:xnack-", "gfx906", "gfx906", "gfx906", "gfx906"),
        ("gfx1031", "gfx1031", "gfx1031", "gfx1030", "gfx1031"),
        ("gfx1035", "gfx1035", "gfx1035", "gfx1030", "gfx1035"),
        ("gfx1030", "gfx1032", "gfx1030", "gfx1030", "gfx1030"),  # HSA_OVERRIDE_GFX_VERSION within a family
        ("gfx1030", "gfx1010", "gfx1030-no-dot", "gfx1010", "gfx1030"),  # and across: a dot would end the process
        ("gfx1030", None, "gfx1030-no-dot", "gfx1010", "gfx1030"),
        ("gfx906", None, "gfx906-no-dot", "gfx900", "gfx906"),
        ("gfx900", None, "gfx900", "gfx900", "gfx900"),
        ("gfx90c", "gfx90c", "gfx90c", "gfx900", "gfx90c"),
        ("gfx1010", "gfx1030", "gfx1010", "gfx1010", "gfx1010"),
        ("gfx1013", "gfx1013", "gfx1013", "gfx1010", "gfx1013"),
        ("gfx1151", "gfx1151", "gfx1151", "gfx1102", "gfx1151"),
        ("gfx1100", "gfx1103", "gfx1100", "gfx1102", "gfx1100"),
        ("gfx1100", None, "gfx1100", "gfx1102", "gfx1100"),  # all cards that run code for gfx11 have them
        ("gfx1201", "gfx1201", "gfx1201", "gfx1102", "gfx1201"),
    ],
)
def test_dot_products_where_they_are_known(reported: str, true: str | None, arch: str, base: str, target: str) -> None:
    """Code without them is that of a family that has none."""
    assert kernel_arch(reported, true) == arch
    assert (amd_geometry.base(arch), amd_geometry.target(arch)) == (base, target)
    assert amd_geometry.has_dots(arch) == (base in ("gfx906", "gfx1030", "gfx1102"))


def test_other_cards_have_no_kernels_and_code_without_dot_products_is_compiled_for_another_family() -> None:
    assert {kernel_arch(reported, None) for reported in ("gfx90a", "gfx1250", "gfx803")} == {None}
    targets = {"gfx1013": "gfx1013", "gfx1100": "gfx1102", "gfx1201": "gfx1201", "gfx1030-no-dot": "gfx1010"}
    assert {name: amd_geometry.compile_target(name) for name in targets} == targets


def test_every_variant_has_tiles_that_fit_and_pairs_where_there_are_dot_products() -> None:
    for arch in (*ARCHS, "gfx1030-no-dot", "gfx906-no-dot"):
        for variant in amd_variants(arch):
            geometry = variant.geometry
            has_pairs = not variant.on_tensor_cores and geometry.pairs
            assert not has_pairs or (variant.dtype == "float16" and amd_geometry.has_dots(arch))
            assert geometry.threads % amd_geometry.wave_size(arch) == 0
            # Beside the tile: whether any thread's mask allows anything, and the maxima of flushed rows (head_dim 512).
            flushed = variant.head_dim > 256 and variant.flush_tiles > 0
            own = 4 * (variant.mask != "none") + 4 * geometry.rows * flushed
            assert variant.tile_bytes + own <= amd_geometry.LDS_BYTES, variant.name


def check_metadata(variant: Compilation, code: bytes, scratch: int = 0) -> None:
    """The code object against what the host passes to its kernels; ``scratch``: the most bytes of a lane."""
    said = metadata(code)
    assert said["amdhsa.target"] == f"amdgcn-amd-amdhsa--{arch_of(code)}"  # without features: for any xnack and sramecc
    assert said["amdhsa.version"] == [1, 1]  # of code object version 4
    kernels = {kernel[".name"]: kernel for kernel in said["amdhsa.kernels"]}
    assert set(kernels) == set(variant.functions)
    for name, kernel in kernels.items():
        of_host = ctypes.sizeof(structure_of(name))
        assert [(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel[".args"]] == [(0, of_host, "by_value")]
        assert kernel[".kernarg_segment_size"] == of_host  # no hidden arguments
        assert kernel[".wavefront_size"] == amd_geometry.wave_size(variant.arch)
        assert kernel[".max_flat_workgroup_size"] == threads_of(variant, name)
        assert kernel[".private_segment_fixed_size"] <= scratch
        assert kernel[".group_segment_fixed_size"] <= amd_geometry.LDS_BYTES
    if isinstance(variant, GgufLinearVariant):
        return
    mains = ("pa_forward", "pa_grad", "pa_capped", "pa_int8_attention", "pa_wmma")
    main = kernels[next(name for name in variant.functions if name.startswith(mains))]
    tile = variant.tile_bytes
    assert tile <= main[".group_segment_fixed_size"] <= tile + 4 + 4 * variant.geometry.rows


@pytest.mark.parametrize("arch", ARCHS)
def test_what_ships_was_made_from_this_source_and_takes_what_the_host_passes(arch: str) -> None:
    digests = prebuilt.amd_manifest()["digests"]
    assert set(digests) == {variant.name for arch in ARCHS for variant in prebuilt.amd_variants(arch)}
    for variant in prebuilt.amd_variants(arch):
        assert digests[variant.name] == digest(variant), f"{variant.name} has changed: python tools/amd.py prebuilt"
        check_metadata(variant, _shipped(variant))


OBJDUMP = shutil.which(f"llvm-objdump-{tool.CLANG}") or shutil.which("llvm-objdump")
needs_objdump = pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump (Debian: llvm-16)")


def _disassembled(code: bytes, path: Path, *options: str) -> str:
    path.write_bytes(code)
    done = subprocess.run([str(OBJDUMP), "-d", *options, str(path)], capture_output=True, text=True, check=True)
    assert "s_endpgm" in done.stdout
    return done.stdout


@needs_objdump
@pytest.mark.parametrize("arch", some([*ARCHS, "gfx906-no-dot", "gfx1030-no-dot", "gfx1031-no-dot"], 3))
def test_no_card_meets_a_dot_product_that_it_does_not_have(arch: str, tmp_path: Path) -> None:
    chosen = random.Random(seeds(1)[0]).sample(prebuilt.amd_variants(arch), min(times(2), 44))
    for variant in (*chosen, Variant("forward", 64, "float16", arch=arch)):
        code = _shipped(variant)
        assert arch_of(code) == amd_geometry.target(arch)
        expected = amd_geometry.has_dots(arch) and (variant.dtype == "float16" or variant.kind in ("int8", GGUF_LINEAR))
        assert ("v_dot" in _disassembled(code, tmp_path / "code")) == expected, variant.name


@at_night
@needs_clang
@needs_objdump
@pytest.mark.parametrize("arch", some(["gfx906", "gfx1030", "gfx906-no-dot", "gfx1030-no-dot"], 3))
def test_nor_do_gradients_in_float16_have_them_elsewhere(arch: str, tmp_path: Path) -> None:
    for kind in ("grad_query", "grad_key_value"):
        text = _disassembled(tool.compiled(Variant(kind, 64, "float16", arch=arch)), tmp_path / "code")
        assert ("v_dot2" in text) == amd_geometry.has_dots(arch)


@needs_objdump
@pytest.mark.parametrize("arch", some(["gfx906-no-dot", "gfx1012-no-dot", "gfx1030-no-dot"], 3))
def test_what_a_card_of_another_name_gets_means_the_same_to_both(arch: str, tmp_path: Path) -> None:
    """All code that divides 64-bit integers is read, and some of the other."""
    shipped = prebuilt.amd_variants(arch)
    others = [variant for variant in shipped if variant.kind != "split"]
    chosen = random.Random(seeds(1)[0]).sample(others, min(times(2), len(others)))
    for variant in (*chosen, *(variant for variant in shipped if variant.kind == "split")):
        to_both = (amd_geometry.target(arch), amd_geometry.base(arch))
        texts = [_disassembled(_shipped(variant), tmp_path / "code", f"--mcpu={name}") for name in to_both]
        assert len({text.partition("Disassembly")[2] for text in texts}) == 1, variant.name


@pytest.mark.parametrize(
    ("base", "names"), [("gfx1030", ("gfx1031", "gfx1036")), ("gfx1102", ("gfx1100", "gfx1103", "gfx1151"))]
)
def test_a_card_of_the_family_takes_the_code_under_its_own_name(base: str, names: tuple[str, ...]) -> None:
    code = _shipped(Variant("forward", 64, "float16", arch=base))
    for name in names:
        other = _shipped(Variant("forward", 64, "float16", arch=name))
        assert (arch_of(other), metadata(other)["amdhsa.target"]) == (name, f"amdgcn-amd-amdhsa--{name}")
        differ = [place for place, (a, b) in enumerate(zip(code, other)) if a != b]
        assert (differ[0], len(differ)) == (48, 1 + sum(a != b for a, b in zip(base, name)))  # header, and metadata
    assert {prebuilt.find(Variant("forward", 64, "float16", arch=arch)) for arch in ("gfx904", "gfx1201")} == {None}
    assert prebuilt.find(replace(ONE, mask="float", padded=True)) is None


def test_a_code_object_in_a_bundle_is_found_and_other_bytes_are_refused() -> None:
    code = _shipped(ONE)
    name = b"hipv4-amdgcn-amd-amdhsa--gfx906"
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<QQQQ", 1, 4096, len(code), len(name)) + name
    bundle = head.ljust(4096, b"\0") + code
    assert unbundled(bundle) == code
    assert renamed(bundle, "gfx906") == code
    for bad in (b"", b"\x7fELF" + bytes(100), code[:40], bytes(200)):
        with pytest.raises(NotACodeObject):
            renamed(bad, "gfx906")
    with pytest.raises(NotACodeObject):
        unbundled(head[:24] + struct.pack("<Q", 0))
    for name in ("gfx1030", "gfx999"):
        with pytest.raises(ValueError, match="cannot be renamed"):
            renamed(code, name)


def test_the_table_was_made_from_this_source() -> None:
    assert tool.read_made_from() == tool.made_from(), "the kernels have changed: python tools/amd.py table"


def test_the_table_has_every_variant_on_every_architecture_and_none_needs_scratch_or_too_much() -> None:
    cells = {
        (name, arch): tool.read_cell(text) for name, row in tool.read_table().items() for arch, text in row.items()
    }
    assert cells.keys() == {(tool.row_name(v), arch) for arch in ARCHS for v in tool.table_variants(arch)}
    for where, cell in cells.items():
        assert all(scratch == 0 and vector <= 256 for vector, scratch in cell.functions), where
        assert cell.scalar <= 108, where  # with VCC and what the hardware keeps behind the last
        assert cell.shared <= amd_geometry.LDS_BYTES, where
        assert cell.waves >= 1, where


@needs_clang
@pytest.mark.parametrize("place", range(times(1)))
def test_clang_says_what_the_table_says_and_needs_no_scratch_for_variants_that_are_in_none(place: int) -> None:
    draw = random.Random(seeds(1)[0] + place)
    variant = draw.choice([v for arch in ARCHS for v in tool.table_variants(arch)])
    other = draw.choice([v for arch in ARCHS for v in amd_variants(arch)])
    for each in (variant, other):
        check_metadata(each, tool.compiled(each))
    found = tool.cell(variant, tool.facts(tool.compiled(variant)))
    assert found == tool.read_table()[tool.row_name(variant)][variant.arch]
