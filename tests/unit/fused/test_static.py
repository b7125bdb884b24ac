"""The kernels as NVRTC compiles them, without a GPU: no spills, the registers of the table, the share of useful work.

The whole table takes most of an hour (``python tools/fused.py table``): a few of its variants are compiled in each run.
"""

import itertools
import random

import fused as tool
import pytest
from attn_support.randomness import seeds, some, times

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.source import DTYPES, Variant, digest, gguf_linear_variants
from pascal_attn_core.fused.gpu import nvrtc
from tools.models.sass import maxwell, sections
from tools.models.shares import gguf_share, linear_share, packing, share

WIDE = (48, 64, 72, 80, 96, 112, 128)
LIBRARY = next((lib for lib in nvrtc.loaded(nvrtc.Nvrtc, nvrtc.candidates()) if lib.version == tool.NVRTC), None)
needs_nvrtc = pytest.mark.skipif(LIBRARY is None, reason="needs NVRTC 12.6 (nvidia-cuda-nvrtc-cu12==12.6.85)")


def _cubin(variant: Compilation, arch: int = 61) -> bytes:
    """The one that ships, where it was made from this source by this compiler, else one compiled here, once."""
    shipped = prebuilt.load(variant, arch) if tuple(prebuilt.manifest().get("nvrtc", ())) == tool.NVRTC else None
    return tool.compiled(variant, arch).cubin if shipped is None else shipped


@needs_nvrtc
@pytest.mark.parametrize("place", range(times(2)))
def test_ptxas_says_what_the_table_says(place: int) -> None:
    cells = [(name, arch) for name, row in sorted(tool.read_table().items()) for arch in sorted(row)]
    name, arch = random.Random(seeds(1)[0]).sample(cells, times(2))[place]  # the same in all processes of a run
    variant = next(v for v in tool.every_variant() if v.name == name)
    found, shared = tool.usage(tool.compiled(variant, arch).log)
    expected, expected_shared = tool.read_cell(tool.read_table()[name][arch])
    assert (shared, [spilled for _, spilled in found]) == (expected_shared, [spilled for _, spilled in expected])
    for (now, _), (then, _) in zip(found, expected):
        # What a process has compiled before now and then moves ptxas's choices a little.
        assert abs(now - then) <= 8, f"{name} sm_{arch}: {now} registers, {then} in the table"


# Bytes that may be spilled. Three blocks on a multiprocessor were measured to be faster than two that do not spill:
# geometry/plain.txt. The others do so on sm_90, and 4 bytes on sm_70.
_SPILL = {Variant("grad_key_value", 64, dtype).name: 320 for dtype in DTYPES}
_SPILL |= {"grad_all-64-float32-none": 32, "grad_all-96-float32-none": 4, "grad_all-72-padded-float32-float": 4}


def test_the_table_has_every_variant_on_every_architecture_and_none_spills_unasked_or_needs_too_much() -> None:
    cells = {(name, arch): cell for name, row in tool.read_table().items() for arch, cell in row.items()}
    assert cells.keys() == {(v.name, arch) for v in tool.every_variant() for arch in tool.archs_of(v)}
    for where, cell in cells.items():
        functions, shared = tool.read_cell(cell)
        most = _SPILL.get(where[0], 0)
        assert all(spilled <= most and registers <= 255 for registers, spilled in functions), where
        assert shared <= 48 << 10, where


def test_the_table_was_made_from_this_source() -> None:
    assert tool.read_digests() == tool.digests(), "the kernels have changed: python tools/fused.py table"


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
        *some((("forward", head_dim, dtype, 0.82) for head_dim in WIDE for dtype in ("float32", "float16")), 14),
        *some(_GRADIENT_SHARES, 16),
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
def test_most_instructions_of_a_linear_layer_in_8_bits_are_dp4a() -> None:
    assert LIBRARY is not None
    for dtype, (columns, product, whole) in some(
        itertools.product(range(3), [(1024, 0.79, 0.72), (3072, 0.85, 0.82)]), 6
    ):
        found = linear_share(LIBRARY, columns, columns, dtype)
        assert found[0] >= product
        assert found[1] >= whole


@needs_nvrtc
@pytest.mark.parametrize("variant", gguf_linear_variants(), ids=lambda variant: variant.name)
def test_the_product_with_gguf_weights_is_mostly_dp4a(variant: GgufLinearVariant) -> None:
    (found, gain), is_large = gguf_share(_cubin(variant)), variant.rows == 8
    least = {"Q8_0": 0.65, "Q4_0": 0.65, "Q5_0": 0.62, "Q3_K": 0.595}.get(variant.format, 0.60)
    of_small = 0.53 if variant.format in ("Q6_K", "Q3_K") else least - 0.05
    assert found >= (least if is_large else of_small)
    assert gain >= (2.8 if is_large else 2.49)


def test_no_kernel_that_ships_is_of_another_source() -> None:
    variants, digests = {v.name: v for v in prebuilt.all_variants()}, prebuilt.manifest()["digests"]
    stale = [name for name, made_from in digests.items() if made_from != digest(variants[name])]
    assert not stale, f"{len(stale)} of {len(digests)} are, {stale[0]} is one: python tools/fused.py prebuilt, once"


def test_the_packs_hold_the_functions_of_each_kernel() -> None:
    variants = {v.name: v for v in prebuilt.all_variants()}
    for pack, places in prebuilt.manifest()["packs"].items():
        for name in places:
            cubin = prebuilt.load(variants[name], int(pack.removeprefix("sm_").split("-")[0]))
            assert cubin is not None
            assert set(variants[name].functions) <= set(sections(cubin))


@pytest.mark.parametrize(("packs", "most"), [("sm_*", 4_400_000), ("gfx*.xz", 2_950_000)])
def test_what_ships_stays_small(packs: str, most: int) -> None:
    assert sum(path.stat().st_size for path in prebuilt.FOLDER.glob(packs)) < most


def test_a_device_takes_the_newest_pack_of_its_own_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "shipped_archs", lambda: (50, 60, 61, 70))
    wanted = {(5, 2): 50, (6, 0): 60, (6, 1): 61, (6, 2): 61, (7, 0): 70, (7, 5): 70, (8, 0): None, (3, 7): None}
    assert {capability: prebuilt.best_arch("sm_{}{}".format(*capability)) for capability in wanted} == wanted
