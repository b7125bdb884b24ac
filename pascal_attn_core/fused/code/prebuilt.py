"""Cubins that ship with the package: packs of one architecture and head_dim, of 8-bit attention, or of linear layers
(GGUF weights have one of their own), and a manifest that says which source each was made from."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..geometry import amd as amd_geometry
from ..geometry.gradient import TURING, VOLTA, WMMA
from ..geometry.plain import INT8_HEAD_DIMS
from .amd_code import renamed
from .compilation import Compilation, GgufLinearVariant
from .source import DTYPES, HEAD_DIMS, Variant, digest, gguf_linear_variants, linear_variants

log = logging.getLogger("pascal_attn")
FOLDER = Path(__file__).parents[1] / "prebuilt"
ARCHS = (50, 60, 61, 70)  # those worth shipping
_ON_TENSOR_CORES = {70: VOLTA, 75: TURING}
_LINEAR = (61, 70)  # of linear layers in 8 bits
_INT8 = (61,)  # of attention in 8 bits
_GGUF = (61,)  # of GGUF weights times rows in 8 bits
_OFTEN_MASKED = (40, 64, 80, 128)
_LANGUAGE_MODELS = (64, 128)


def variants(head_dim: int) -> list[Variant]:
    """The variants that ship for a head_dim: the calls that models make most. The rest is compiled at its first use,
    since a cubin is some 13 KB, compressed, and there are a thousand."""
    chosen = [Variant("forward", head_dim, dtype) for dtype in DTYPES]
    if head_dim in _OFTEN_MASKED:
        chosen += [Variant("forward", head_dim, dtype, "bool") for dtype in DTYPES]
    if head_dim in _LANGUAGE_MODELS:
        chosen += [Variant("split", head_dim, dtype) for dtype in DTYPES]
    return chosen


def tensor_variants(generation: str, head_dim: int) -> list[Variant]:
    """The variants that ship for a head_dim on tensor cores; ``generation`` "volta" or "tensor"."""
    chosen = [Variant(generation, head_dim, "float16")]
    if head_dim in _OFTEN_MASKED:
        chosen.append(Variant(generation, head_dim, "float16", "bool"))
    if head_dim in _LANGUAGE_MODELS:
        kinds = ("even", "small", "packed", "grad_query", "grad_key_value")
        chosen += [Variant(f"{generation}_{kind}", head_dim, "float16") for kind in kinds]
    return chosen


def packs() -> list[tuple[int, list[Compilation]]]:
    """(architecture, variants) of each pack; the variants name it."""
    found: list[tuple[int, list[Compilation]]] = []
    found += [(arch, [*variants(head_dim)]) for arch in ARCHS for head_dim in HEAD_DIMS]
    found += [
        (arch, [*tensor_variants(generation.name, head_dim)])
        for arch, generation in _ON_TENSOR_CORES.items()
        for head_dim in generation.head_dims
    ]
    found += [(arch, [Variant("int8", dim, dtype) for dim in INT8_HEAD_DIMS for dtype in DTYPES]) for arch in _INT8]
    found += [(arch, [*gguf_linear_variants()]) for arch in _GGUF]
    return found + [(arch, [*linear_variants()]) for arch in _LINEAR]


def all_variants(capability: tuple[int, int] | None = None) -> list[Compilation]:
    """All variants that ship, each once; for devices of a compute capability, or for all."""
    found = dict.fromkeys(variant for _, content in packs() for variant in content)
    return [variant for variant in found if capability is None or variant.runs_on(capability)]


def pack_name(variant: Compilation, arch: int = 0) -> str:
    """The file name of the pack that holds a variant's code for an architecture of NVIDIA's; of AMD's that of the
    variant, whichever card of the family it is for."""
    return f"{amd_geometry.base(variant.arch) if variant.arch else f'sm_{arch}'}-{variant.pack}.xz"


@functools.cache
def manifest(name: str = "manifest.json") -> dict[str, Any]:
    """``{"nvrtc": [12, 6], "digests": {variant: hash of its source}, "packs": {file: {variant: [start, end]}}}``, or
    for AMD, in ``"amd.json"``, with ``"clang": "16.0.6"``; empty if nothing was shipped."""
    path = FOLDER / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"digests": {}, "packs": {}}


amd_manifest = functools.partial(manifest, "amd.json")


def shipped_archs() -> tuple[int, ...]:
    """The architectures that this copy of the package brings packs for."""
    return tuple(sorted({int(pack.removeprefix("sm_").split("-")[0]) for pack in manifest()["packs"]}))


def ships_for(arch: str) -> bool:
    """Whether anything ships that runs on devices of an architecture: "sm_61", or what ``amd_geometry.kernel_arch``
    gives."""
    if arch.startswith("sm_"):
        return best_arch(arch) is not None
    return arch not in amd_geometry.COMPILED and any(
        pack.startswith(f"{amd_geometry.base(arch)}-") for pack in amd_manifest()["packs"]
    )


def variants_for(arch: str) -> list[Compilation]:
    """The variants that ship for devices of an architecture, each once."""
    if arch.startswith("sm_"):
        return all_variants(divmod(int(arch.removeprefix("sm_")), 10))
    if not ships_for(arch):
        return []
    return [replace(variant, arch=arch) for variant in amd_variants(amd_geometry.base(arch))]


def best_arch(arch: str, variant: Compilation | None = None) -> int | None:
    """The architecture of NVIDIA's that ships (for a variant: with it) and runs on devices of ``arch``, "sm_61": the
    same major version, a minor one that is not newer."""
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    archs = [arch for arch in shipped_archs() if arch // 10 == major and arch % 10 <= minor]
    if variant is not None:
        archs = [arch for arch in archs if variant.name in manifest()["packs"].get(pack_name(variant, arch), {})]
    return max(archs, default=None)


def find(variant: Compilation, arch: str = "") -> bytes | None:
    """The shipped machine code of a variant that runs on devices of an architecture, on AMD's that of the variant.
    None: there is none, or it was made from another source."""
    if not variant.arch:
        best = best_arch(arch, variant)
        return None if best is None else load(variant, best)
    if variant.arch in amd_geometry.COMPILED:
        return None
    own = replace(variant, arch=amd_geometry.base(variant.arch))
    code = _code_of(own, amd_manifest(), pack_name(own))
    return None if code is None else renamed(code, amd_geometry.target(variant.arch))


def load(variant: Compilation, arch: int) -> bytes | None:
    """The shipped cubin of this very architecture, or None."""
    return _code_of(variant, manifest(), pack_name(variant, arch))


def _code_of(variant: Compilation, listed: dict[str, Any], pack: str) -> bytes | None:
    place = listed["packs"].get(pack, {}).get(variant.name)
    if place is None or listed["digests"].get(variant.name) != digest(variant):
        return None
    return _unpacked(pack)[slice(*place)] or None


@functools.lru_cache(maxsize=4)
def _unpacked(pack: str) -> bytes:
    """The content of a pack; nothing where it cannot be read: its kernels are compiled then."""
    try:
        import lzma  # a Python may have been built without it

        return lzma.decompress((FOLDER / pack).read_bytes())
    except Exception as error:  # LZMAError has a name only where there is lzma
        log.warning("the prebuilt kernels %s cannot be read: %s", pack, error)
        return b""


# ---- AMD -------------------------------------------------------------------------------------------------------------


def amd_variants(arch: str) -> list[Variant | GgufLinearVariant]:
    """The variants that ship for one of ``amd_geometry.ARCHS``, each once. These cards have no bfloat16: only language
    models use it there."""
    others = [Variant(amd_geometry.RANGES, head_dim, "float16") for head_dim in amd_geometry.RANGES_HEAD_DIMS]
    others += [Variant("int8", head_dim, dtype) for head_dim in INT8_HEAD_DIMS for dtype in ("float32", "float16")]
    if amd_geometry.wmma(arch):
        masked = [(dim, "none") for dim in WMMA.head_dims] + [(dim, "bool") for dim in _LANGUAGE_MODELS]
        others += [Variant("wmma", dim, dtype, mask, arch=arch) for dim, mask in masked for dtype in WMMA.dtypes]
        others += [Variant("wmma_small", dim, dtype, arch=arch) for dim in _LANGUAGE_MODELS for dtype in WMMA.dtypes]
    found = [
        replace(variant, arch=arch)
        for head_dim in HEAD_DIMS
        for variant in (*variants(head_dim), *(other for other in others if other.head_dim == head_dim))
        if variant.dtype != "bfloat16" or head_dim in _LANGUAGE_MODELS or variant.on_tensor_cores
    ]
    return [*(variant for variant in found if variant.exists), *gguf_linear_variants(arch)]
