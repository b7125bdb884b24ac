"""The kernels as NVRTC compiles them, without a GPU: no spills, the registers of the table, the share of useful work.

The whole table takes most of an hour (``python tools/fused.py table``): a few of its variants are compiled in each run.
"""

import itertools
import random
import re
import shutil
import sys
from pathlib import Path

import earlier
import fused as tool
import pytest
import simulate
from attn_support import fresh
from attn_support.fused.emulation import emulate
from attn_support.randomness import seeds, some, times

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code import source as _source
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.kinds import ALL_KINDS, TABLE
from pascal_attn_core.fused.code.source import FOLDER, KINDS, Variant, digest, gguf_linear_variants, source
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.runtime import CompileError
from tools.models.sass import maxwell, sections
from tools.models.shares import backward_share, gguf_share, linear_share, packing, share

SHARE = 0.82
WIDE = (48, 64, 72, 80, 96, 112, 128)
LIBRARY = next((lib for lib in nvrtc.loaded(nvrtc.Nvrtc, nvrtc.candidates()) if lib.version == tool.NVRTC), None)
needs_nvrtc = pytest.mark.skipif(LIBRARY is None, reason="needs NVRTC 12.6 (nvidia-cuda-nvrtc-cu12==12.6.85)")


def _cubin(variant: Compilation, arch: int = 61) -> bytes:
    """The one that ships, where it was made from this source by this compiler, else one compiled here, once."""
    shipped = prebuilt.load(variant, arch) if tuple(prebuilt.manifest().get("nvrtc", ())) == tool.NVRTC else None
    return tool.compiled(variant, arch).cubin if shipped is None else shipped


def _drawn(count: int) -> list[tuple[str, int]]:
    """Variants of the table, the same in all processes of a run."""
    cells = [(name, arch) for name, row in sorted(tool.read_table().items()) for arch in sorted(row)]
    return random.Random(seeds(1)[0]).sample(cells, min(count, len(cells)))


@needs_nvrtc
@pytest.mark.parametrize("place", range(times(2)))
def test_ptxas_says_what_the_table_says(place: int) -> None:
    name, arch = _drawn(times(2))[place]
    variant = next(v for v in tool.every_variant() if v.name == name)
    found, shared = tool.usage(tool.compiled(variant, arch).log)
    expected, expected_shared = tool.read_cell(tool.read_table()[name][arch])
    assert (shared, [spilled for _, spilled in found]) == (expected_shared, [spilled for _, spilled in expected])
    for (now, _), (then, _) in zip(found, expected):
        # What a process has compiled before now and then moves ptxas's choices a little.
        assert abs(now - then) <= 8, f"{name} sm_{arch}: {now} registers, {then} in the table"


def test_the_table_has_every_variant_on_every_architecture_and_none_spills_or_needs_too_much() -> None:
    cells = {(name, arch): cell for name, row in tool.read_table().items() for arch, cell in row.items()}
    assert cells.keys() == {(v.name, arch) for v in tool.every_variant() for arch in tool.archs_of(v)}
    for where, cell in cells.items():
        functions, shared = tool.read_cell(cell)
        assert all(spilled == 0 and registers <= 255 for registers, spilled in functions), where
        assert shared <= 48 << 10, where


def test_the_table_was_made_from_this_source() -> None:
    assert tool.read_digests() == tool.digests(), "the kernels have changed: python tools/fused.py table"


@needs_nvrtc
@pytest.mark.parametrize("arch", some(tool.ARCHS, 4))
def test_every_architecture_compiles(arch: int) -> None:
    kind = KINDS[tool.ARCHS.index(arch) % 4]
    functions, _ = tool.usage(tool.compiled(Variant(kind, 32, "float32"), arch).log)
    assert [spilled for _, spilled in functions] == [0] * len(functions)


