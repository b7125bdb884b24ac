"""What clang makes of kernels for AMD's cards, kept beside the emulated kernels: several tests, in several processes,
look at the same code object."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from pascal_attn_core.fused.source import Variant, source

from ..fused.emulation import BUILD

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import amd as tool


def compiled(variant: Variant) -> bytes:
    """The code object of a variant by the clang that is here, from its source with its options."""
    text, clang = source(variant.kind, variant.arch), tool.compiler()
    what = [text, *tool.clang_options(variant), tool.version(clang) if clang else ""]
    path = BUILD / f"{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:24]}.co"
    if not path.exists():
        BUILD.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(tool.compile_variant(variant))
        unfinished.replace(path)
    return path.read_bytes()
