"""Blocks expanded by our kernel or by torch's operators, whichever was faster on the device: with the same bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..fused.gguf import ExpandCall, gguf_digest, run_expand, why_not
from ..fused.trust.kernels import Kernels, KernelUnavailable
from ..machine.runtime import runtime_of
from ..reference.gguf_blocks import FORMATS, expand
from ..routes.timing_table import Contest, power_of_two


class ExpandKind(NamedTuple):
    """Expansions that take about as long as each other: the number of blocks up to a power of two, the rest exactly."""

    blocks: int
    format: str
    arithmetic: str
    out: str


class ExpandTimings(Contest[ExpandKind]):
    """The times of our kernel and of torch's operators. Made by ``runtime.part(ExpandTimings)``."""

    file_kind, kind_type = "gguf", ExpandKind

    def is_kernel_faster(self, call: ExpandCall) -> bool:
        """Whether the kernel is, or none was timed."""
        arithmetic, out = (str(dtype).removeprefix("torch.") for dtype in (call.arithmetic, call.out.dtype))
        kind = ExpandKind(power_of_two(len(call.blocks)), call.format, arithmetic, out)
        found = self.find(kind, lambda: self._measure(kind, call))
        return not found or found["kernel"] <= found["operators"]

    def _measure(self, kind: ExpandKind, call: ExpandCall) -> dict[str, float] | None:
        call = call._replace(out=torch.empty_like(call.out))
        with torch.no_grad():
            return self.timed(kind, {"kernel": lambda: run_expand(call), "operators": lambda: _by_operators(call)})

    def conditions(self) -> dict[str, str]:
        arch = self.runtime.part(Kernels).arch
        return {"card": self.info.name, "arch": arch, "torch": torch.__version__, "kernels": gguf_digest()}


def expanded(blocks: Tensor, name: str, arithmetic: torch.dtype, table: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The weights in blocks, ``[n, weights]``, rounded to a dtype; see :func:`..reference.gguf_blocks.expand`."""
    is_real = type(blocks) is Tensor and not torch.compiler.is_compiling()
    if is_real and not why_not(blocks.device, name, arithmetic, dtype):
        out = torch.empty(len(blocks), FORMATS[name].weights, dtype=dtype, device=blocks.device)
        call = ExpandCall(blocks, name, arithmetic, table, out)
        try:
            if runtime_of(blocks.device).part(ExpandTimings).is_kernel_faster(call):
                run_expand(call)
                return out
        except KernelUnavailable:  # from now on why_not knows
            pass
    return expand(blocks, name, arithmetic, table=table).to(dtype)


def _by_operators(call: ExpandCall) -> Tensor:
    return expand(call.blocks, call.format, call.arithmetic, table=call.table).to(call.out.dtype)
