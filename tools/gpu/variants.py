"""``python -m tools.gpu.variants``: kernels of a card against their definition, in a process that any of them may
end."""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import all_variants, amd_variants, gguf_variants, linear_variants
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.runtime import runtime_of

from . import told

# Seconds after which one hangs: while its code is had, which may mean to compile it, and then to run it.
_LIMIT_OF_CODE, _LIMIT = 300, 30


def variants_of(kernels: Kernels) -> list[Compilation]:
    """Every variant that is for a device."""
    arch = kernels.variant_arch
    if arch:
        return [*amd_variants(arch), *gguf_variants(arch)]
    every = *all_variants(), *linear_variants(), *gguf_variants()
    return [variant for variant in every if variant.runs_on(kernels.info.capability or (0, 0))]


def chosen(kernels: Kernels, names: str) -> list[Compilation]:
    """Those of :func:`variants_of` that one of some patterns is for; comma-separated."""
    patterns = names.split(",")
    return [v for v in variants_of(kernels) if any(fnmatch.fnmatchcase(v.name, each) for each in patterns)]


def must_compile(kernels: Kernels, variant: Compilation) -> bool:
    """Whether the machine code of a variant neither ships nor is on disk."""
    return kernels.existing_code(variant)[0] is None


def check(kernels: Kernels, variant: Compilation, folder: Path, writer: str, limit: float) -> None:
    """Run one variant and tell how it ended, after so many seconds that it hangs; what is raised behind that has taken
    the card away, or may have."""
    began, name = time.monotonic(), variant.name

    def end(outcome: str, **line: object) -> None:
        seconds = round(time.monotonic() - began, 3)
        told.tell(folder, writer, test=name, outcome=outcome, seconds=seconds, **line)

    try:
        told.tell(folder, writer, begun=name, process=os.getpid(), limit=_LIMIT_OF_CODE)
        kernels.functions(variant)
        told.tell(folder, writer, begun=name, process=os.getpid(), limit=limit)
        error = kernels.largest_error(variant) / verify.tolerance(variant)
    except Exception as reason:
        end("failed", message=f"{type(reason).__name__}: {reason}")
        if not isinstance(reason, KernelUnavailable):
            raise
        return
    known = {"error": round(error, 3)} if math.isfinite(error) else {}
    if error <= 1:
        end("passed", **known)
    else:
        end("failed", message=f"wrong: {error:.2g} times the error that is allowed", **known)


def main(arguments: Sequence[str] | None = None) -> int:
    """2: there are no kernels for this device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--told", type=Path, required=True, metavar="FOLDER", help="see tools/gpu/told.py")
    parser.add_argument("--names", default="*", help="patterns, comma-separated")
    parser.add_argument("--share", default="1/1", help="2/5: the second of five processes")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds after which a kernel hangs")
    options = parser.parse_args(arguments)
    kernels = runtime_of(torch.device(options.device)).part(Kernels)
    if kernels.machine_reasons:
        print("; ".join(kernels.machine_reasons))
        return 2
    number, count = map(int, options.share.split("/"))
    wanted = chosen(kernels, options.names)
    writer, known = f"share-{number}", told.read(options.told).ended
    told.tell(options.told, writer, collected=len(wanted))
    mine = [variant for variant in wanted[number - 1 :: count] if variant.name not in known]
    with torch.no_grad():
        for variant in sorted(mine, key=lambda variant: must_compile(kernels, variant)):
            print(variant.name, flush=True)
            check(kernels, variant, options.told, writer, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
