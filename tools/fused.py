"""Compiles the fused kernels without a GPU, for every architecture: ``python tools/fused.py table | prebuilt | share``.
``executed``: executes the machine code that ships on this CPU. ``prebuilt`` does so with what is new before it writes.

Needs g++ and the test extra (NVRTC 12.6 as a wheel). Results are cached in ``build/fused`` by the hash of their
preprocessed source and of the compiler's options, so that a second run only compiles what has changed. ``--since HEAD``
takes what has not changed since that commit from its table and its cubins. Parameters that a kernel does not
read change its cubin, but no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import executed  # noqa: E402
from earlier import Earlier, checked_out, code_hash  # noqa: E402

from pascal_attn_core.fused.code import prebuilt  # noqa: E402
from pascal_attn_core.fused.code.compilation import Compilation  # noqa: E402
from pascal_attn_core.fused.code.kinds import ALL_KINDS  # noqa: E402
from pascal_attn_core.fused.code.source import (  # noqa: E402
    Variant,
    all_variants,
    digest,
    gguf_linear_variants,
    gguf_variants,
    linear_variants,
    source,
)
from pascal_attn_core.fused.geometry.plain import INT8_HEAD_DIMS  # noqa: E402
from pascal_attn_core.fused.gpu import nvrtc as _nvrtc  # noqa: E402
from pascal_attn_core.fused.gpu.nvrtc import usage  # noqa: E402
from tools.models.shares import (  # noqa: E402
    BACKWARD_PRODUCTS,
    KERNELS,
    backward_share,
    gguf_share,
    linear_share,
    packing,
    share,
)

BUILD = ROOT / "build" / "fused"
TABLE = ROOT / "docs" / "fused-static.txt"
ARCHS = (50, 60, 61, 70, 75, 80, 90)
NVRTC = (12, 6)
_HEAD = """\
# What ptxas says of every variant of the fused kernels, by NVRTC {}.{}: architecture, then for each function registers
# per thread (spilled bytes after "!"), then shared memory of a block in bytes. Written by: python tools/fused.py table
# Made from: {}
"""


def every_variant() -> Iterator[Compilation]:
    """Every variant of attention, then of linear layers and of GGUF weights."""
    yield from all_variants()
    yield from linear_variants()
    yield from gguf_variants()


def archs_of(variant: Compilation) -> list[int]:
    """The architectures that a variant is for. Newer cards take the kernels on tensor cores by name only, compiled when
    they do; scores with a cap, and sinks, are looked at on one architecture, since they leave the products as they
    are."""
    if variant.traits.is_capped and not variant.on_tensor_cores:
        return [61] if variant.kind == "capped" and variant.dtype != "bfloat16" else []
    newest = 75 if variant.on_tensor_cores else ARCHS[-1]
    return [arch for arch in ARCHS if arch <= newest and variant.runs_on(divmod(arch, 10))]


def nvrtc(arch: int) -> _nvrtc.Nvrtc:
    """The NVRTC library that makes the table and the prebuilt cubins."""
    found = [
        lib for lib in _nvrtc.loaded(_nvrtc.Nvrtc, _nvrtc.candidates()) if lib.version == NVRTC and arch in lib.archs()
    ]
    if not found:
        sys.exit(f"NVRTC {NVRTC[0]}.{NVRTC[1]} must be installed: pip install -e '.[test]'")
    return found[0]


def compiled(variant: Compilation, arch: int) -> _nvrtc.Compiled:
    """The variant's machine code and the compiler's log, from ``build/fused`` if they are cached."""
    stem = BUILD / f"{code_hash(variant)[:32]}-sm_{arch}"
    cubin, log = stem.with_suffix(".cubin"), stem.with_suffix(".log")
    if not log.exists():
        result = nvrtc(arch).compile(source(variant.kind), arch, variant.macros())
        BUILD.mkdir(parents=True, exist_ok=True)
        for path, content in ((cubin, result.cubin), (log, result.log.encode())):  # the log last: both are there
            unfinished = path.with_name(f"{path.name}-{os.getpid()}")
            unfinished.write_bytes(content)
            unfinished.replace(path)
    return _nvrtc.Compiled(cubin.read_bytes(), log.read_text())


def cell(arch: int, log: str) -> str:
    functions, shared = usage(log)
    words = "/".join(f"{registers}!{spilled}" if spilled else str(registers) for registers, spilled in functions)
    return f"{arch}:{words}:{shared}"


def read_cell(text: str) -> tuple[list[tuple[int, int]], int]:
    """The figures of :func:`usage` that a cell holds."""
    _, words, shared = text.split(":")
    pairs = (word.partition("!") for word in words.split("/"))
    return [(int(registers), int(spilled or 0)) for registers, _, spilled in pairs], int(shared)


def digests(
    digest_of: Callable[[Compilation], str] = digest, variants: Iterable[Compilation] | None = None
) -> dict[str, str]:
    """Kind of kernel -> hash of the source and the macros of all its variants. Of these; None = today's."""
    texts: dict[str, str] = {}
    for variant in every_variant() if variants is None else variants:
        texts[variant.kind] = texts.get(variant.kind, "") + digest_of(variant)
    return {kind: hashlib.sha256(text.encode()).hexdigest()[:12] for kind, text in texts.items()}


