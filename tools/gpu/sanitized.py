"""``python -m tools.gpu.sanitized``: a kernel of each kind on a small call, to be run under compute-sanitizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from pascal_attn_core.fused.code.source import KINDS, Variant, gguf_linear_variants, linear_variants
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import runtime_of

# Each kernel and each way to read a mask, on geometries that ship; padding; every dtype.
VARIANTS = (
    Variant("forward", 64, "float32"),
    Variant("forward", 128, "float16", "bool"),
    Variant("forward", 40, "bfloat16", "float", padded=True),
    Variant("split", 64, "float32"),
    Variant("grad_query", 64, "float32"),
    Variant("grad_key_value", 64, "float32"),
    Variant("grad_all", 64, "float32"),
    Variant("grad_all", 128, "float16"),
    Variant("int8", 64, "float16"),
    Variant("int8", 128, "float32", "bool"),
    linear_variants()[1],
    *gguf_linear_variants()[:2],
    # On tensor cores, where the card has some.
    *(Variant(kind, 64, "float16") for kind in KINDS if kind.startswith(("volta", "tensor"))),
    Variant("tensor", 128, "float16", "bool", padded=True),
    Variant("tensor_grad_key_value", 64, "float16", "bool"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """1: a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=int, default=len(VARIANTS), help="kernels, from the first on")
    options = parser.parse_args(arguments)
    kernels = runtime_of(torch.device(options.device)).part(Kernels)
    if kernels.machine_reasons:
        print("; ".join(kernels.machine_reasons))
        return 2
    variants = [v for v in VARIANTS if v.runs_on(kernels.info.capability or (0, 0))]
    wrong = 0
    for variant in variants[: options.most]:
        error = kernels.largest_error(variant)
        is_right = error <= verify.tolerance(variant)
        wrong += not is_right
        print(f"{variant.name}: {error:.1e}{'' if is_right else ', which is wrong'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
