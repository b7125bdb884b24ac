"""Blocks expanded by our kernel or by torch's operators, whichever was faster on the device: with the same bits."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..fused.code.compilation import Compilation
from ..fused.code.source import gguf_variants
from ..fused.gguf import ExpandCall, run_expand, why_not
from ..fused.trust.kernels import KernelUnavailable
from ..machine.runtime import runtime_of
from ..reference.gguf_blocks import FORMATS, expand
from ..routes.timing_table import power_of_two
from ..routes.ways import Ways


def _why_no_kernel(call: ExpandCall) -> str:
    return why_not(call.blocks.device, call.format, call.arithmetic, call.out.dtype)


def _by_operators(call: ExpandCall) -> Tensor:
    return expand(call.blocks, call.format, call.arithmetic, table=call.table).to(call.out.dtype)


class ExpandKind(NamedTuple):
    """Expansions that take about as long as each other: the number of blocks up to a power of two, the rest exactly."""

    blocks: int
    format: str
    arithmetic: str
    out: str


class ExpandTimings(Ways[ExpandKind]):
    """The times of our kernel and of torch's operators. Made by ``runtime.part(ExpandTimings)``."""

    file_kind, kind_type = "gguf", ExpandKind
    table: ClassVar = {"kernel": (_why_no_kernel, run_expand), "operators": (lambda call: "", _by_operators)}

    def kind_of(self, call: ExpandCall) -> ExpandKind:
        arithmetic, out = (str(dtype).removeprefix("torch.") for dtype in (call.arithmetic, call.out.dtype))
        return ExpandKind(power_of_two(len(call.blocks)), call.format, arithmetic, out)

    def kernels(self) -> tuple[Compilation, ...]:
        return gguf_variants()


def expanded(blocks: Tensor, name: str, arithmetic: torch.dtype, table: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The weights in blocks, ``[n, weights]``, rounded to a dtype; see :func:`..reference.gguf_blocks.expand`."""
    is_real = type(blocks) is Tensor and not torch.compiler.is_compiling()
    if is_real and not why_not(blocks.device, name, arithmetic, dtype):
        out = torch.empty(len(blocks), FORMATS[name].weights, dtype=dtype, device=blocks.device)
        call = ExpandCall(blocks, name, arithmetic, table, out)
        try:
            found = runtime_of(blocks.device).part(ExpandTimings).times(call, ["kernel", "operators"])
            if not found or found["kernel"] <= found["operators"]:
                run_expand(call)
                return out
        except KernelUnavailable:  # from now on why_not knows
            pass
    return expand(blocks, name, arithmetic, table=table).to(dtype)
