"""Layers of a ComfyUI model in 8 bits, not exact: which, in while the model is loaded, and the record of each run."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...pascal_attn_core.int8.binding import Int8Binding
from ...pascal_attn_core.int8.find import find_linear
from ...pascal_attn_core.int8.report import Int8Report
from ...pascal_attn_core.patching.selectors import matches
from ..comfy import comfy_kitchen, host, others
from ..comfy.by_name import OVERRIDE
from ..comfy.weights import LoadedWeight
from ..engine.runs import Run
from . import int8_attention
from .injection import Injection, install, network_of
from .int8_attention import AUTO, OFF, layers_for, layers_in

log = logging.getLogger("pascal_attn")
_MUCH_SLOWER = 1.1
_bindings: weakref.WeakKeyDictionary[nn.Module, dict[tuple, Int8Binding]] = weakref.WeakKeyDictionary()


def patterns(text: str) -> tuple[str, ...]:
    """``"double_blocks, *.ff.*"`` -> ``("double_blocks", "*.ff.*")``."""
    return tuple(part.strip() for part in re.split("[,;\n]", text) if part.strip())


def _selector(text: str) -> str | Callable[[str, nn.Module], bool]:
    """A pattern with a wildcard is a shell pattern for the whole name; any other names a block or a layer in whose name
    its parts occur (``"double_blocks.3"``, ``"img_mlp"``). Names may be those of ComfyUI's files and LoRAs."""
    text = re.sub(r"^(model\.)?diffusion_model\.", "", text).removesuffix(".weight")
    return text if set(text) & set("*?[") else lambda name, module: f".{text}." in f".{name}."


