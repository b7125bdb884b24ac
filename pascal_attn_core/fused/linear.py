"""Linear layers in 8-bit integers by dp4a, on NVIDIA's devices of compute capability 6.1 and from 7.0 on. Not exact:
opt-in. What it computes is at the head of ``cuda/int8_linear.cu``."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch

from ..machine.runtime import runtime_of
from .code.compilation import Compilation
from .code.linear_source import LEAST_CAPABILITY, MOST_COLUMNS, ROTATIONS
from .code.source import digest, linear_variants
from .launch.fields import UNBOUNDED
from .launch.linear import ACTIVATIONS, LinearCall, QuantizedWeight, linear_launches, variants_of
from .trust.kernels import Kernels
from .trust.trial import Trials

__all__ = ["ACTIVATIONS", "LinearCall", "QuantizedWeight", "linear_digest", "run_linear", "why_not"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def linear_digest() -> str:
    """Hash of the kernels for linear layers: another one, and what was found out of them no longer holds."""
    return hashlib.sha256("".join(map(digest, linear_variants())).encode()).hexdigest()[:16]


class LinearTrials(Trials):
    """Trials of the kernels for linear layers: their verdict leaves attention as it is."""

    file, words = "trial-linear", "the int8 linear kernel"

    def others(self) -> list[Compilation]:
        return list(linear_variants())

    def kernels_digest(self) -> str:
        return linear_digest()


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
        ValueError: shapes, dtypes or an activation that the kernels do not take, or that do not fit each other.
        KernelUnavailable: a kernel cannot be loaded or launched, or gives wrong answers here. What was queued before
            writes only the output.
        DriverError: the process can no longer use the device.
    """
    _check(call)
    runtime = runtime_of(call.x.device)
    kernels = runtime.part(Kernels)
    kernels.ensure(dict.fromkeys(variants_of(call.x.dtype, call.out.dtype)))
    kernels.run(linear_launches(call, runtime.info.num_sms))


def _check(call: LinearCall) -> None:
    x, weight, bias, activation, out = call
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    cols = out.shape[-1] * (2 if ACTIVATIONS[activation][1] else 1)
    reasons = _layer_reasons(weight.codes.shape[-1], weight.rotation, (x.dtype, out.dtype))
    if bias is not None and bias.dtype not in DTYPES:
        reasons.append(f"bias must be float32, float16 or bfloat16, got {bias.dtype}")
    if weight.codes.dtype != torch.int8 or weight.scales.dtype != torch.float32:
        reasons.append(f"codes must be int8 and scales float32, got {weight.codes.dtype} and {weight.scales.dtype}")
    if len({t.device for t in (x, weight.codes, weight.scales, bias, out) if t is not None}) > 1:
        reasons.append("all tensors must be on one device")
    if reasons:
        raise ValueError("; ".join(reasons))
    if cols >= UNBOUNDED:
        raise ValueError(f"codes must have fewer than {UNBOUNDED} rows, got {cols}")
    if x.dim() != 2 or out.dim() != 2 or x.shape[0] != out.shape[0] or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x must be [M, K] with whole rows and out [M, N], got {list(x.shape)} and {list(out.shape)}")
    if tuple(weight.codes.shape) != (cols, x.shape[1]) or not weight.codes.is_contiguous():
        raise ValueError(f"codes must be {[cols, x.shape[1]]} and contiguous, got {list(weight.codes.shape)}")
    if tuple(weight.scales.shape) not in ((cols,), (1,)) or not weight.scales.is_contiguous():
        raise ValueError(f"scales must be [{cols}] or [1] and contiguous, got {list(weight.scales.shape)}")
    if bias is not None and (tuple(bias.shape) != (cols,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be [{cols}] and contiguous, got {list(bias.shape)}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if weight.rotation and x.shape[1] % weight.rotation:
        raise ValueError(f"rotation must divide the {x.shape[1]} columns, got {weight.rotation}")
