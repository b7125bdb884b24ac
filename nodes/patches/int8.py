"""Linear layers of a ComfyUI model in 8 bits: in while it is loaded, and what became of them."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from ...pascal_attn_core.int8.binding import Int8Binding
from ...pascal_attn_core.int8.report import WAYS, Int8Report, Int8ReportLine
from ..comfy import comfy_kitchen, host
from ..comfy.weights import LoadedWeight
from ..engine.runs import Run
from .injection import Injection, network_of

log = logging.getLogger("pascal_attn")
_MUCH_SLOWER = 1.1
Options = tuple[float, tuple[str, ...], tuple[str, ...], str]
_bindings: weakref.WeakKeyDictionary[nn.Module, dict[Options, Int8Binding]] = weakref.WeakKeyDictionary()


def binding_for(model: nn.Module, options: Options) -> Int8Binding:
    """The binding of these options (max_error, include, exclude, weights) for this loaded model: a node that is
    executed again, after a LoRA's strength has changed, say, goes on with what was measured."""
    max_error, include, exclude, weights = options
    known = _bindings.setdefault(model, {})
    if options not in known:
        chosen = [list(selectors) or None for selectors in (_selectors(include), _selectors(exclude))]
        known[options] = Int8Binding(max_error=max_error, include=chosen[0], exclude=chosen[1], weights=weights)
    return known[options]


def patterns(text: str) -> tuple[str, ...]:
    """``"double_blocks, *.ff.*"`` -> ``("double_blocks", "*.ff.*")``."""
    return tuple(part.strip() for part in text.replace("\n", ",").split(",") if part.strip())


def _selectors(texts: tuple[str, ...]) -> list[Any]:
    """A pattern with a wildcard is a shell pattern for the whole name; any other names a block or a layer."""
    return [text if set(text) & set("*?[") else _Part(text) for text in texts]


class _Part:
    """Chooses the layers in whose qualified names these parts occur: ``"double_blocks.3"``, ``"img_mlp"``."""

    def __init__(self, text: str):
        self.text = text

    def __call__(self, name: str, module: nn.Module) -> bool:
        return f".{self.text}." in f".{name}."


class Files:
    """Int8 layers that the model's file brings.

    Attributes:
        layers: how many.
        why_not: why ComfyUI computes them itself; "" = it does not.
        served: what computes them, or None.
    """

    def __init__(self, patcher: Any, choice: str):
        self.layers = comfy_kitchen.int8_layers(network_of(patcher))
        self.why_not = comfy_kitchen.why_not(patcher.load_device, choice) if self.layers else "none"
        self.served = None if self.why_not else comfy_kitchen.Served()

    def text(self) -> str:
        """One sentence; "" without such layers."""
        if not self.layers:
            return ""
        text = f"{self.layers} linear layers are in int8 in the model's file"
        if self.served is None:
            return f"{text}; ComfyUI computes them: {self.why_not}"
        done = f"{self.served.calls} calls by {WAYS[self.served.way]}" if self.served.calls else "no call yet"
        return f"{text}, computed here: {done}"


class Int8Layers(Injection):
    """The layers of one node."""

    key, part = f"{host.KEY}_int8", "int8"
    binding: Int8Binding

    def __init__(
        self,
        binding: Int8Binding,
        subject: str,
        settings: str,
        unique_id: str | None,
        files: Files,
        chosen: str = "",
    ):
        super().__init__(binding, subject, settings, unique_id)
        self.files, self.chosen = files, chosen

    def attach(self, patcher: Any) -> None:
        self.binding.attach(network_of(patcher), lambda name, module: LoadedWeight(patcher, name, module))

    def begin(self) -> None:
        self.binding.restart()
        if self.files.served is not None:
            self.files.served.calls = 0

    def describe(self, run: Run, patcher: Any) -> None:
        report = self.binding.report(network_of(patcher))
        if report.count("int8"):
            run.is_exact = False
            run.gain(report.sentence())
        for sentence in filter(None, [self.files.text(), "" if run.gains else report.sentence()]):
            run.note(sentence)
        for sentence in report.text().splitlines()[1:]:
            run.note(sentence.strip())
        for sentence in warnings_of(report, is_file_in_int8=bool(self.files.layers), chosen=self.chosen):
            if run.warn(sentence):
                log.warning("pascal_attn: %s: %s", self.subject, sentence)


def chosen_by(include: tuple[str, ...], exclude: tuple[str, ...]) -> str:
    """``"include double_blocks, exclude img_mlp"``; "" where the user names no layers."""
    words = {"include": include, "exclude": exclude}
    return ", ".join(f"{word} {', '.join(texts)}" for word, texts in words.items() if texts)


def warnings_of(report: Int8Report, *, is_file_in_int8: bool = False, chosen: str = "") -> list[str]:
    """What a user must not miss; ``chosen``: what ``chosen_by`` says."""
    found = [f"{line.name} went back to float: {line.why}" for line in report.of("float") if _went_back(line)]
    on = report.of("int8")
    if not on and not is_file_in_int8:
        reasons = sorted({line.why for line in report.lines if line.state in ("cannot be", "float", "waiting")})
        none = "none was measured" if report.lines else f"none is left by {chosen}" if chosen else "none was found"
        found.append(f"no linear layer runs in int8: {'; '.join(filter(None, reasons[:3])) or none}")
    timed = [(line.float_ms, line.int8_ms) for line in on if line.float_ms is not None and line.int8_ms is not None]
    before, after = (sum(times) for times in zip(*timed)) if timed else (0.0, 0.0)
    if after > _MUCH_SLOWER * before:
        found.append(
            f"int8 is slower than float here: one call of each layer takes {after:.1f} ms in total, "
            f"{before:.1f} ms in float"
        )
    return found


def _went_back(line: Int8ReportLine) -> bool:
    return " in call " in line.why


_whole: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def clone_for(patcher: Any, options: Options) -> Any:
    """A clone of ``patcher`` whose float weights are where it says they are.

    With dynamic loading each call brings them from main memory into memory of ComfyUI's own. Such a model is loaded
    once more in the ordinary way, as ComfyUI's own node for torch.compile does; unless nothing in it can run in 8 bits.
    """
    is_dynamic = getattr(patcher, "is_dynamic", None)
    if is_dynamic is None or not is_dynamic():
        return patcher.clone()
    model = patcher.model
    if not binding_for(network_of(patcher), options).preview(network_of(patcher)).count("waiting"):
        return patcher.clone()
    try:
        clone = patcher.clone(disable_dynamic=True, model_override=_whole.get(model))
    except RuntimeError as error:
        raise RuntimeError(
            f"Pascal Int8 Linear cannot work with dynamic VRAM loading for a model from this loader ({error}); start "
            "ComfyUI with --disable-dynamic-vram"
        ) from error
    _whole[model] = clone.get_clone_model_override()
    return clone
