"""Compiled kernels on disk, one file each in the user's cache folder. A file that is not whole counts as missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...machine.storage import replace_file

_MAGIC = b"pascal-attn cubin 1\n"
_DIGEST_BYTES = 32


def file_name(source_digest: str, arch: str, compiler: str, version: tuple[int, int]) -> str:
    """Name of the file for a source (with its macros), an architecture (``"sm_61"``), and a compiler."""
    key = f"{source_digest} {arch} {compiler.lower()} {version[0]}.{version[1]}"
    return hashlib.sha256(key.encode()).hexdigest()[:40] + ".cubin"


def load(folder: Path, name: str) -> bytes | None:
    """The cubin, or None if there is none or the file is damaged."""
    try:
        content = (folder / name).read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST_BYTES
    cubin = content[head:]
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : head] != hashlib.sha256(cubin).digest():
        return None
    return cubin


def save(folder: Path, name: str, cubin: bytes) -> str | None:
    """Store a cubin so that no reader ever sees a part of it. Returns why that was not possible, or None."""
    try:
        replace_file(folder / name, _MAGIC + hashlib.sha256(cubin).digest() + cubin)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None
