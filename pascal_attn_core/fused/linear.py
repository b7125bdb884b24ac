"""Linear layers in 8-bit integers by dp4a, on NVIDIA's devices of compute capability 6.1 and from 7.0 on. Not exact:
opt-in. What it computes is at the head of ``cuda/int8_linear.cu``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..machine.runtime import runtime_of
from .code.compilation import Compilation
from .code.linear_source import LEAST_CAPABILITY, MOST_COLUMNS, ROTATIONS
from .code.source import digest_of, linear_variants
from .launch.linear import ACTIVATIONS, LinearCall, linear_launches, variants_of
from .trust.kernels import Kernels
from .trust.trial import Trials

__all__ = ["ACTIVATIONS", "LinearCall", "run_linear", "why_not"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LinearTrials(Trials):
    """Trials of the kernels for linear layers: their verdict leaves attention as it is."""

    file, words = "trial-linear", "the int8 linear kernel"

    def others(self) -> list[Compilation]:
        return list(linear_variants())

    def kernels_digest(self) -> str:
        return digest_of(linear_variants())


def why_not(
    device: torch.device,
    *,
    columns: int,
    rotation: int = 0,
    dtypes: Iterable[torch.dtype] = (torch.float16,),
    untried: bool = False,
) -> list[str]:
    """Why the kernels cannot take linear layers on a device, one sentence each; empty = they can.

    The first question on a machine starts a child process that tries them, some seconds, as for attention.

    Args:
        columns: of x and of the weight: K.
        rotation: of the weight.
        dtypes: of x and of the output.
        untried: do not ask for that trial.
    """
    runtime, kinds = runtime_of(device), tuple(dtypes)
    if runtime.info.kind != "cuda":
        return [f"the int8 linear kernel needs a CUDA device, got {runtime.info.kind}"]
    capability = runtime.info.capability
    if capability is None or capability < LEAST_CAPABILITY:
        found = "an unknown one" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        return [f"the int8 linear kernel needs dp4a, compute capability 6.1 or newer; {found} has none"]
    reasons = _layer_reasons(columns, rotation, kinds)
    if reasons:
        return reasons
    variants = list(dict.fromkeys(variant for dtype in kinds for variant in variants_of(dtype, dtype)))
    reasons = runtime.part(Kernels).reasons(variants)
    if not reasons and not untried and (why := runtime.part(LinearTrials).reason(variants)):
        reasons = [f"the int8 linear kernel is left off: {why}"]
    return reasons


def _layer_reasons(columns: int, rotation: int, dtypes: Iterable[torch.dtype]) -> list[str]:
    reasons = []
    if columns % 4 or not 0 < columns <= MOST_COLUMNS:
        reasons.append(f"columns must be a multiple of 4, at most {MOST_COLUMNS}, got {columns}")
    if rotation not in ROTATIONS:
        reasons.append(f"the int8 linear kernel rotates groups of {ROTATIONS[1:]}, got {rotation}")
    kinds = [dtype for dtype in dtypes if dtype not in DTYPES]
    return reasons + [f"the int8 linear kernel takes float32, float16 and bfloat16, got {dtype}" for dtype in kinds]


def run_linear(call: LinearCall) -> None:
    """Queue a linear layer that :func:`why_not` has nothing against, on the current stream of its device; the first one
    of a dtype on a device is checked against the definition before.

    Extra memory: x in 8 bits and four bytes for each of its rows, at most 64 MiB.

    Raises:
        KernelUnavailable: a kernel cannot be loaded or launched, or gives wrong answers here. What was queued before
            writes only the output.
        DriverError: the process can no longer use the device.
    """
    runtime = runtime_of(call.x.device)
    kernels = runtime.part(Kernels)
    kernels.ensure(dict.fromkeys(variants_of(call.x.dtype, call.out.dtype)))
    kernels.run(linear_launches(call, runtime.info.num_sms))
