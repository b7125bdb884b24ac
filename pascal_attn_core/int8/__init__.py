"""Linear layers in 8-bit integers. Not exact, therefore opt-in, and the error is reported.

    with patch_linear_int8(pipe.unet, max_error=0.03) as patch:
        pipe(prompt)
        print(patch.report().text())

Each layer is measured on its first inputs against its float version, and then runs in 8 bits, or stays in float if its
error is above ``max_error``. Modules keep their classes and state-dict keys; what changes is the weight, which becomes
an :class:`.weight.Int8Weight`. Adapters beside a layer, such as peft's LoRA, stay in float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..patching.patch import Patch, PatchGroup, require_sites
from ..patching.selectors import require_matches
from ..patching.targets import denoisers_of
from ..routes.timing_table import median_times
from .find import Found, find_linear
from .layer import WEIGHTS, Layer, Settings
from .product import int8_linear
from .quantize import Int8Matrix, quantize_rows, rotate
from .report import Int8Report, Int8ReportLine, report_line
from .ways import ACTIVATIONS
from .weight import Int8Weight

__all__ = [
    "ACTIVATIONS",
    "Int8Matrix",
    "Int8Patch",
    "Int8Report",
    "Int8ReportLine",
    "Int8Weight",
    "int8_linear",
    "patch_linear_int8",
    "quantize_rows",
    "rotate",
]


def patch_linear_int8(
    model: Any,
    *,
    include: Any = None,
    exclude: Any = None,
    max_error: float = 0.05,
    calibrate: Callable[[Any], Any] | None = None,
    weights: str = "host",
) -> Int8Patch:
    """Run linear layers of ``model`` in 8-bit integers. Not exact.

    Args:
        model: any module, or a diffusers pipeline: then its denoisers, both of Wan 2.2 for example, and the names of
            their layers begin with that of the component (``"transformer_2.blocks.0.ffn.net.2"``).
        include: exactly these layers instead of the default, which is those of the repeated blocks without embeddings,
            norms, modulation and routers: a shell pattern for the qualified name (``"*.ff.*"``), a class, a predicate
            ``(name, module) -> bool``, or several of them.
        exclude: layers that stay in float, given in the same way.
        max_error: relative error (root of the sum of squares) of a layer's product, on its actual inputs, above which
            it stays in float. Typical errors are 0.01 to 0.02; layers with outlier channels have larger ones.
        calibrate: called with the model immediately: each layer is measured in every call within it and judged by the
            largest error. None = each layer is measured and judged in its first call. In either case the error is
            checked again after 2, 4, 8 ... calls: a layer that exceeds ``max_error`` then goes back to float, if its
            float weight still exists.
        weights: where the float weights are kept: "host" = they move to host memory, and back when the patch is
            removed; "keep" = they stay where they are; "free" = they are discarded: after the patch is removed, the
            model has rounded weights.
    Returns:
        A Patch with ``report()``. Deep copies made while it is patched follow it; state dicts and pickles hold float
        weights.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an invalid argument, a pattern that chooses nothing, or no layer that can run in 8 bits.
    """
    target, model = model, denoisers_of(model)
    require_matches(model, include=include, exclude=exclude)
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)):
        raise TypeError(f"max_error must be a number, got {max_error!r}")
    if not max_error >= 0:
        raise ValueError(f"max_error must be at least 0, got {max_error}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if calibrate is not None and not callable(calibrate):
        raise TypeError(f"calibrate must be a function of the model, got {calibrate!r}")
    settings = Settings(float(max_error), weights, median_times)
    found = list(find_linear(model, include, exclude))
    layers: dict[str, Layer] = {}
    with PatchGroup(f"int8 linear layers of {type(model).__name__}") as group:
        for name, module, why_not in found:
            if not why_not:
                layers[name] = layer = Layer(name or "(the model)", module, settings)
                layer.attach()
                group.add(layer.detach)
        if calibrate is not None:
            settings.gathers = True
            calibrate(target)
            settings.gathers = False
            for layer in layers.values():
                layer.decide()
    return require_sites(Int8Patch(group, settings, found, layers))


class Int8Patch(Patch):
    """What :func:`patch_linear_int8` returns."""

    def __init__(self, group: PatchGroup, settings: Settings, found: list[Found], layers: dict[str, Layer]):
        self._settings, self._found, self._layers = settings, found, layers

        def undo() -> list[str]:
            settings.enabled = False  # deep copies share it
            left = group._undo_all()
            return [left[-1] + (f"; so were {len(left) - 1} more" if len(left) > 1 else "")] if left else []

        super().__init__(group.name, undo, sites=len(layers))

    def report(self) -> Int8Report:
        """The state of each layer so far."""
        lines = [report_line(found, self._layers.get(found.name)) for found in self._found]
        return Int8Report(lines, self._settings.max_error, self._settings.weights)
