"""Chunked feed-forward modules of a ComfyUI model: in while it is loaded, and what became of them."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

from torch import nn

from ...pascal_attn_core.ffn.binding import FfnBinding
from ...pascal_attn_core.ffn.hosts import Bookkeeping, CastingLayers, register
from ...pascal_attn_core.ffn.report import FfnReport
from ..engine import runs
from ..engine.runs import Run
from . import host

log = logging.getLogger("pascal_attn")
KEY = f"{host.KEY}_ffn"
PART = "feed-forward"
CASTING_LAYERS = CastingLayers("comfy_cast_weights", cache_prefixes=("comfy_", "prev_comfy_"))
BOOKKEEPING = Bookkeeping(("comfy.model_management",))
register(CASTING_LAYERS, BOOKKEEPING)


class Chunking:
    """The chunking of one node, for the clones of its model: two loaded at once on two devices have each their own
    modules, and one that is thrown away while it is loaded takes its chunking with it."""

    def __init__(self, binding: FfnBinding, subject: str, settings: str, unique_id: str | None):
        self.binding, self.subject, self.settings, self.unique_id = binding, subject, settings, unique_id
        self._finalizers: weakref.WeakKeyDictionary[Any, weakref.finalize] = weakref.WeakKeyDictionary()
        self._started: float | None = None

    # ---- injection ----

    def inject(self, patcher: Any) -> None:
        """The model is being loaded: put the slices in."""
        model = network_of(patcher)
        self.binding.attach(model)
        self._forget(patcher)
        # ComfyUI ejects what it knows of; a clone that is collected while it is loaded, nobody knows of.
        finalizer = weakref.finalize(patcher, _detach, self.binding, weakref.ref(model))
        finalizer.atexit = False
        self._finalizers[patcher] = finalizer

    def eject(self, patcher: Any) -> None:
        """The model is being unloaded, saved or patched: take them out."""
        self._forget(patcher)
        self.binding.detach(network_of(patcher))

    def _forget(self, patcher: Any) -> None:
        finalizer = self._finalizers.pop(patcher, None)
        if finalizer is not None:
            finalizer.detach()

    # ---- the record ----

    def before_run(self, patcher: Any) -> None:
        """Sampling starts."""
        if self._started is None:
            self.binding.restart_report()
            self._started = time.time()

    def after_run(self, patcher: Any) -> None:
        """Sampling is over, also after an error: say what was chunked."""
        if self._started is None:
            return
        run = Run(self.subject, PART, self.settings, str(patcher.load_device), self.unique_id, host.prompt_id())
        run.started, self._started = self._started, None
        report = self.binding.report(network_of(patcher))
        run.note(_headline(report, self.binding.settings.min_tokens))
        for sentence in report.text().splitlines()[1:]:
            run.note(sentence.strip())
        for line in report.lines:
            if line.state == "refused" and run.warn(f"{line.kind} runs whole: {line.why}"):
                log.warning("pascal_attn: %s: %s (%s) runs whole: %s", self.subject, line.name, line.kind, line.why)
        runs.remember(run)
        run.finish()
        host.say(run.line(), self.unique_id)


def network_of(patcher: Any) -> nn.Module:
    """The diffusion model of a patcher, as it is loaded."""
    return patcher.model.diffusion_model


def install(patcher: Any, chunking: Chunking) -> None:
    """Let ComfyUI inject and eject ``chunking`` with this clone; one that the clone had is replaced."""
    from comfy.patcher_extension import CallbacksMP, PatcherInjection

    patcher.set_injections(KEY, [PatcherInjection(chunking.inject, chunking.eject)])
    callbacks = {CallbacksMP.ON_PRE_RUN: chunking.before_run, CallbacksMP.ON_CLEANUP: chunking.after_run}
    for event, callback in callbacks.items():
        patcher.remove_callbacks_with_key(event, KEY)
        patcher.add_callback_with_key(event, KEY, callback)


def _detach(binding: FfnBinding, reference: weakref.ref[nn.Module]) -> None:
    model = reference()
    if model is not None:
        binding.detach(model)


def _headline(report: FfnReport, min_tokens: int) -> str:
    chunked, able = report.count("chunked"), len(report.lines) - report.count("cannot be")
    text = f"{chunked} of {able} feed-forward modules chunked"
    others = [f"{report.count(state)} {words}" for state, words in _OTHERS.items() if report.count(state)]
    waiting = report.count("waiting")
    if waiting:
        others.append(f"{waiting} had no call of {min_tokens} tokens")
    return ", ".join([text, *others])


_OTHERS = {"whole": "fit the budget whole", "refused": "refused", "cannot be": "cannot be: fused blocks"}
