"""Linear layers of a ComfyUI model that it runs in float32, multiplied in float16: in while the model is loaded."""

from __future__ import annotations

from typing import Any

from ...pascal_attn_core.int8.float16 import Float16Binding
from ...pascal_attn_core.patching.patch import ON
from ..comfy import host
from ..engine.runs import Run
from .injection import Injection, install, network_of


class Float16Layers(Injection):
    """The layers of one node."""

    key, part = f"{host.KEY}_float16", "float16"
    binding: Float16Binding

    def describe(self, run: Run, patcher: Any) -> None:
        report = self.binding.report(network_of(patcher))
        first, *more = report.text().splitlines()
        run.is_exact = not any(state.state == ON for state in report.states)
        tell = run.note if run.is_exact else run.gain
        tell(f"linear layers in float16: {first}")
        for sentence in more:
            run.note(sentence.strip())


def install_on(patched: Any, unique_id: str | None) -> str:
    """Let the linear layers of a fresh clone run in float16. Returns a sentence about them."""
    layers = Float16Layers(Float16Binding(), host.name_of_model(patched.model), "float16 linear layers", unique_id)
    install(patched, layers)
    return f"not exact: linear layers in float16, error at most {layers.binding.max_error:.1%}"
