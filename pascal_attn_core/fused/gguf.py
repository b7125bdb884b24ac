"""Blocks of GGUF files expanded by a kernel, on NVIDIA's devices: exact, the definition is
:mod:`..reference.gguf_blocks`. And multiplied by rows in 8 bits, on those with dp4a and on AMD's with v_dot4_i32_i8:
not exact, opt-in, the definition is ``launch/gguf_definition``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..machine.runtime import Runtime, runtime_of
from .code.compilation import Compilation
from .code.gguf_source import KERNELS, PRODUCT_FORMATS
from .code.linear_source import LEAST_CAPABILITY
from .code.source import digest_of, gguf_variants
from .geometry.amd import has_dots
from .launch.gguf import (
    DTYPES,
    FEW,
    ExpandCall,
    GgufLinearCall,
    expand_launches,
    gguf_linear_launches,
    variant_of,
    variants_of,
)
from .trust.kernels import Kernels
from .trust.trial import Trials

__all__ = ["ExpandCall", "GgufLinearCall", "run_expand", "run_product", "why_no_product", "why_not"]


class GgufTrials(Trials):
    """Trials of these kernels: their verdict leaves attention as it is."""

    file, words = "trial-gguf", "the kernel for GGUF weights"

    def others(self) -> list[Compilation]:
        return []

    def kernels_digest(self) -> str:
        return digest_of(gguf_variants(self.runtime.part(Kernels).variant_arch))


def why_not(device: torch.device, name: str, arithmetic: torch.dtype, out: torch.dtype) -> str:
    """Why the kernels cannot expand blocks of a format on a device; "" = they can. The first question on a machine
    starts a child process that tries them, some seconds, as for attention.

    Args:
        name: of the format; arithmetic: its dtype; out: the dtype of the weights.
    """
    runtime = runtime_of(device)
    if runtime.info.kind != "cuda":
        return f"the kernel for GGUF weights needs a CUDA device, got {runtime.info.kind}"
    if name not in KERNELS or arithmetic not in DTYPES or out not in DTYPES:
        return f"the kernel for GGUF weights does not expand {name} by {arithmetic} to {out}"
    return _why_not(runtime, [variant_of(arithmetic)])


def why_no_product(device: torch.device, name: str, rows: int, shape: int) -> str:
    """Why the kernels cannot multiply blocks of a format on a device; "" = they can. It is asked as :func:`why_not` is.

    Args:
        name: of the format; rows: of x; shape: rows of the outputs of a thread, 8 or 4.
    """
    runtime = runtime_of(device)
    info, arch = runtime.info, runtime.part(Kernels).variant_arch
    capability = info.capability or (0, 0)
    if not (has_dots(arch) if arch else info.kind == "cuda" and capability >= LEAST_CAPABILITY):
        return f"the 8-bit kernel for GGUF weights needs a GPU with products of four bytes, got {info.name}"
    variants = variants_of(name, shape, arch)
    if name not in PRODUCT_FORMATS or not (arch or all(each.runs_on(capability) for each in variants)):
        return f"the 8-bit kernel for GGUF weights does not multiply {name} by {shape} rows on {info.name}"
    if shape != 8 and rows <= FEW["pa_gguf_some"].rows:
        return f"the 8-bit kernel for GGUF weights has one shape for {rows} rows"
    return _why_not(runtime, variants)


def _why_not(runtime: Runtime, variants: Sequence[Compilation]) -> str:
    reasons = runtime.part(Kernels).reasons(variants)
    if reasons:
        return reasons[0]
    why = runtime.part(GgufTrials).reason(variants)
    return why and f"the kernel for GGUF weights is left off: {why}"


def run_expand(call: ExpandCall) -> None:
    """Queue what :func:`why_not` has nothing against, on the current stream of its device; the first call of a dtype on
    a device is checked against the definition before. No extra memory.

    Raises:
        KernelUnavailable: the kernel cannot be loaded or launched, or gives wrong answers here.
        DriverError: the process can no longer use the device.
    """
    kernels = runtime_of(call.blocks.device).part(Kernels)
    kernels.ensure([variant_of(call.arithmetic)])
    kernels.run(expand_launches(call))


def run_product(call: GgufLinearCall, shape: int) -> None:
    """Queue what :func:`why_no_product` has nothing against, as :func:`run_expand` does. Extra memory: x in 8 bits with
    its scales, at most 72 MiB."""
    runtime = runtime_of(call.x.device)
    kernels = runtime.part(Kernels)
    kernels.ensure(variants_of(call.format, shape, kernels.variant_arch))
    kernels.run(gguf_linear_launches(call, shape, arch=kernels.variant_arch))