def read_digests(text: str | None = None) -> dict[str, str]:
    """The hashes that the table (or the text of another one) was made from; kinds that were only updated in part are
    missing."""
    lines = _table_text(text).splitlines()
    words = next((line.split()[3:] for line in lines if line.startswith("# Made from:")), [])
    return dict(zip(words[::2], words[1::2]))


def _table_text(text: str | None) -> str:
    return TABLE.read_text() if text is None else text


def read_table(text: str | None = None) -> dict[str, dict[int, str]]:
    """Variant -> architecture -> its cell; of the table as it is, or of the text of another one."""
    rows: dict[str, dict[int, str]] = {}
    for line in _table_text(text).splitlines():
        if not line.startswith("#"):
            name, *cells = line.split()
            rows[name] = {int(c.split(":")[0]): c for c in cells}
    return rows


def write_table(archs: Iterable[int], kinds: Iterable[str], earlier: Earlier | None) -> None:
    """Update the table for some architectures and kinds of kernels; the other cells stay."""
    rows = read_table()
    known = read_table(earlier.table) if earlier else {}
    jobs = []
    for variant in (each for each in every_variant() if each.kind in kinds):
        same = known.get(variant.name, {}) if earlier and earlier.has(variant, what_is_read=True) else {}
        for arch in archs_of(variant):
            if arch in archs and arch in same:
                rows.setdefault(variant.name, {})[arch] = same[arch]
            elif arch in archs:
                jobs.append((variant, arch))
    print(f"{len(jobs)} to compile")
    with ProcessPoolExecutor() as pool:
        for (variant, arch), text in zip(jobs, pool.map(_table_cell, jobs, chunksize=4)):
            rows.setdefault(variant.name, {})[arch] = text
    lines = [
        " ".join([variant.name, *(rows[variant.name][arch] for arch in sorted(rows[variant.name]))])
        for variant in every_variant()
        if variant.name in rows
    ]
    made_from = {kind: found for kind, found in read_digests().items() if kind not in kinds}
    if set(archs) == set(ARCHS):
        made_from |= {kind: found for kind, found in digests().items() if kind in kinds}
    words = " ".join(f"{kind} {made_from[kind]}" for kind in ALL_KINDS if kind in made_from)
    TABLE.write_text(_HEAD.format(*NVRTC, words) + "\n".join(lines) + "\n")


def _table_cell(job: tuple[Compilation, int]) -> str:
    variant, arch = job
    return cell(arch, compiled(variant, arch).log)


def packs_of(archs: Iterable[int], code_of: Callable[[Compilation, int], bytes | None]) -> dict[str, executed.Pack]:
    """The packs of architectures by their file names."""
    return {
        prebuilt.pack_name(variants[0], arch): {variant: code_of(variant, arch) or b"" for variant in variants}
        for arch, variants in prebuilt.packs()
        if arch in archs
    }


