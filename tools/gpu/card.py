"""``python -m tools.gpu.card``: the facts of a card that results hold for, as one line of JSON; with ``--told``, its
kernels against their definition, in a process that any of them may end."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pascal_attn_core.cli.bench.contest import versions
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import (
    all_variants,
    amd_variants,
    gguf_variants,
    kernels_digest,
    linear_variants,
)
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.device import MIB
from pascal_attn_core.machine.facts import ask_driver, torch_build
from pascal_attn_core.machine.runtime import runtime_of

from . import told

# Seconds after which a kernel hangs: while its code is had, which may mean to compile it, and then to run it.
_LIMIT_OF_CODE, _LIMIT = 300, 30


def variants_of(kernels: Kernels) -> list[Compilation]:
    """Every variant that is for a device."""
    if kernels.variant_arch:
        return [*amd_variants(kernels.variant_arch), *gguf_variants(kernels.variant_arch)]
    every = *all_variants(), *linear_variants(), *gguf_variants()
    return [variant for variant in every if variant.runs_on(kernels.info.capability or (0, 0))]


def must_compile(kernels: Kernels, variant: Compilation) -> bool:
    """Whether the machine code of a variant neither ships nor is on disk."""
    return kernels.existing_code(variant)[0] is None


def facts(device: torch.device) -> dict[str, Any]:
    """``card``, ``versions``, and how many ``kernels`` there are for it, plain values.

    Raises:
        RuntimeError, AssertionError: torch cannot use the device.
    """
    torch.empty(0, device=device)
    info, build = runtime_of(device).info, torch_build()
    kernels = runtime_of(device).part(Kernels)
    found = None if kernels.machine_reasons else kernels.gpu.compiler_version(kernels.arch)
    variants = [] if kernels.machine_reasons else variants_of(kernels)
    card = {
        "name": info.name,
        "kind": info.kind,
        "arch": info.arch,
        "capability": info.capability and list(info.capability),
        "num_sms": info.num_sms,
        "memory_mib": info.total_bytes // MIB,
    }
    others = {
        "cuda": build.toolkit,
        "driver": ask_driver() if info.kind == "cuda" else "",
        "nvrtc": "" if found is None else ".".join(map(str, found)),  # AMD: HIPRTC
        "system": platform.platform(),
        "kernels": kernels_digest(kernels.variant_arch),
    }
    counts = {"all": len(variants), "to_compile": sum(must_compile(kernels, variant) for variant in variants)}
    return {"card": card, "versions": {**versions(), **others}, "kernels": counts}


def check(kernels: Kernels, variant: Compilation, teller: told.Teller, limit: float) -> None:
    """Run one variant and tell how it ended, after so many seconds that it hangs; what is raised behind that has taken
    the card away, or may have."""
    began = time.monotonic()
    line: dict[str, Any] = {"test": variant.name, "outcome": "failed"}
    try:
        teller.begin(variant.name, _LIMIT_OF_CODE)
        kernels.functions(variant)
        teller.begin(variant.name, limit)
        error = kernels.largest_error(variant) / verify.tolerance(variant)
    except Exception as reason:
        teller.tell(**line, seconds=time.monotonic() - began, message=f"{type(reason).__name__}: {reason}")
        if isinstance(reason, KernelUnavailable):
            return
        raise
    if error <= 1:
        line["outcome"] = "passed"
    else:
        line["message"] = f"wrong: {error:.2g} times the error that is allowed"
    known = {"error": round(error, 3)} if math.isfinite(error) else {}
    teller.tell(**line, **known, seconds=round(time.monotonic() - began, 3))


def main(arguments: Sequence[str] | None = None) -> int:
    """2: there are no kernels for this device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--told", type=Path, metavar="FOLDER", help="see tools/gpu/told.py")
    parser.add_argument("--names", default="*", help="of kernels: patterns, comma-separated")
    parser.add_argument("--share", default="1/1", help="2/5: the second of five processes")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds after which a kernel hangs")
    options = parser.parse_args(arguments)
    if options.told is None:
        print(json.dumps(facts(torch.device(options.device))))
        return 0
    kernels = runtime_of(torch.device(options.device)).part(Kernels)
    if kernels.machine_reasons:
        print("; ".join(kernels.machine_reasons))
        return 2
    number, count = map(int, options.share.split("/"))
    patterns, known = options.names.split(","), told.read(options.told).ended
    wanted = [v for v in variants_of(kernels) if any(fnmatch.fnmatchcase(v.name, each) for each in patterns)]
    mine = [variant for variant in wanted[number - 1 :: count] if variant.name not in known]
    teller = told.Teller(options.told, f"share-{number}")
    teller.tell(collected=len(wanted))
    with torch.no_grad():
        for variant in sorted(mine, key=lambda variant: must_compile(kernels, variant)):
            print(variant.name, flush=True)
            check(kernels, variant, teller, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
