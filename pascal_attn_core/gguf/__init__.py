"""Linear layers with the weights of GGUF files, expanded some rows at a time. Exact.

    with patch_gguf(pipe.transformer) as patch:
        pipe(prompt)

Hosts expand the whole weight of a layer in each call, by ten to twenty operators, and training keeps it for the
backward pass. Here at most four million weights of a layer exist in float at a time, with the same bits as the host's,
and nothing of them is kept. Modules keep their classes, parameters and state-dict keys.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..patching.patch import OFF, ON, REFUSED, Patch, PatchReport, State, require_sites
from ..patching.selectors import denoisers_of, matches, require_matches, selectors
from .hosts import Host, Multiplier, format_of, host_of, why_not
from .matrix import linear

__all__ = ["GgufPatch", "patch_gguf"]


def patch_gguf(model: Any, *, include: Any = None, exclude: Any = None) -> GgufPatch:
    """Expand the GGUF weights of the linear layers of ``model`` some rows at a time, as they are multiplied.

    The expanded weights have the bits of the host's own; a product in several slices may differ from the host's in the
    last bits, as one by another matrix library does.

    Args:
        model: any module with layers of diffusers' ``GGUFQuantizationConfig`` or of ComfyUI-GGUF, or a diffusers
            pipeline: then its denoisers, and the names of their layers begin with that of the component.
        include: only these layers instead of all: a shell pattern for the qualified name (``"*.ff.*"``), a class, a
            predicate ``(name, module) -> bool``, or several of them.
        exclude: layers that stay as they are, given in the same way.
    Returns:
        A Patch with ``report()``. Copies and pickles of a model are without it.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a pattern that chooses nothing, or no layer with a GGUF weight.
    """
    target, model = model, denoisers_of(model)
    require_matches(model, include=include, exclude=exclude)
    chosen, dropped = selectors("include", include), selectors("exclude", exclude)
    found = {}
    for name, module in model.named_modules():
        host = host_of(module)
        if host is None or (dropped and matches(dropped, name, module)):
            continue
        if include is None or matches(chosen, name, module):
            found[name] = module, host
    return require_sites(GgufPatch(type(target).__name__, found))


class GgufPatch(Patch):
    """The change made by :func:`patch_gguf`."""

    def __init__(self, kind: str, found: dict[str, tuple[nn.Module, Host]]):
        self._states: list[State] = []
        placed: list[Multiplier] = []
        for name, (module, host) in found.items():
            reason = why_not(module, host)
            self._states.append(
                State(name or "(the model)", REFUSED if reason else ON, reason or format_of(module, host))
            )
            if not reason:
                placed.append(Multiplier(module, host, lambda has_patches: self.active and not has_patches, linear))
                placed[-1].put_in()
        undo = functools.partial(_take_out, placed)
        super().__init__(f"GGUF linear layers of {kind}", undo, sites=len(placed))

    def report(self) -> PatchReport:
        """The state of each layer, with the format of its weight."""
        off = {} if self.active else {ON: OFF}
        return PatchReport([each._replace(state=off.get(each.state, each.state)) for each in self._states])


def _take_out(placed: list[Multiplier]) -> list[str]:
    left = sum(not each.take_out() for each in placed)
    return [f"{left} layers were changed while patched; ours stays underneath and passes calls through"] if left else []
