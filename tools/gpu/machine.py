"""``python -m tools.gpu.machine``: the facts that results hold for, as one line of JSON."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

from pascal_attn_core.cli.bench.contest import versions
from pascal_attn_core.fused.code.source import kernels_digest
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.facts import ask_driver, torch_build
from pascal_attn_core.machine.runtime import runtime_of

from .variants import must_compile, variants_of


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
        "memory_mib": info.total_bytes >> 20,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    print(json.dumps(facts(torch.device(options.device))))


if __name__ == "__main__":
    main()
