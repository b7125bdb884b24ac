"""Machine code is executed on a CPU before it ships: each variant on the call with which a card checks a kernel before
its first use."""

from __future__ import annotations

import itertools
import json
import lzma
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from attn_support.amd.code import OBJDUMP
from attn_support.fused.executed import Result, result
from attn_support.nvidia.code import NVDISASM, WANTED

from pascal_attn_core.fused.code.compilation import Compilation

Pack = dict[Compilation, bytes]  # machine code; b"": there is none of today's source


def check(packs: dict[str, Pack], workers: int | None = None) -> None:
    """Print a line for each variant of packs by their file names: pack, variant, error as a share of the tolerance,
    seconds, and what an instruction met. Exits where one was not executed, or was wrong."""
    if any(pack.startswith("sm_") for pack in packs) and NVDISASM is None:
        sys.exit(WANTED)
    if any(pack.startswith("gfx") for pack in packs) and OBJDUMP is None:
        sys.exit("llvm-objdump-16 must be installed (Debian: llvm-16)")
    missing, wrong, seconds, count = 0, 0, 0.0, 0
    with ProcessPoolExecutor(workers) as pool:
        for name, results in zip(packs, pool.map(_results, packs.values())):
            for variant, found in results:
                count += 1
                if found is None:
                    missing += 1
                    print(f"{name:24} {variant:36} not executed: it was made from another source", flush=True)
                    continue
                wrong += not found.is_right
                seconds += found.seconds
                print(f"{name:24} {variant:36} {found.error:8.2g} {found.seconds:6.1f} s {found.problem}", flush=True)
    print(f"{count} variants: {missing} not executed, {wrong} wrong; {seconds:.0f} s of one core")
    if missing or wrong:
        sys.exit(1)


def not_shipped(packs: dict[str, Pack], folder: Path, manifest: str) -> dict[str, Pack]:
    """The machine code of packs that is not in those of a folder bit by bit: that was executed before it was written,
    and all of it is each night."""
    places = json.loads((folder / manifest).read_text())["packs"] if (folder / manifest).exists() else {}

    def ships(name: str) -> dict[str, bytes]:
        content = lzma.decompress((folder / name).read_bytes()) if name in places else b""
        return {variant: content[slice(*place)] for variant, place in places.get(name, {}).items()}

    return {
        name: {variant: code for variant, code in pack.items() if code != known.get(variant.name)}
        for name, pack in packs.items()
        for known in (ships(name),)
    }


def write(path: Path, pack: Pack) -> dict[str, list[int]]:
    """Write a pack; returns where in it each variant is."""
    ends = list(itertools.accumulate(map(len, pack.values()), initial=0))
    path.write_bytes(lzma.compress(b"".join(pack.values()), preset=9 | lzma.PRESET_EXTREME))
    return {variant.name: [first, end] for variant, first, end in zip(pack, ends, ends[1:])}


def _results(pack: Pack) -> list[tuple[str, Result | None]]:
    torch.set_num_threads(1)
    return [(variant.name, result(variant, pack.__getitem__) if code else None) for variant, code in pack.items()]
