"""Blocks of GGUF files expanded by a kernel, on NVIDIA's devices. Exact: the definition is :mod:`..gguf_blocks`."""

from __future__ import annotations

import functools
import hashlib

import torch

from ..machine.runtime import runtime_of
from .code.compilation import Compilation
from .code.gguf_source import KERNELS
from .code.source import digest, gguf_variants
from .launch.gguf import DTYPES, ExpandCall, expand_launches, variant_of
from .trust.kernels import Kernels
from .trust.trial import Trials

__all__ = ["ExpandCall", "gguf_digest", "run_expand", "why_not"]


@functools.cache
def gguf_digest() -> str:
    """Hash of these kernels: another one, and what was found out of them no longer holds."""
    return hashlib.sha256("".join(map(digest, gguf_variants())).encode()).hexdigest()[:16]


class GgufTrials(Trials):
    """Trials of these kernels: their verdict leaves attention as it is."""

    file, words = "trial-gguf", "the kernel for GGUF weights"

    def others(self) -> list[Compilation]:
        return []

    def kernels_digest(self) -> str:
        return gguf_digest()


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
    variants = [variant_of(arithmetic)]
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