# A point below what there is.
_GRADIENT_SHARES = [
    ("grad_query", 40, "float16", 0.79),
    ("grad_query", 64, "float32", 0.828),
    ("grad_query", 72, "bfloat16", 0.776),
    ("grad_query", 128, "float32", 0.801),
    ("grad_key_value", 40, "float16", 0.754),
    ("grad_key_value", 64, "float32", 0.81),
    ("grad_key_value", 72, "bfloat16", 0.75),
    ("grad_key_value", 128, "float32", 0.796),
    ("grad_all", 32, "float32", 0.725),
    ("grad_all", 40, "float32", 0.71),
    ("grad_all", 64, "float32", 0.787),
    ("grad_all", 64, "bfloat16", 0.745),
    ("grad_all", 96, "float16", 0.782),
    ("grad_all", 112, "float16", 0.75),
    ("grad_all", 128, "float32", 0.789),
    ("grad_all", 192, "float32", 0.784),
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("kind", "head_dim", "dtype", "least"),
    [
        *some((("forward", head_dim, dtype, SHARE) for head_dim in WIDE for dtype in ("float32", "float16")), 5),
        *some(_GRADIENT_SHARES, 7),
    ],
)
def test_most_instructions_are_the_products_of_attention(kind: str, head_dim: int, dtype: str, least: float) -> None:
    variant = Variant(kind, head_dim, dtype)
    assert share(variant, _cubin(variant)).value >= least


@needs_nvrtc
@pytest.mark.parametrize(("head_dim", "most", "least"), [(64, 50, 0.66), (128, 88, 0.75)])
def test_most_instructions_of_8_bit_attention_are_dp4a(head_dim: int, most: float, least: float) -> None:
    for dtype in ("float32", "float16"):
        variant = Variant("int8", head_dim, dtype)
        found = share(variant, _cubin(variant))
        assert found.counts["IDP"] / found.scores == head_dim / 2
        geometry, code = variant.geometry, maxwell(sections(_cubin(variant))["pa_int8_attention"])
        chunks = geometry.depth + geometry.staged * head_dim // geometry.cols
        assert sum(i.kind == "IDP" for i in code) == 2 * chunks * found.scores, "a first chunk and the others"
        assert tool.read_cell(tool.read_table()[variant.name][61])[1] == variant.tile_bytes, (
            "which leaves none for scales"
        )
        assert found.per_score <= most
        assert found.value >= least
        assert 0.01 < packing(variant, _cubin(variant)) / found.per_score / 4096 < 0.03


