"""A whole pipeline in one call: attention, feed-forward layers, decoding, and 8 bits where the user asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..ffn import patch_ffn
from ..int8 import patch_attention_int8, patch_linear_int8
from ..patching.patch import OFF, AnyReport, NothingToPatch, Patch, PatchGroup, State
from ..patching.selectors import DENOISERS
from ..vae import patch_vae
from .sites import models_of


def patch_parts(pipe_or_model: Any, patch_attention: Callable[[Any], Patch], *, eight_bit: bool) -> WholePatch:
    """The Patch of :func:`.patch_pipeline`; ``patch_attention`` is given what has the attention to be patched."""
    exact = pipe_or_model
    if eight_bit:  # whose own denoisers' calls would not reach 8-bit attention past our processors
        exact = nn.ModuleDict({name: part for name, part in models_of(exact).items() if name not in ("", *DENOISERS)})
    steps: dict[str, Callable[[], Patch]] = {
        "attention": lambda: patch_attention(exact),
        "feed-forward": lambda: patch_ffn(pipe_or_model),
        "vae": lambda: patch_vae(pipe_or_model, when="needed"),
    }
    if eight_bit:
        steps["8-bit linear"] = lambda: patch_linear_int8(pipe_or_model)
        steps["8-bit attention"] = lambda: patch_attention_int8(pipe_or_model)
    parts: dict[str, Patch] = {}
    missing: dict[str, str] = {}
    with PatchGroup(f"everything of {type(pipe_or_model).__name__}") as group:
        for name, step in steps.items():
            try:
                parts[name] = step()
            except NothingToPatch as nothing:
                missing[name] = str(nothing)
            else:
                group.add(parts[name].remove)
    if not parts:
        raise NothingToPatch("; ".join(missing.values()))
    return WholePatch(group, parts, missing)


class WholePatch(Patch):
    """The Patch of :func:`patch_pipeline`.

    Attributes:
        parts: ``"attention"``, ``"feed-forward"``, ``"vae"``, ``"8-bit linear"`` and ``"8-bit attention"``, those that
            were patched.
    """

    def __init__(self, group: PatchGroup, parts: dict[str, Patch], missing: dict[str, str]):
        self.parts, self._missing = parts, missing
        super().__init__(group.name, group._undo_all, sites=sum(part.sites for part in parts.values()))

    def report(self) -> AnyReport:
        """The reports of all parts."""
        return WholeReport({name: part.report() for name, part in self.parts.items()}, self._missing)


class WholeReport(AnyReport):
    """The reports of several patches, by the name of the part."""

    def __init__(self, parts: dict[str, AnyReport], missing: dict[str, str]):
        self.parts, self._missing = parts, missing

    @property
    def states(self) -> list[State]:
        parts = ((name, state) for name, part in self.parts.items() for state in part.states)
        found = [State(f"{name}: {state.name}", *state[1:]) for name, state in parts]
        return found + [State(name, OFF, why) for name, why in self._missing.items()]

    def text(self) -> str:
        """The text of each part under its name."""
        texts = {**{name: part.text() for name, part in self.parts.items()}, **self._missing}
        return "\n".join(f"{name}: {text}" for name, text in texts.items())
