"""The changes of Pascal Attention Patch to a clone of a diffusion model: override, wrappers and callbacks."""

from __future__ import annotations

import functools
from typing import Any

from ..comfy import host, memory_required
from ..comfy.by_name import OVERRIDE
from ..comfy.host import KEY
from ..comfy.others import AUTO, REPLACE, name_of, runs_first
from ..engine.engine import Engine
from ..reporting import gain
from .int8_attention import layers_in
from .override import Scope, by_engine, engine_of, make_override, make_wrapper, previous_of

# What ComfyUI runs, from the outside in, and how attention calls there are named if they have no name of their own:
# some models refine the prompt before the first step, ControlNets are called beside the model; and on multi-GPU hosts
# the model itself runs in a thread of its own.
_AROUND = {"OUTER_SAMPLE": "preparation call", "CALC_COND_BATCH": "ControlNet call", "APPLY_MODEL": "call"}


def install(patched: Any, engine: Engine, earlier: str, *, whole_model: bool) -> str:
    """Put our override, wrappers and callbacks on a fresh clone; our patch that it had is replaced. Returns what
    becomes of another pack's override that it had, by the choice ``earlier`` of ``others``; "" = it had none."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    options = host.own_options(patched)
    before = previous_of(options.get(OVERRIDE))
    behind = runs_first(before, earlier)
    patched.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    patched.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    scope = Scope()
    for around in (*_AROUND, "PREPARE_SAMPLING"):
        patched.remove_wrappers_with_key(getattr(WrappersMP, around), KEY)
    for around, word in _AROUND.items():
        if whole_model or around == "APPLY_MODEL":
            wrapper = make_wrapper(engine, scope, word, catches=whole_model)
            patched.add_wrapper_with_key(getattr(WrappersMP, around), KEY, wrapper)
    answer = functools.partial(by_engine, engine, scope)
    options[OVERRIDE] = override = make_override(engine, answer, before, earlier)
    if override.memory_efficient:
        patched.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, memory_required.preparing)
        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, memory_required.batching)
    patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, lambda patcher: _before_run(engine, patcher))
    other = "" if before is None else f"{name_of(before)} {'runs before this node' if behind else 'is replaced'}"
    after = functools.partial(_after_run, engine, other=other, behind=behind)
    patched.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, after)
    return other


def _before_run(engine: Engine, patcher: Any) -> None:
    engine.share(*host.shared_over(patcher))
    engine.begin()


def _after_run(engine: Engine, patcher: Any, other: str, behind: bool) -> None:
    if not engine.is_running:  # something failed before the sampling began
        return
    current = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    run = engine.run
    if run.count() == 0 and engine.is_compiled:
        run.note("compiled by torch.compile: attention runs inside the compiled graph, where calls are not counted")
    elif run.count() == 0 and layers_in(current) is not None:
        run.note("every attention call was computed in 8 bits, by Pascal 8-Bit")
    elif run.count() == 0 and not engine.failure:
        engine.warn(f"no attention call reached the patch: {_why_none(engine, current, behind)}")
    if other and run.count():
        run.note(f"{other} ('earlier_patch' changes the order)")
    finished = engine.end()
    if finished is not None:
        gain.say(finished)


def _why_none(engine: Engine, current: Any, behind: bool) -> str:
    if current is None:
        return "another node removed it; put that node before Pascal Attention Patch"
    if engine_of(current) is not engine:
        return f"{name_of(current)} replaced it and passes nothing on; put that node before Pascal Attention Patch"
    if behind:
        what = f"{name_of(previous_of(current))}, set before it, passes none on"
        return f"{what}; set 'earlier_patch' to '{REPLACE}' if that patch does not change the result"
    return f"this model does not offer its attention calls to patches; try coverage '{AUTO}'"
