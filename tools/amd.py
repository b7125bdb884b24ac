"""Compiles the fused kernels for AMD's cards without a GPU: ``python tools/amd.py table``, ``prebuilt``, ``executed``,
``scratch`` or ``hiprtc``.

``executed`` executes the machine code that ships on this CPU. ``prebuilt`` does so with what is new before it writes.

``scratch`` compiles every variant, not only those of the table, and names those for which the registers do not suffice:
some 6,900 compilations, an hour and a half of one core.

Needs clang with the AMDGPU target and lld (Debian: clang-16 lld-16); ``hiprtc`` needs AMD's runtime library instead
(libamdhip64-5). What ships and was made from today's source is not compiled again. Code objects are cached in
``build/amd`` by the hash of their preprocessed source, so that a second run compiles only what has changed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import executed

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.compilation import Compilation, GgufLinearVariant
from pascal_attn_core.fused.code.source import Variant, amd_variants, digest, gguf_linear_variants, source
from pascal_attn_core.fused.geometry import amd as amd_geometry
from pascal_attn_core.fused.geometry.amd import ARCHS, wave_size

AnyVariant = Variant | GgufLinearVariant
ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "amd"
TABLE = ROOT / "docs" / "fused-amd-static.txt"
HARDEST = (64, 128)  # head_dims of the variants in the table that do not ship
CLANG = 16  # which makes the table and what ships
_HEAD = """\
# What clang {} says of the fused kernels on AMD's architectures: architecture, vector registers of each function
# (bytes of scratch after "!"), scalar registers of the first, shared memory of its block in bytes, and how many of its
# waves a SIMD holds. Written by: python tools/amd.py table
# Made from: {}
"""


@functools.cache
def compiler() -> str | None:
    """A clang of version CLANG with the AMDGPU target, or None."""
    for name in (f"clang-{CLANG}", "clang"):
        path = shutil.which(name)
        if path is None or not version(path).startswith(f"{CLANG}."):
            continue
        if "amdgcn" in subprocess.run([path, "--print-targets"], capture_output=True, text=True).stdout:
            return path
    return None


@functools.cache
def version(path: str) -> str:
    """ "16.0.6" """
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+\.\d+\.\d+)", said)
    return found[1] if found else ""


def compile_variant(variant: Compilation, text: str | None = None) -> bytes:
    """A variant's code object by clang; ``text``: in place of its source.

    Raises:
        RuntimeError: clang's words, where it refuses the source.
    """
    return _run_clang(variant, source(variant.kind, variant.arch) if text is None else text, ())


def _run_clang(variant: Compilation, text: str, more: tuple[str, ...]) -> bytes:
    path = compiler() or sys.exit(f"clang {CLANG} with the AMDGPU target must be installed (Debian: clang-16 lld-16)")
    with tempfile.TemporaryDirectory() as folder:
        kernel, result = Path(folder) / "kernel.hip", Path(folder) / "kernel.co"
        kernel.write_text(text)
        command = [path, "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-w",
                   *_options(variant), *more,
                   "-o", str(result), str(kernel)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{variant.name}:\n{done.stderr[:4000]}")
        return result.read_bytes()


def _options(variant: Compilation) -> list[str]:
    macros = (f"-D{name}={value}" for name, value in variant.macros().items())
    target = amd_geometry.compile_target(variant.arch)
    return [f"--offload-arch={target}", *amd_geometry.options(variant.arch), *macros]


def code_hash(variant: Compilation) -> str:
    """Hash of all that a variant's machine code depends on: what the preprocessor leaves of its source, and clang's
    options."""
    preprocessed = _run_clang(variant, source(variant.kind, variant.arch), ("-E", "-P")).decode().split()
    options = [option for option in _options(variant) if not option.startswith("-D")]
    return hashlib.sha256(" ".join([*options, *preprocessed]).encode()).hexdigest()


def compiled(variant: Compilation) -> bytes:
    """A variant's code object, from ``build/amd`` if it is cached."""
    path = BUILD / f"{code_hash(variant)[:32]}-{amd_geometry.compile_target(variant.arch)}.co"
    if not path.exists():
        image = compile_variant(variant)
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(image)
        unfinished.replace(path)
    return path.read_bytes()


def machine_code(variant: Compilation) -> bytes:
    """A variant's code object: the one that ships, if this clang made it from this source."""
    is_ours = prebuilt.amd_manifest().get("clang") == version(compiler() or "")
    return (is_ours and prebuilt.find(variant)) or compiled(variant)


_COUNTS = (".vgpr_count", ".sgpr_count", ".private_segment_fixed_size", ".group_segment_fixed_size")