def write_prebuilt(archs: Iterable[int], earlier: Earlier | None) -> None:
    """Write the packs that ship with the package, and their manifest, once all that is new was executed and right."""

    def cubin(variant: Compilation, arch: int) -> bytes:
        return (earlier and earlier.cubin(variant, arch)) or compiled(variant, arch).cubin

    folder, contents = prebuilt.FOLDER, packs_of(archs, cubin)
    executed.check(executed.not_shipped(contents, folder, "manifest.json"))
    folder.mkdir(exist_ok=True)
    for old in folder.glob("sm_*.xz"):
        old.unlink()
    packs = {name: executed.write(folder / name, content) for name, content in contents.items()}
    digests = {variant.name: digest(variant) for variant in prebuilt.all_variants()}
    content_ = {"nvrtc": list(NVRTC), "digests": digests, "packs": packs}
    (folder / "manifest.json").write_text(json.dumps(content_, separators=(",", ":")) + "\n")


def shares() -> Iterator[tuple[str, int, str, float]]:
    """(kind, head_dim, dtype, share on sm_61) for calls without a mask; kind "backward": both gradient kernels."""
    found: dict[tuple[str, int, str], float] = {}
    for variant in all_variants():
        if variant.kind in KERNELS and variant.mask == "none" and not variant.padded:
            found[variant.kind, variant.head_dim, variant.dtype] = share(variant, compiled(variant, 61).cubin).value
    for (kind, head_dim, dtype), value in list(found.items()):
        if kind == "grad_query":
            found["backward", head_dim, dtype] = backward_share(value, found["grad_key_value", head_dim, dtype])
    yield from ((*key, value) for key, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["table", "prebuilt", "share", "executed"])
    parser.add_argument("--archs", type=int, nargs="*", default=list(ARCHS), help="which (share: always sm_61)")
    parser.add_argument("--kinds", nargs="*", default=ALL_KINDS, choices=ALL_KINDS, help="for table: which kernels")
    parser.add_argument("--since", metavar="COMMIT", help="compile only what has changed since this commit")
    arguments = parser.parse_args()
    with checked_out(arguments.since) if arguments.since else contextlib.nullcontext() as earlier:
        run(arguments, earlier)


def run(arguments: argparse.Namespace, earlier: Earlier | None) -> None:
    if earlier and read_digests(earlier.table) != digests(earlier.digest, earlier.variants()):
        sys.exit(f"{arguments.since}: its table was not made from its source")
    if arguments.what == "table":
        write_table(arguments.archs, arguments.kinds, earlier)
    elif arguments.what == "prebuilt":
        write_prebuilt(arguments.archs, earlier)
    elif arguments.what == "executed":
        executed.check(packs_of(arguments.archs, prebuilt.load))
    else:
        print("kind           head_dim dtype    share")
        for kind, head_dim, dtype, value in shares():
            print(f"{kind:14} {head_dim:8} {dtype:8} {value:5.1%}")
        for variant in (Variant("int8", head_dim, "float32") for head_dim in INT8_HEAD_DIMS):
            of_float = replace(variant, kind="forward")
            counted = [share(each, compiled(each, 61).cubin).per_score for each in (variant, of_float)]
            print(f"head_dim {variant.head_dim}: {counted[0]:.1f} instructions per score, in float32 {counted[1]:.1f}")
            beside = packing(variant, compiled(variant, 61).cubin) / counted[0]
            print(f"   packing a token: as many as {beside:.0f} scores, {beside / 4096:.1%} of a call of 4,096 tokens")
        made = sum(KERNELS[kind].products for kind in ("grad_query", "grad_key_value"))
        print("linear layer in 8 bits, K = N, of whole tiles: the product, and with rounding")
        for size in (1024, 3072):
            print(f"{size:25} " + " ".join(f"{value:5.1%}" for value in linear_share(nvrtc(61), size, size)))
        print("GGUF weights, x in 8 bits: dp4a in the main loop, and float32 instructions for its")
        for variant in gguf_linear_variants():
            dp4a, gain = gguf_share(compiled(variant, 61).cubin)
            print(f"{variant.name:25} {dp4a:5.1%} {gain:4.2f} times")
        print(f"backward: both gradient kernels, {BACKWARD_PRODUCTS} products needed of the {made} that they make")


if __name__ == "__main__":
    main()