def unmatched(model: nn.Module, texts: tuple[str, ...]) -> str:
    """A sentence about the patterns that no linear layer of ``model`` matches; "" = there are none."""
    layers = list(find_linear(model, include="*"))
    none = [text for text in texts if not any(matches([_selector(text)], name, module) for name, module, *_ in layers)]
    if not none or not layers:
        return ""
    examples = " and ".join(found.name for found in layers[len(layers) // 3 :: max(1, len(layers) // 3)][:2])
    return f"no linear layer matches {', '.join(none)}; layers of this model are, for example, {examples}"


@dataclass(frozen=True)
class Int8Settings:
    """The inputs of a node.

    Attributes:
        max_error, include, exclude, weights, int8_files: of linear layers; linear_layers: whether they run in 8 bits.
        only_faster: whether linear layers that 8 bits do not make faster stay in float.
        attention: "auto" = in 8 bits, but not on a CPU; "always" or "off"; attention_max_error: of its layers.
        earlier_patch: of another pack, on attention: one of the choices of ``others``.
    """

    max_error: float
    include: str
    exclude: str
    weights: str
    int8_files: str
    linear_layers: bool = True
    attention: str = OFF
    attention_max_error: float = 0.0
    only_faster: bool = False
    earlier_patch: str = others.AUTO

    def text(self, *, attention: bool) -> str:
        """``"error at most 5.0%, weights host, attention in 8 bits with an error of at most 2.0%"``."""
        parts = [f"error at most {self.max_error:.1%}, weights {self.weights}"] if self.linear_layers else []
        parts += [f"attention in 8 bits with an error of at most {self.attention_max_error:.1%}"] if attention else []
        return ", ".join(parts)


def binding_for(model: nn.Module, wanted: Int8Settings) -> Int8Binding:
    """The binding of these settings for this loaded model: a node that is executed again, after a LoRA's strength has
    changed, say, goes on with what was measured."""
    known = _bindings.setdefault(model, {})
    key = wanted.max_error, wanted.include, wanted.exclude, wanted.weights, wanted.only_faster
    if key not in known:
        max_error, *chosen, weights, only_faster = key
        include, exclude = ([_selector(text) for text in patterns(texts)] or None for texts in chosen)
        known[key] = Int8Binding(
            max_error=max_error, include=include, exclude=exclude, weights=weights, only_faster=only_faster
        )
    return known[key]


class Int8Layers(Injection):
    key, part = int8_attention.KEY, "int8"
    binding: Int8Binding

    def __init__(self, patcher: Any, wanted: Int8Settings, unique_id: str | None):
        network = network_of(patcher)
        choice = wanted.int8_files if wanted.linear_layers else "off"
        self.wanted, self.files = wanted, comfy_kitchen.FileLayers(network, patcher.load_device, choice)
        is_too_slow = wanted.attention == AUTO and patcher.load_device.type == "cpu"
        is_off = wanted.attention == OFF or is_too_slow
        self.why_exact = int8_attention.ON_A_CPU if is_too_slow else ""
        self.attention = None if is_off else layers_for(network, float(wanted.attention_max_error))
        text, subject = wanted.text(attention=not is_off), host.name_of_model(patcher.model)
        super().__init__(binding_for(network, wanted), subject, text, unique_id)

    def attach(self, patcher: Any) -> None:
        network = network_of(patcher)
        for bindings in list(_bindings.values()):  # other options of another clone, maybe of the model that this copies
            for binding in bindings.values():
                binding.detach(network)
        if self.wanted.linear_layers:
            self.binding.attach(network, lambda name, module: LoadedWeight(patcher, name, module))

    def begin(self, patcher: Any) -> None:
        self.binding.restart()
        self.files.calls = 0
        if attention := _attention_of(patcher):
            attention.restart()

    def reports(self, patcher: Any) -> list[Int8Report]:
        """On linear layers and on attention layers, as far as the clone has them in 8 bits."""
        found = [self.binding.report(network_of(patcher))] if self.wanted.linear_layers else []
        attention = _attention_of(patcher)
        return found if attention is None else [*found, attention.report()]

    def describe(self, run: Run, patcher: Any) -> None:
        reports = self.reports(patcher)
        run.is_exact = all(report.is_exact for report in reports)
        if not run.is_exact:
            run.gain(together(reports).sentence())
        for sentence in filter(None, [self.files.text(), self.why_exact]):
            run.note(sentence)
        for report in reports:
            for sentence in report.text().splitlines()[len(reports) == 1 and bool(run.gains) :]:
                run.note(sentence.strip())
            is_in_int8 = bool(self.files.layers) and report is reports[0]
            for sentence in warnings_of(report, is_file_in_int8=is_in_int8):
                if run.warn(sentence):
                    log.warning("pascal_attn: %s: %s", self.subject, sentence)


def _attention_of(patcher: Any) -> int8_attention.AttentionLayers | None:
    return layers_in(patcher.model_options.get("transformer_options", {}).get(OVERRIDE))


def patch(model: Any, wanted: Int8Settings, unique_id: str | None) -> tuple[Any, str]:
    """A clone of ``model`` whose layers run in 8 bits, and what is known of each before a run."""
    patched = clone_for(model, wanted) if wanted.linear_layers else model.clone()
    layers, network = Int8Layers(patched, wanted, unique_id), network_of(patched)
    install(patched, layers)
    comfy_kitchen.install(patched, layers.files)
    int8_attention.install(patched, layers.attention, wanted.earlier_patch)
    reports = layers.reports(patched)
    first, more = f"{layers.subject}: {layers.settings}", []
    if wanted.linear_layers:
        first = f"{reports[0].able} linear layers of {layers.subject} for int8, {layers.settings}"
        more = [unmatched(network, patterns(f"{wanted.include},{wanted.exclude}")), layers.files.text()]
        if more[0]:
            log.warning("pascal_attn: %s: %s", layers.subject, more[0])
    more = [*filter(None, [*more, layers.why_exact])]
    host.say("; ".join([first, *more]), unique_id)
    texts = [report.text() for report in reports if report.lines or report.weights]
    texts += ["attention layers are found and measured in their first call"] * (len(texts) < len(reports))
    return patched, "\n".join([*texts, *more])


def together(reports: list[Int8Report]) -> Int8Report:
    """The reports on linear layers and on attention layers as one."""
    lines = [line for report in reports for line in report.lines]
    what = " and ".join(report.what.removesuffix(" layers") for report in reports)
    return replace(reports[0], lines=lines, what=f"{what} layers")


def warnings_of(report: Int8Report, *, is_file_in_int8: bool = False) -> list[str]:
    """The sentences that a user must not miss."""
    found = [f"{line.name} went back to float: {line.why}" for line in report.lines if line.went_back]
    if report.is_exact and not is_file_in_int8:
        none = "none was measured" if report.lines else "none was found"
        found.append(f"no {report.what.removesuffix('s')} runs in int8: {'; '.join(report.reasons[:3]) or none}")
    _, before, after, _ = report.times
    if after > _MUCH_SLOWER * before:
        times = f"{after:.1f} ms in total, {before:.1f} ms in float"
        found.append(f"int8 is slower than float here: one call of each layer takes {times}")
    return found


_whole: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def clone_for(patcher: Any, wanted: Int8Settings) -> Any:
    """A clone of ``patcher`` whose float weights are where it says they are.

    With dynamic loading each call brings them from main memory into memory of ComfyUI's own. Such a model is loaded
    once more in the ordinary way, as ComfyUI's own node for torch.compile does; unless nothing in it can run in 8 bits.
    """
    model, is_dynamic = patcher.model, getattr(patcher, "is_dynamic", bool)()
    if not is_dynamic or not binding_for(network_of(patcher), wanted).report(network_of(patcher)).able:
        return patcher.clone()
    try:
        clone = patcher.clone(disable_dynamic=True, model_override=_whole.get(model))
    except RuntimeError as error:
        raise RuntimeError(
            f"8-bit linear layers cannot work with dynamic VRAM loading for a model from this loader ({error}); start "
            "ComfyUI with --disable-dynamic-vram"
        ) from error
    _whole[model] = clone.get_clone_model_override()
    return clone
