"""The fused kernels of an earlier commit: its table and its cubins are still right for every variant whose code has
not changed since, down to the last token behind the preprocessor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code import source as today
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.gpu.nvrtc import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
FUSED = "pascal_attn_core/fused"
TABLE = "docs/fused-static.txt"


def code_hash(variant: Compilation, source: Callable[[str], str] = today.source, *, what_is_read: bool = False) -> str:
    """Hash of what the preprocessor leaves of a variant's text with the variant's own macros, and of NVRTC's options:
    all that its machine code depends on.

    Args:
        source: gives the text of a kind; of another state of the sources, for a variant of the same state.
        what_is_read: without parameters that nothing reads: they take no register, but the machine code says how many
            bytes all parameters have.
    """
    text = _preprocessed(source(variant.kind), tuple(variant.macros().items()))
    if what_is_read:
        times = Counter(re.findall(r"\w+", text))
        text = re.sub(r"(?:const )?\w+\*? (\w+);", lambda found: found[0] if times[found[1]] > 1 else "", text)
    return hashlib.sha256(" ".join([*OPTIONS, *text.split()]).encode()).hexdigest()


def _there(variant: Compilation, sources: ModuleType) -> Compilation:
    """
    Raises:
        KeyError: there were none of its class then.
    """
    try:
        kind = getattr(sources, type(variant).__name__)
    except AttributeError as error:
        raise KeyError(variant.name) from error
    return kind(**{field.name: getattr(variant, field.name) for field in dataclasses.fields(variant)})


@functools.cache
def _preprocessed(text: str, macros: tuple[tuple[str, object], ...]) -> str:
    preprocessor = shutil.which("g++") or sys.exit("g++ must be installed: its preprocessor says which kernels changed")
    command = [preprocessor, "-E", "-P", "-undef", "-x", "c++", *(f"-D{name}={value}" for name, value in macros), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


class Earlier:
    """The kernels of a commit.

    Args:
        root: where ``pascal_attn_core/fused`` and the table of that commit lie.
    """

    def __init__(self, root: Path):
        self._sources = _sources(root / FUSED)
        self._packs = root / FUSED / "prebuilt"
        self._manifest: dict[str, Any] = json.loads((self._packs / "manifest.json").read_text())
        self.table = (root / TABLE).read_text()

    def digest(self, variant: Compilation) -> str:
        """The hash by which its table and cubins name what they were made from; "" where there is no such variant."""
        try:
            return self._sources.digest(_there(variant, self._sources))
        except KeyError:
            return ""

    def variants(self) -> Iterator[Compilation]:
        """All that there were, of attention, of linear layers and of GGUF weights."""
        yield from self._sources.all_variants()
        yield from self._sources.linear_variants()
        yield from self._sources.gguf_variants()

    def has(self, variant: Compilation, *, what_is_read: bool = False) -> bool:
        """Whether the variant's machine code, or what of it registers and shared memory depend on, is that of today."""
        try:
            there = _there(variant, self._sources)
            then = code_hash(there, self._sources.source, what_is_read=what_is_read)
            now = code_hash(variant, what_is_read=what_is_read)
        except (KeyError, subprocess.CalledProcessError):  # there was no such variant then
            return False
        return then == now

    def cubin(self, variant: Compilation, arch: int) -> bytes | None:
        """The one that the commit ships, if it is still right."""
        pack = prebuilt.pack_name(variant, arch)
        place = self._manifest["packs"].get(pack, {}).get(variant.name)
        is_its_own = self._manifest["digests"].get(variant.name) == self.digest(variant)
        if place is None or not is_its_own or not self.has(variant):
            return None
        return lzma.decompress((self._packs / pack).read_bytes())[place[0] : place[1]]


def _sources(fused: Path) -> ModuleType:
    """The ``source.py`` of a commit, in whichever folder it was then, and what it imports, as a package of their
    own."""
    package = ModuleType("earlier_fused")
    package.__path__ = [str(fused)]
    for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
        del sys.modules[name]
    sys.modules[package.__name__] = package
    path = next(fused.rglob("source.py")).relative_to(fused).with_suffix("")
    return importlib.import_module(".".join((package.__name__, *path.parts)))


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Earlier]:
    """The kernels of a commit of this repository."""
    command = ["git", "archive", "--format=tar", commit, FUSED, TABLE]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder)
        yield Earlier(Path(folder))
