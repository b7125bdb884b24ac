"""Node: Pascal Flash-Attn Functions."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..pascal_attn_core.observe.report import CallKey, record
from ..pascal_attn_core.patching.patch import ON, REFUSED, Patch
from ..pascal_attn_core.stand_ins import patch_imports, patch_imports_if_asked
from .comfy import host, inputs
from .comfy.inputs import ANY
from .engine import runs

SUBJECT = "flash_attn functions"
_lock = threading.Lock()
_installed: list[Patch] = []
_changes = [0]  # how often what is installed has changed


class PascalFlashAttnFunctions(inputs.PascalNode):
    """Anything -> the same: node packs that import flash_attn, sageattention or xformers find working functions."""

    DESCRIPTION = (
        "For node packs that fail with 'No module named flash_attn' (or 'sageattention', 'xformers') or "
        "'FlashAttention only supports Ampere GPUs or newer': while this is on, importing one of the three gives them "
        "exact functions of this pack that work on any card, and in float32 too. Put it before the nodes of that pack. "
        "Packs that import them while ComfyUI starts need PASCAL_ATTN_FLASH=1 in the environment instead. An installed "
        "package that can run on your card is left alone."
    )
    SEARCH_ALIASES = (
        *("flash attention", "flash_attn", "sageattention", "xformers", "ampere", "no module named", "import error"),
        *("pascal", "turing"),
    )
    RETURN_TYPES = (ANY,)
    RETURN_NAMES = ("value",)
    OUTPUT_TOOLTIPS = ("The input, unchanged.",)
    FUNCTION = "switch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        enabled = (
            "On: installed for the whole ComfyUI process, until a run with this off or until ComfyUI exits. Packs keep "
            "whatever they have already imported."
        )
        replace = (
            "Replace installed packages of the three even if they can run on your card. Off: only those that cannot."
        )
        return {
            "required": {
                "value": (ANY, {"tooltip": "Anything the other pack's nodes depend on: a model, a latent."}),
                "enabled": ("BOOLEAN", {"default": True, "tooltip": enabled}),
            },
            "optional": {"replace": ("BOOLEAN", {"default": False, "tooltip": replace, **inputs.ADVANCED})},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, enabled: bool = True, **_: Any) -> int:
        """It changes when what is installed in the process, which is no part of the graph, is not what this node asks
        for: else the node would run again in every prompt, and the sampler behind it."""
        with _lock:
            return _changes[0] + (bool(_installed) != enabled)

    def switch(self, value: Any, enabled: bool, replace: bool = False, unique_id: str | None = None) -> tuple[Any]:
        host.say(_install(replace) if enabled else _remove(), unique_id)
        return (value,)


def install_if_asked() -> None:
    """Install them if the environment has ``PASCAL_ATTN_FLASH=1``."""
    with _lock:
        patch = None if _installed else patch_imports_if_asked(around=_counted)
        if patch is not None:
            _installed.append(patch)


def _install(replace: bool) -> str:
    with _lock:
        if not _installed:
            _installed.append(patch_imports(replace=replace or None, around=_counted))
            _changes[0] += 1
        states = _installed[0].report().states
        names = ", ".join(state.name for state in states if state.state == ON)
        left = "; ".join(state.why for state in states if state.state == REFUSED)
        if not names:
            _installed.pop().remove()
    found = f"imports of {names} now find this pack's functions" if names else "nothing was changed"
    return f"flash_attn functions: {found}{left and '; '}{left}"


def _remove() -> str:
    with _lock:
        if not _installed:
            return "flash_attn functions: off"
        _installed.pop().remove()
        _changes[0] += 1
    return "flash_attn functions: off; packs keep whatever they have already imported"


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        start = time.perf_counter()
        with record() as seen:
            out = function(*args, **kwargs)
        _note(name, seen.calls, time.perf_counter() - start)
        return out

    return counted


def _note(name: str, calls: dict[CallKey, Any], seconds: float) -> None:
    """Add the calls that one function has made to the run of this prompt."""
    with _lock:
        run = _run()
    for key, stats in calls.items():
        kind = runs.CallKind(name, runs.TAKEN, key.route, key.why, key.query, key.key, key.dtype, key.mask)
        with run.lock:
            tally = run.tally(kind)
            tally.count += stats.count
            tally.elapsed_ms += 1e3 * seconds / len(calls)
            run.elapsed_s = time.time() - run.started


def _run() -> runs.Run:
    """This prompt's, a new one at its first call."""
    prompt = host.prompt_id()
    for run in runs.remembered():
        if run.subject == SUBJECT and run.prompt_id == prompt:
            return run
    run = runs.Run(SUBJECT, "flash_attn", "exact, any card", str(host.compute_device()), prompt_id=prompt)
    run.finished = True  # it has no end of its own
    runs.remember(run)
    return run
