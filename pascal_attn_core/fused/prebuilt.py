"""Cubins that ship with the package: packs of one architecture and head_dim, compressed together, and a manifest that
says which source each was made from."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

from .source import DTYPES, HEAD_DIMS, Variant, digest
from .tensor_geometry import TENSOR_HEAD_DIMS, VOLTA_HEAD_DIMS

FOLDER = Path(__file__).parent / "prebuilt"
ARCHS = (50, 60, 61, 70)  # those worth shipping
_ON_TENSOR_CORES = {70: ("volta", VOLTA_HEAD_DIMS), 75: ("tensor", TENSOR_HEAD_DIMS)}
_OFTEN_MASKED = (40, 64, 80, 128)
_LANGUAGE_MODELS = (64, 128)


def variants(head_dim: int) -> list[Variant]:
    """What ships for a head_dim: the calls that models make most. The rest is compiled at its first use, since a cubin
    is some 13 KB, compressed, and there are a thousand."""
    chosen = [Variant("forward", head_dim, dtype) for dtype in DTYPES]
    if head_dim in _OFTEN_MASKED:
        chosen += [Variant("forward", head_dim, dtype, "bool") for dtype in DTYPES]
    if head_dim in _LANGUAGE_MODELS:
        chosen += [Variant("split", head_dim, dtype) for dtype in DTYPES]
    return chosen


def tensor_variants(generation: str, head_dim: int) -> list[Variant]:
    """The same on tensor cores; ``generation`` "volta" or "tensor"."""
    chosen = [Variant(generation, head_dim, "float16")]
    if head_dim in _OFTEN_MASKED:
        chosen.append(Variant(generation, head_dim, "float16", "bool"))
    if head_dim in _LANGUAGE_MODELS:
        kinds = ("small", "packed", "grad_query", "grad_key_value")
        chosen += [Variant(f"{generation}_{kind}", head_dim, "float16") for kind in kinds]
    return chosen


def packs() -> list[tuple[int, list[Variant]]]:
    """(architecture, variants) of each pack; the variants name it."""
    plain = [(arch, variants(head_dim)) for arch in ARCHS for head_dim in HEAD_DIMS]
    return plain + [
        (arch, tensor_variants(generation, head_dim))
        for arch, (generation, head_dims) in _ON_TENSOR_CORES.items()
        for head_dim in head_dims
    ]


def all_variants(capability: tuple[int, int] | None = None) -> list[Variant]:
    """What ships, each once; for devices of a compute capability, or for all."""
    found = dict.fromkeys(variant for _, content in packs() for variant in content)
    return [variant for variant in found if capability is None or variant.runs_on(capability)]


def pack_name(arch: int, variant: Variant) -> str:
    """Of the pack that holds a variant."""
    return f"sm_{arch}-{variant.head_dim}{'-tensor' if variant.on_tensor_cores else ''}.xz"


@functools.cache
def manifest() -> dict[str, Any]:
    """``{"nvrtc": [12, 6], "digests": {variant: hash of its source}, "packs": {file: {variant: [start, end]}}}``;
    empty if nothing was shipped."""
    path = FOLDER / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"digests": {}, "packs": {}}


def shipped_archs() -> tuple[int, ...]:
    """The architectures that this copy of the package brings packs for."""
    return tuple(sorted({int(pack.removeprefix("sm_").split("-")[0]) for pack in manifest()["packs"]}))


def best_arch(capability: tuple[int, int], variant: Variant | None = None) -> int | None:
    """The architecture that ships (for a variant: with it) and runs on a device: the same major version, a minor one
    that is not newer."""
    major, minor = capability
    archs = [arch for arch in shipped_archs() if arch // 10 == major and arch % 10 <= minor]
    if variant is not None:
        archs = [arch for arch in archs if variant.name in manifest()["packs"].get(pack_name(arch, variant), {})]
    return max(archs, default=None)


def find(variant: Variant, capability: tuple[int, int]) -> bytes | None:
    """The shipped cubin of a variant that runs on devices of this compute capability, or None."""
    arch = best_arch(capability, variant)
    return None if arch is None else load(variant, arch)


def load(variant: Variant, arch: int) -> bytes | None:
    """The shipped cubin, or None: there is none, or it was made from another source."""
    if manifest()["digests"].get(variant.name) != digest(variant):
        return None
    pack = pack_name(arch, variant)
    place = manifest()["packs"].get(pack, {}).get(variant.name)
    return None if place is None else _unpacked(pack)[place[0] : place[1]]


@functools.lru_cache(maxsize=4)
def _unpacked(pack: str) -> bytes:
    return lzma.decompress((FOLDER / pack).read_bytes())
