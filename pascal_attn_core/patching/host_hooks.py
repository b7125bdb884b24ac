"""How this package recognises the hooks that accelerate and diffusers put on modules (offloading, casting, caches).

Attribute names are the only mark that both leave, so they are listed here. They are registered here and not in
:mod:`..diffusers`: a model that another program has hooked may be patched as well. Neither library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .hosts import Slot, WeightHooks, register


def _below_accelerate(module: nn.Module) -> Iterator[Slot]:
    if "_old_forward" in module.__dict__:
        yield module.__dict__, "_old_forward"


def _below_diffusers(module: nn.Module) -> Iterator[Slot]:
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        yield vars(reference), "forward" if reference.original_forward is None else "original_forward"


ACCELERATE = WeightHooks(("_hf_hook", "_old_forward"), _below_accelerate)
DIFFUSERS = WeightHooks(("_diffusers_hook",), _below_diffusers)

register(ACCELERATE, DIFFUSERS)
