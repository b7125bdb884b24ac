"""Every kernel of the fused route that ships, and the gradient kernels, each on a small call against the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..fused.code import prebuilt
from ..fused.code.compilation import Compilation
from ..fused.code.kinds import TABLE
from ..fused.code.source import DTYPES, KINDS, Variant, gguf_variants, linear_variants
from ..fused.geometry.traits import traits_of
from ..fused.trust import verify
from ..fused.trust.kernels import Kernels
from ..machine.runtime import runtime_of
from .cases import in_one_line

_GRADIENT_DIMS = (40, 64, 128)
# On tensor cores: head_dim, kind of mask, whether columns lie behind head_dim.
_TENSOR_GRADIENTS = ((64, "none", False), (64, "bool", False), (96, "none", True), (128, "none", False))


class KernelCheck(NamedTuple):
    """How one kernel did.

    Attributes:
        origin: ``"shipped"``, ``"disk cache"`` or ``"NVRTC 12.6"``; "" if there is none.
        error: largest difference to the definition, relative to the largest value; None where it did not run.
        limit: up to which it counts as right.
        failed: why it did not run.
    """

    name: str
    origin: str
    error: float | None = None
    limit: float = 0.0
    failed: str = ""

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= self.limit

    @property
    def text(self) -> str:
        """One line: which, and how it went."""
        found = self.failed or f"differs from the definition by {self.error:.1e} (at most {self.limit:.0e})"
        return f"kernel {self.name} ({self.origin or 'no machine code'}): {found}"


def checked_variants(arch: str = "sm_61") -> list[Compilation]:
    """The variants that ship for an architecture, as :attr:`.Kernels.arch` names it. Then come the gradients of common
    head_dims, on a device that has them also all in one kernel and on tensor cores, and linear layers in 8 bits."""
    amd = "" if arch.startswith("sm_") else arch
    gradients = [
        Variant(kind, dim, dtype, arch=amd)
        for dim in _GRADIENT_DIMS
        for dtype in DTYPES
        for kind in ("grad_query", "grad_key_value")
    ]
    on_tensor_cores = [
        variant
        for kind in KINDS
        if TABLE[kind].on_tensor_cores and traits_of(kind).is_gradient
        for dim, mask, padded in _TENSOR_GRADIENTS
        if mask == "none" or not traits_of(kind).is_packed
        for variant in (Variant(kind, dim, "float16", mask, padded),)
    ]
    at_once = [Variant("grad_all", dim, dtype) for dim in _GRADIENT_DIMS for dtype in DTYPES]
    others: list[Compilation] = []
    if not amd:
        capability = divmod(int(arch.removeprefix("sm_")), 10)
        of_layers = (*linear_variants(), *gguf_variants())
        others = [v for v in (*at_once, *on_tensor_cores, *of_layers) if v.runs_on(capability)]
    return list(dict.fromkeys([*prebuilt.variants_for(arch), *gradients, *others]))


def why_no_kernels(device: torch.device) -> list[str]:
    """Why no fused kernel runs on this device; empty = they do."""
    return list(runtime_of(device).part(Kernels).machine_reasons)


def check_kernels(device: torch.device, left: Callable[[], float]) -> Iterator[KernelCheck]:
    """Load and run each, while seconds are ``left``; one that is wrong or cannot be loaded does not end it."""
    kernels = runtime_of(device).part(Kernels)
    for variant in checked_variants(kernels.arch):
        if left() <= 0:
            return
        origin, limit = "", verify.tolerance(variant)
        try:
            _, origin = kernels.existing_code(variant)
            error = kernels.largest_error(variant)
        except Exception as failure:  # the test goes on: whatever it is belongs into the report
            yield KernelCheck(variant.name, origin, None, limit, in_one_line(failure))
        else:
            yield KernelCheck(variant.name, origin, error, limit)