@needs_nvrtc
@pytest.mark.parametrize("head_dim", some([40, 64], 2))
def test_each_number_of_a_tile_of_dq_is_added_to_memory_once(head_dim: int) -> None:
    """By instructions that wait for no answer, each with as many lanes side by side as there are columns."""
    variant = Variant("grad_all", head_dim, "float32")
    counts, geometry = share(variant, _cubin(variant)).counts, variant.geometry
    rounds = -(-head_dim // 32)
    assert counts["RED"] == geometry.cols * rounds * 32 / geometry.threads


@needs_nvrtc
def test_most_instructions_of_a_linear_layer_in_8_bits_are_dp4a() -> None:
    assert LIBRARY is not None
    for dtype, (columns, product, whole) in some(
        itertools.product(range(3), [(1024, 0.79, 0.72), (3072, 0.85, 0.82)]), 3
    ):
        found = linear_share(LIBRARY, columns, columns, dtype)
        assert found.main_loop >= 0.88
        assert found.product >= product
        assert found.whole >= whole
        assert found.rotated >= whole - 0.03
    with pytest.raises(ValueError, match=r"found 512 dp4a in the loop, want"):
        linear_share(LIBRARY, 1024, 1024, chunk_words=16)


@needs_nvrtc
@pytest.mark.parametrize("variant", gguf_linear_variants(), ids=lambda variant: variant.name)
def test_the_product_with_gguf_weights_is_mostly_dp4a(variant: GgufLinearVariant) -> None:
    found, is_large = gguf_share(_cubin(variant)), variant.rows == 8
    least = {"Q8_0": 0.65, "Q4_0": 0.65, "Q5_0": 0.62, "Q3_K": 0.595}.get(variant.format, 0.60)
    of_small = 0.53 if variant.format in ("Q6_K", "Q3_K") else least - 0.05
    assert found.dp4a >= (least if is_large else of_small)
    assert found.gain >= (2.8 if is_large else 2.49)


@pytest.mark.parametrize(("query", "key_value", "whole"), [(1.0, 1.0, 5 / 7), (0.5, 1.0, 5 / 10), (1.0, 0.5, 5 / 11)])
def test_the_backward_as_a_whole_needs_five_of_seven_products(query: float, key_value: float, whole: float) -> None:
    assert backward_share(query, key_value) == pytest.approx(whole)


@needs_nvrtc
def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    assert LIBRARY is not None
    with pytest.raises(CompileError, match=r"unsupported tile geometry"):
        LIBRARY.compile(source("forward"), 61, {**Variant("forward", 64, "float32").macros(), "PA_BR": 100})


def test_prebuilt_kernels_were_made_from_this_source() -> None:
    manifest, variants = prebuilt.manifest(), {v.name: v for v in prebuilt.all_variants()}
    for name, made_from in manifest["digests"].items():
        assert made_from == digest(variants[name]), f"{name} has changed: python tools/fused.py prebuilt"
    for pack, places in manifest["packs"].items():
        for name in places:
            cubin = prebuilt.load(variants[name], int(pack.removeprefix("sm_").split("-")[0]))
            assert cubin is not None
            assert set(variants[name].functions) <= set(sections(cubin))


# Files in which integers are made of the bits of floats, how often, and kinds that ship with them: what ships has been
# executed. ptxas takes one form of it for a product of integers: see pack_shares in warp.cuh.
_BITS_OF_FLOATS = {
    "elements.cuh": (1, "forward-64-bfloat16-none"),
    "codes.cuh": (1, "int8-64-float16-none"),
    "int8_pack.cuh": (7, "int8-64-float16-none"),
    "int8_linear.cu": (1, "int8_linear-float16"),
    "gguf_linear.cu": (1, "gguf_linear-Q4_0-8"),
    "product.cuh": (4, ""),  # pairs, which only AMD's cards have
    "warp.cuh": (2, "tensor-64-float16-none"),
}


def test_every_place_that_makes_integers_of_floats_is_in_machine_code_that_ships() -> None:
    shipped = {variant.name: variant for variant in prebuilt.all_variants()}
    found = {}
    for file in dict.fromkeys(itertools.chain(*(TABLE[kind].files for kind in ALL_KINDS))):
        if file != "base.cuh" and (count := (FOLDER / file).read_text().count("float_to_bits(")):
            found[file] = count
    assert found == {file: count for file, (count, _) in _BITS_OF_FLOATS.items()}
    for file, (_, name) in _BITS_OF_FLOATS.items():
        assert not name or file in TABLE[shipped[name].kind].files


def test_a_comment_changes_no_hash_and_a_number_does(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, text = Variant("forward", 64, "float32"), source("forward")
    right = digest(variant)
    for changed, is_same in ((f"// a comment\n\n{text}", True), (text.replace("SLACK 8.f", "SLACK 9.f"), False)):
        _source._code.cache_clear()
        digest.cache_clear()
        monkeypatch.setattr(_source, "source", lambda kind, arch="", changed=changed: changed)
        assert (digest(variant) == right) == is_same
    monkeypatch.undo()
    _source._code.cache_clear()
    digest.cache_clear()
    assert digest(variant) == right


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a preprocessor")
def test_only_what_has_changed_since_a_commit_is_compiled(tmp_path: Path) -> None:
    shutil.copytree(fresh.ROOT / earlier.FUSED, tmp_path / earlier.FUSED)
    (tmp_path / "docs").mkdir()
    shutil.copy(tool.TABLE, tmp_path / earlier.TABLE)
    kernel = tmp_path / earlier.FUSED / "cuda" / "forward.cu"
    text = kernel.read_text()
    float32, float16 = (Variant("forward", 64, dtype) for dtype in ("float32", "float16"))

    same = earlier.Earlier(tmp_path)
    assert tool.read_digests(same.table) == tool.digests(same.digest)
    assert same.cubin(float32, 61) == prebuilt.load(float32, 61)

    kernel.write_text(text.replace("row, O[i], 1.f, dim, t)", "row, O[i], 2.f, dim, t)"))  # where float32 sums move
    changed = earlier.Earlier(tmp_path)
    assert tool.read_digests(changed.table)["forward"] != tool.digests(changed.digest)["forward"]
    assert [changed.has(v) for v in (float32, float16, Variant("split", 64, "float32"))] == [False, True, True]
    assert changed.cubin(float32, 61) is None
    assert changed.cubin(float16, 61) is None  # by its manifest that cubin was made from another text

    unread = "float scale, scale_log2;", "float scale, scale_log2; const int* words;"
    kernel.write_text(text.replace(*unread).replace("1.f / sum : 0.f", "1.f / sum : 1.f"))
    changed = earlier.Earlier(tmp_path)
    assert not changed.has(float32, what_is_read=True)
    kernel.write_text(text.replace(*unread))
    changed = earlier.Earlier(tmp_path)
    assert (changed.has(float32), changed.has(float32, what_is_read=True)) == (False, True)


@pytest.mark.parametrize(("packs", "most"), [("sm_*", 4_400_000), ("gfx*.xz", 2_950_000)])
def test_what_ships_stays_small(packs: str, most: int) -> None:
    assert sum(path.stat().st_size for path in prebuilt.FOLDER.glob(packs)) < most


def test_a_device_takes_the_newest_pack_of_its_own_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "shipped_archs", lambda: (50, 60, 61, 70))
    wanted = {(5, 2): 50, (6, 0): 60, (6, 1): 61, (6, 2): 61, (7, 0): 70, (7, 5): 70, (8, 0): None, (3, 7): None}
    assert {capability: prebuilt.best_arch("sm_{}{}".format(*capability)) for capability in wanted} == wanted


@needs_nvrtc
def test_ptx_for_the_simulator_has_only_words_that_it_knows() -> None:
    variant = Variant("forward", 40, "float16")
    ptx = simulate.compile_ptx(source(variant.kind), variant.macros())
    edited = simulate.for_simulator(ptx)
    assert ".version 7.7" in edited
    for word in ("shfl.sync", "ld.param"):
        assert edited.count(word) == ptx.count(word) > 0
    for unknown in (r"shfl\.sync[^;]*\|", r"ld\.param[^;]*\[%", r"mov\.b64\s+%rd\d+,\s+\w+_param_"):
        assert not re.findall(unknown, edited)
    moves = r"mov\.[bf]32\s+%[rf]\d+, %[rf]\d+;"
    assert 0 < len(re.findall(moves, simulate.without_moves(edited))) < len(re.findall(moves, edited))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", simulate.KINDS)
def test_the_launch_that_is_simulated_computes_what_it_is_compared_with(kind: str, dtype: str) -> None:
    variant = Variant(kind, 64, dtype)
    work = (simulate.gradient_work if variant.is_gradient else simulate.forward_work)(variant, 96)
    emulate([work.launch])
    for written, expected in zip(work.written, work.expected, strict=True):
        most = 2e-2 if kind == "int8" else 1e-5 if dtype == "float32" else 2e-3
        assert (written.double() - expected).norm() < most * expected.norm()


def test_a_folder_without_the_simulator_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for options in ([], ["--head-dim", "128", "--dtype", "float16"], ["--kind", "grad_query"]):
        monkeypatch.setattr(sys, "argv", ["simulate.py", str(tmp_path), *options])
        with pytest.raises(SystemExit, match="is no built checkout of GPGPU-Sim"):
            simulate.main()