@dataclass(frozen=True)
class Facts:
    """The needs of one function: registers, bytes of scratch of a lane, shared memory of a block in bytes."""

    name: str
    vector: int
    scalar: int
    scratch: int
    shared: int


def facts(code: bytes) -> list[Facts]:
    """The facts of every function of a code object, as llvm-readelf shows its metadata."""
    readelf = shutil.which(f"llvm-readelf-{CLANG}") or "llvm-readelf"
    notes = subprocess.run([readelf, "--notes", "-"], input=code, capture_output=True, check=True).stdout.decode()
    kernels = [dict(re.findall(r"^    (\.\w+): +(\S+)$", part, re.MULTILINE)) for part in notes.split("\n  - ")[1:]]
    return [Facts(k[".name"], *(int(k[name]) for name in _COUNTS)) for k in kernels if ".name" in k]


def waves(arch: str, vector: int, shared: int, threads: int) -> int:
    """Waves that a SIMD holds of a kernel with this many vector registers, shared bytes and threads of a block; 0 = its
    block does not fit. GCN: a compute unit of four SIMDs with 256 registers per lane and 64 KiB; RDNA: a workgroup
    processor of four with 1,024 and 128 KiB (AMD's ISA documents, "Vega" and "RDNA 2")."""
    of_block = -(-threads // wave_size(arch))
    if wave_size(arch) == 64:
        by_registers, memory = min(10, 256 // max(4, -(-vector // 4) * 4)), 64 << 10
    else:
        step, most = (8, 20) if arch.startswith("gfx101") else (16, 16)
        by_registers, memory = min(most, 1024 // max(step, -(-vector // step) * step)), 128 << 10
    if shared > amd_geometry.LDS_BYTES:
        return 0
    blocks = min(4 * by_registers // of_block, memory // max(1, shared))
    return blocks * of_block // 4 if blocks * of_block >= 4 else min(1, blocks)


def cell(variant: AnyVariant, found: list[Facts]) -> str:
    ordered = sorted(found, key=lambda f: variant.functions.index(f.name))
    main = next(f for f in ordered if f.name not in ("pa_combine", "pa_capped_combine", "pa_delta"))
    words = "/".join(f"{f.vector}!{f.scratch}" if f.scratch else str(f.vector) for f in ordered)
    held = waves(variant.arch, main.vector, main.shared, variant.threads)
    return f"{variant.arch}:{words}:{main.scalar}:{main.shared}:{held}"


@dataclass(frozen=True)
class Cell:
    """The figures of a cell, see :func:`cell`. functions: (vector registers, bytes of scratch) of each."""

    functions: list[tuple[int, int]]
    scalar: int
    shared: int
    waves: int


def read_cell(text: str) -> Cell:
    _, words, *rest = text.split(":")
    pairs = (word.partition("!") for word in words.split("/"))
    return Cell([(int(registers), int(scratch or 0)) for registers, _, scratch in pairs], *map(int, rest))


def table_variants(arch: str) -> list[AnyVariant]:
    """The variants of an architecture in the table: what ships, all of 8 bits, and of every other kind, at some
    head_dims, the one that takes the most registers. That one is padded and has a float mask; it is in float32,
    and for pairs also in float16."""
    hardest = [
        variant
        for variant in amd_variants(arch)
        if variant.padded
        and variant.mask == "float"
        and variant.head_dim in HARDEST
        and (variant.dtype == "float32" or variant.lift > 1)
    ]
    int8 = (variant for variant in amd_variants(arch) if variant.kind == "int8")
    return list(dict.fromkeys((*prebuilt.amd_variants(arch), *hardest, *int8)))


def digests(variants: Iterable[Compilation]) -> str:
    """Hash of the source and the macros of variants."""
    return hashlib.sha256("".join(map(digest, variants)).encode()).hexdigest()[:12]


def made_from() -> dict[str, str]:
    """Architecture -> hash of what its cells should be made from."""
    return {arch: digests(table_variants(arch)) for arch in ARCHS}


def read_made_from() -> dict[str, str]:
    """Architecture -> hash of what its cells were made from."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    words = next((line.split()[3:] for line in lines if line.startswith("# Made from:")), [])
    return dict(zip(words[::2], words[1::2]))


def read_table() -> dict[str, dict[str, str]]:
    """Variant, without the architecture -> architecture -> its cell."""
    rows: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if not line.startswith("#"):
            name, *cells = line.split()
            rows[name] = {c.split(":")[0]: c for c in cells}
    return rows


def row_name(variant: Compilation) -> str:
    """Name of a variant without the architecture."""
    return variant.name.removesuffix(f"-{variant.arch}")


def write_table(archs: Iterable[str], workers: int) -> None:
    """Update the table for some architectures; the cells of the others stay."""
    rows, hashes = read_table(), read_made_from()
    jobs = [variant for arch in archs for variant in table_variants(arch)]
    with ProcessPoolExecutor(workers) as pool:
        for variant, text in zip(jobs, pool.map(_table_cell, jobs, chunksize=4)):
            rows.setdefault(row_name(variant), {})[variant.arch] = text
    order = dict.fromkeys(
        row_name(variant) for arch in ARCHS for variant in (*amd_variants(arch), *gguf_linear_variants(arch))
    )
    lines = [
        " ".join([name, *(rows[name][arch] for arch in ARCHS if arch in rows[name])]) for name in order if name in rows
    ]
    hashes |= {arch: digests(table_variants(arch)) for arch in archs}
    words = " ".join(f"{arch} {hashes[arch]}" for arch in ARCHS if arch in hashes)
    TABLE.write_text(_HEAD.format(CLANG, words) + "\n".join(lines) + "\n")


def _table_cell(variant: AnyVariant) -> str:
    return cell(variant, _facts_of(variant))


def packs_of(archs: Iterable[str], code_of: Callable[[Compilation], bytes | None]) -> dict[str, executed.Pack]:
    """The packs of architectures by their file names."""
    packs: dict[str, executed.Pack] = {}
    for arch in archs:
        for variant in prebuilt.amd_variants(arch):
            packs.setdefault(prebuilt.pack_name(variant), {})[variant] = code_of(variant) or b""
    return packs


def write_prebuilt(workers: int) -> None:
    """Write the packs that ship with the package, and their manifest, once all that is new was executed and right."""
    folder = prebuilt.FOLDER
    variants = [variant for arch in ARCHS for variant in prebuilt.amd_variants(arch)]
    with ProcessPoolExecutor(workers) as pool:
        contents = packs_of(ARCHS, dict(zip(variants, pool.map(machine_code, variants, chunksize=4))).get)
    executed.check(executed.not_shipped(contents, folder, "amd.json"), workers)
    for old in folder.glob("gfx*.xz"):
        old.unlink()
    packs = {name: executed.write(folder / name, content) for name, content in contents.items()}
    path = compiler()
    assert path is not None
    manifest = {"clang": version(path), "digests": {v.name: digest(v) for v in variants}, "packs": packs}
    (folder / "amd.json").write_text(json.dumps(manifest, separators=(",", ":")) + "\n")
    print(f"{len(variants)} code objects, {sum((folder / name).stat().st_size for name in packs):,} bytes")


def with_scratch(archs: Iterable[str], workers: int | None) -> Iterator[tuple[Variant, list[Facts]]]:
    """The variants that have scratch, among all."""
    variants = [variant for arch in archs for variant in amd_variants(arch)]
    with ProcessPoolExecutor(workers) as pool:
        for variant, found in zip(variants, pool.map(_facts_of, variants, chunksize=4)):
            if any(function.scratch for function in found):
                yield variant, found


def _facts_of(variant: Compilation) -> list[Facts]:
    return facts(machine_code(variant))


def by_hiprtc(archs: Iterable[str]) -> Iterator[tuple[Variant, list[Facts]]]:
    """The variants that ship, as HIPRTC compiles them."""
    from pascal_attn_core.fused.gpu.hip import hip_compiler

    library = hip_compiler() or sys.exit("HIPRTC must be installed (Debian: libamdhip64-5)")
    for arch in archs:
        for variant in prebuilt.amd_variants(arch):
            target = amd_geometry.compile_target(arch)
            text = source(variant.kind, variant.arch)
            yield variant, facts(library.compile(text, target, variant.macros(), amd_geometry.options(arch)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["table", "prebuilt", "executed", "scratch", "hiprtc"])
    parser.add_argument("--archs", nargs="*", default=list(ARCHS), choices=ARCHS, help="which; prebuilt: always all")
    parser.add_argument("--workers", type=int, help="processes; as many as there are processors")
    arguments = parser.parse_args()
    if arguments.what == "table":
        write_table(arguments.archs, arguments.workers)
    elif arguments.what == "prebuilt":
        write_prebuilt(arguments.workers)
    elif arguments.what == "executed":
        executed.check(packs_of(arguments.archs, prebuilt.find), arguments.workers)
    elif arguments.what == "scratch":
        count = 0
        for variant, found in with_scratch(arguments.archs, arguments.workers):
            print(variant.name, cell(variant, found), flush=True)
            count += 1
        print(f"{count} of {sum(1 for arch in arguments.archs for _ in amd_variants(arch)):,} variants have scratch")
        sys.exit(count > 0)
    else:
        for variant, found in by_hiprtc(arguments.archs):
            print(variant.name, cell(variant, found), flush=True)


if __name__ == "__main__":
    main()
