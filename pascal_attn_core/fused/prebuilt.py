"""Cubins that ship with the package: packs of one architecture and head_dim, compressed together, and a manifest that
says which source each was made from."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

from .source import DTYPES, HEAD_DIMS, Variant, digest

FOLDER = Path(__file__).parent / "prebuilt"
ARCHS = (50, 60, 61, 70)  # those worth shipping
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


def all_variants() -> list[Variant]:
    return [variant for head_dim in HEAD_DIMS for variant in variants(head_dim)]


def pack_name(arch: int, head_dim: int) -> str:
    return f"sm_{arch}-{head_dim}.xz"


@functools.cache
def manifest() -> dict[str, Any]:
    """``{"nvrtc": [12, 6], "digests": {variant: hash of its source}, "packs": {file: {variant: [start, end]}}}``;
    empty if nothing was shipped."""
    path = FOLDER / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"digests": {}, "packs": {}}


def shipped_archs() -> tuple[int, ...]:
    """The architectures that this copy of the package brings packs for."""
    return tuple(sorted({int(pack.removeprefix("sm_").split("-")[0]) for pack in manifest()["packs"]}))


def best_arch(capability: tuple[int, int]) -> int | None:
    """The architecture that ships and runs on a device: the same major version, a minor one that is not newer."""
    major, minor = capability
    return max((arch for arch in shipped_archs() if arch // 10 == major and arch % 10 <= minor), default=None)


def find(variant: Variant, capability: tuple[int, int]) -> bytes | None:
    """The shipped cubin of a variant that runs on devices of this compute capability, or None."""
    arch = best_arch(capability)
    return None if arch is None else load(variant, arch)


def load(variant: Variant, arch: int) -> bytes | None:
    """The shipped cubin, or None: there is none, or it was made from another source."""
    if manifest()["digests"].get(variant.name) != digest(variant):
        return None
    pack = pack_name(arch, variant.head_dim)
    place = manifest()["packs"].get(pack, {}).get(variant.name)
    return None if place is None else _unpacked(pack)[place[0] : place[1]]


@functools.lru_cache(maxsize=4)
def _unpacked(pack: str) -> bytes:
    return lzma.decompress((FOLDER / pack).read_bytes())
