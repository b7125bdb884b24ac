"""One node's changes to a model's modules: put in while the model is loaded, and described after each run."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..comfy import host
from ..engine import runs
from ..engine.runs import Run
from ..reporting import gain


class Injection:
    """The changes of one node, for the clones of its model. Two clones that are loaded on two devices at once each have
    their own modules. A clone that is thrown away while it is loaded takes what is in its modules with it.

    Attributes:
        key: the key of the injections and callbacks on the clones.
        part: the part that its runs have in the report.
        binding: has ``detach(model)``.
        is_quiet: runs in which nothing was gained, and nothing is to be warned of, are not recorded.
    """

    key, part = "", ""
    is_quiet = False

    def __init__(self, binding: Any, subject: str, settings: str, unique_id: str | None):
        self.binding, self.subject, self.settings, self.unique_id = binding, subject, settings, unique_id
        self._finalizers: weakref.WeakKeyDictionary[Any, weakref.finalize] = weakref.WeakKeyDictionary()
        self._run: Run | None = None

    def attach(self, patcher: Any) -> None:
        self.binding.attach(network_of(patcher))

    def begin(self, patcher: Any) -> None:
        """A run starts: forget the last one."""

    def describe(self, run: Run, patcher: Any) -> None:
        """Write into ``run`` what was done; its first gain, or else its first note, is the line on the node."""
        raise NotImplementedError

    # ---- injection ----

    def inject(self, patcher: Any) -> None:
        """The model is being loaded."""
        model = network_of(patcher)
        self.attach(patcher)
        self._forget(patcher)
        # ComfyUI ejects what it knows of; it does not know of a clone that is collected while it is loaded.
        finalizer = weakref.finalize(patcher, _detach, self.binding, weakref.ref(model))
        finalizer.atexit = False
        self._finalizers[patcher] = finalizer

    def eject(self, patcher: Any) -> None:
        """The model is being unloaded, saved or patched."""
        self._forget(patcher)
        self.binding.detach(network_of(patcher))

    def _forget(self, patcher: Any) -> None:
        finalizer = self._finalizers.pop(patcher, None)
        if finalizer is not None:
            finalizer.detach()

    # ---- the record ----

    def before_run(self, patcher: Any) -> None:
        if self._run is None:
            self.begin(patcher)
            device, prompt = str(patcher.load_device), host.prompt_id()
            self._run = Run(self.subject, self.part, self.settings, device, self.unique_id, prompt)

    def after_run(self, patcher: Any) -> None:
        """Sampling is over, also after an error."""
        run, self._run = self._run, None
        if run is None:
            return
        self.describe(run, patcher)
        if not self.is_quiet or run.gains or run.warnings:
            run = runs.remember(run)
            run.finish()
            gain.say(run)


def network_of(patcher: Any) -> nn.Module:
    return patcher.model.diffusion_model


def install(patcher: Any, injection: Injection) -> None:
    """Let ComfyUI inject and eject it with this clone; one of the same key that the clone had is replaced."""
    from comfy.patcher_extension import CallbacksMP, PatcherInjection

    patcher.set_injections(injection.key, [PatcherInjection(injection.inject, injection.eject)])
    callbacks = {CallbacksMP.ON_PRE_RUN: injection.before_run, CallbacksMP.ON_CLEANUP: injection.after_run}
    for event, callback in callbacks.items():
        patcher.remove_callbacks_with_key(event, injection.key)
        patcher.add_callback_with_key(event, injection.key, callback)


def _detach(binding: Any, reference: weakref.ref[nn.Module]) -> None:
    model = reference()
    if model is not None:
        binding.detach(model)
