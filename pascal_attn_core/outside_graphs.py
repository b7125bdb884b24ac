"""Calls that torch.compile leaves between two graphs. Imported only while something is being compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import sdpa, sdpa_with_lse


@torch.compiler.disable
def sdpa_with_an_unregistered_mask_rule(*arguments: Any, lse: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of the arguments of :func:`.dispatch.sdpa`: a graph cannot hold a LazyMask whose rule is not
    registered by :func:`.lazy_mask.mask_rule`."""
    if lse:
        out, row_lse = sdpa_with_lse(*arguments, **options)
        return out, row_lse
    return sdpa(*arguments, **options), None
