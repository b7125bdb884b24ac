"""Linear layers by our kernels.

In 8-bit integers by dp4a, on NVIDIA's devices of compute capability 6.1 and from 7.0 on: not exact, opt-in; what it
computes is at the head of ``cuda/int8_linear.cu``. Blocks of GGUF files expanded, on NVIDIA's devices: exact, the
definition is :mod:`..reference.gguf_blocks`; and multiplied by rows in 8 bits, on those with dp4a and on AMD's with
v_dot4_i32_i8: not exact, opt-in, the definition is ``launch/gguf_definition``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..machine.runtime import Runtime, runtime_of
from .code.compilation import Compilation
from .code.kinds import FEW, KERNELS, LEAST_CAPABILITY, MOST_COLUMNS, PRODUCT_FORMATS, ROTATIONS
from .geometry.amd import has_dots
from .launch.gguf import DTYPES, ExpandCall, GgufLinearCall, expand_launches, gguf_linear_launches, variant_of
from .launch.gguf import variants_of as product_variants
from .launch.linear import ACTIVATIONS, LinearCall, linear_launches, variants_of
from .trust.kernels import Kernels
from .trust.trial import Trials, family_of

__all__ = [
    "ACTIVATIONS", "ExpandCall", "GgufLinearCall", "LinearCall", "run_expand", "run_linear", "run_product",
    "why_no_expansion", "why_no_product", "why_not",
]  # fmt: skip


def why_not(
    device: torch.device,
    *,
    columns: int,
    rotation: int = 0,
    dtypes: Iterable[torch.dtype] = (torch.float16,),
    untried: bool = False,
) -> list[str]:
    """Why the kernels cannot take linear layers on a device, one sentence each; empty = they can. The first question on
    a machine starts a child process that tries them, some seconds; not if ``untried``.

    Args:
        columns: of x and of the weight: K.
        rotation: of the weight.
        dtypes: of x and of the output.
    """
    runtime, kinds = runtime_of(device), tuple(dtypes)
    if runtime.info.kind != "cuda":
        return [f"the int8 linear kernel needs a CUDA device, got {runtime.info.kind}"]
    capability = runtime.info.capability
    if capability is None or capability < LEAST_CAPABILITY:
        found = "an unknown one" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        return [f"the int8 linear kernel needs dp4a, compute capability 6.1 or newer; {found} has none"]
    reasons = [f"the int8 linear kernel takes float32, float16 and bfloat16, got {d}" for d in kinds if d not in DTYPES]
    if rotation not in ROTATIONS:
        reasons.append(f"the int8 linear kernel rotates groups of {ROTATIONS[1:]}, got {rotation}")
    if columns % 4 or not 0 < columns <= MOST_COLUMNS:
        reasons.append(f"columns must be a multiple of 4, at most {MOST_COLUMNS}, got {columns}")
    if reasons:
        return reasons
    variants = list(dict.fromkeys(variant for dtype in kinds for variant in variants_of(dtype, dtype)))
    return _why_unavailable(runtime, variants, untried=untried)


def _why_unavailable(runtime: Runtime, variants: Sequence[Compilation], *, untried: bool = False) -> list[str]:
    """Why these kernels cannot run, or, unless ``untried``, why a trial says that they should not."""
    reasons = runtime.part(Kernels).reasons(variants)
    if not reasons and not untried and (why := runtime.part(Trials).reason(variants)):
        reasons = [f"{family_of(variants[0].name)} is left off: {why}"]
    return reasons


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


# ---- GGUF weights ----------------------------------------------------------------------------------------------------


def why_no_expansion(device: torch.device, name: str, arithmetic: torch.dtype, out: torch.dtype) -> str:
    """Why the kernels cannot expand blocks of a format, by arithmetic of a dtype, to weights of the dtype ``out`` on a
    device; "" = they can. The first question on a machine starts a child process that tries them, some seconds."""
    runtime = runtime_of(device)
    if runtime.info.kind != "cuda":
        return f"the kernel for GGUF weights needs a CUDA device, got {runtime.info.kind}"
    if name not in KERNELS or arithmetic not in DTYPES or out not in DTYPES:
        return f"the kernel for GGUF weights does not expand {name} by {arithmetic} to {out}"
    return "; ".join(_why_unavailable(runtime, [variant_of(arithmetic)]))


def why_no_product(device: torch.device, name: str, rows: int, shape: int) -> str:
    """Why the kernels cannot multiply blocks of a format by ``rows`` of x on a device; "" = they can. ``shape``: rows
    of the outputs of a thread, 8 or 4. The first question on a machine is that of :func:`why_no_expansion`."""
    runtime = runtime_of(device)
    info, arch = runtime.info, runtime.part(Kernels).variant_arch
    capability = info.capability or (0, 0)
    if not (has_dots(arch) if arch else info.kind == "cuda" and capability >= LEAST_CAPABILITY):
        return f"the 8-bit kernel for GGUF weights needs a GPU with products of four bytes, got {info.name}"
    variants = product_variants(name, shape, arch)
    if name not in PRODUCT_FORMATS or not (arch or all(each.runs_on(capability) for each in variants)):
        return f"the 8-bit kernel for GGUF weights does not multiply {name} by {shape} rows on {info.name}"
    if shape != 8 and rows <= FEW["pa_gguf_some"].rows:
        return f"the 8-bit kernel for GGUF weights has one shape for {rows} rows"
    return "; ".join(_why_unavailable(runtime, variants))


def run_expand(call: ExpandCall) -> None:
    """Queue what :func:`why_no_expansion` has nothing against, as :func:`run_linear` does. No extra memory."""
    kernels = runtime_of(call.blocks.device).part(Kernels)
    kernels.ensure([variant_of(call.arithmetic)])
    kernels.run(expand_launches(call))


def run_product(call: GgufLinearCall, shape: int) -> None:
    """Queue what :func:`why_no_product` has nothing against, as :func:`run_linear` does. Extra memory: x in 8 bits with
    its scales, at most 72 MiB."""
    kernels = runtime_of(call.x.device).part(Kernels)
    kernels.ensure(product_variants(call.format, shape, kernels.variant_arch))
    kernels.run(gguf_linear_launches(call, shape, arch=kernels.variant_arch))
