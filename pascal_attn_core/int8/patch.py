"""Int8Patch: what layers that are not exact are put in by, and where their runs begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..patching.patch import Patch, require_sites
from ..patching.run_start import at_run_start
from ..patching.selectors import denoisers_of, require_matches
from .binding import Binding
from .report import Int8Report


class Int8Patch(Patch):
    """The change made by :func:`..patch_linear_int8`, :func:`..patch_attention_int8` or
    :func:`..float16.patch_linear_float16`."""

    def __init__(self, kind: str, model: nn.Module, binding: Binding, sites: int, forget: Callable[[], None]):
        self._model, self._binding = model, binding

        def undo() -> list[str]:
            binding.options.enabled = False
            forget()
            left = binding.detach(model)
            return [left[-1] + (f"; so were {len(left) - 1} more" if len(left) > 1 else "")] if left else []

        super().__init__(f"{binding.precision} {binding.what} of {kind}", undo, sites=sites)

    def report(self) -> Int8Report:
        """The state of each layer so far."""
        return self._binding.report(self._model)


def patched(target: Any, binding: Binding, calibrate: Callable[[Any], Any] | None, **chosen: Any) -> Int8Patch:
    """Put the layers of a binding into a model or a pipeline.

    Args:
        calibrate: called with the target; the layers decide after it. None = each decides in its first call.
        chosen: include and exclude, which must choose something.
    """
    model = denoisers_of(target)
    require_matches(model, **chosen)
    if calibrate is not None and not callable(calibrate):
        raise TypeError(f"calibrate must be a function of the model, got {calibrate!r}")
    count = binding.attach(model)
    try:
        if calibrate is not None:
            binding.options.gathers = True
            calibrate(target)
            binding.options.gathers = False
            for layer in binding.layers_of(model):
                layer.decide()
    except BaseException:
        binding.detach(model)
        raise
    return require_sites(Int8Patch(type(target).__name__, model, binding, count, at_run_start(target, binding.restart)))
