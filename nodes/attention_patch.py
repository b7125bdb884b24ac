"""Node: Pascal Attention Patch."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .comfy import host as _host
from .comfy import inputs, others
from .comfy import memory_required as _estimate_host
from .comfy.host import KEY
from .comfy.objects import Replacements, replace_functions
from .comfy.others import AUTO, REPLACE, name_of, runs_first
from .comfy.prompt import where_only_weights_go
from .comfy.second import shared_over
from .comfy.sites import by_name
from .engine.engine import Engine, Settings
from .engine.runs import PASSED
from .patches.override import OVERRIDE, engine_of, make_override, previous_of
from .patches.replacements import named_attention
from .patches.scope import Scope, make_wrapper
from .reporting.gain import status_line

OVERRIDE_ONLY, WHOLE_MODEL = "attention override", "whole model"


class PascalAttentionPatch:
    """MODEL -> MODEL: every attention call of the diffusion model by the fastest exact route of this card."""

    DESCRIPTION = (
        "Computes the model's attention exactly, without ever storing the whole score matrix: on GTX 9xx/10xx, P40, "
        "P100, V100, Vega, MI50 and RX 5000/6000 cards it saves memory where ComfyUI or PyTorch would fall back to a "
        "method that does. It picks the fastest route for each call and reports which one and why. Works with images "
        "and video, UNets and transformers, LoRAs and other attention patches. When bypassed, the model is exactly the "
        "original."
    )
    CATEGORY = "model/patch/attention"
    SEARCH_ALIASES = (
        "flash attention",
        "sdpa",
        "low vram",
        "out of memory",
        "pascal",
        "gtx 1080",
        "p40",
        "mi50",
        "radeon",
        "rocm",
        "black image",
    )
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with its attention patched. Connect it to the sampler.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        tile = (
            "Keys per tile of the tiled route. 0 = derived from the card's L2 cache. Accepts the output of Pascal Tile "
            "Size."
        )
        keys = (
            "Calls with fewer keys are passed to ComfyUI, which is fast at them, unless their score matrix would "
            "exceed the memory budget. 0 = take every call."
        )
        coverage = (
            "auto, whole model: every attention call, both the calls that ComfyUI offers to patches and those that "
            "some models make without it. attention override: only the calls that ComfyUI offers to patches, for "
            "comparison."
        )
        earlier = (
            "What to do if another node has patched attention before this one. auto: a patch that only computes "
            "attention (Sage, flash, ComfyUI's backend node) is replaced, and receives the calls that this node does "
            "not take; a patch that may change the result (sparse attention, masks, maps) runs first, and this node "
            "receives the calls it passes on."
        )
        more = inputs.ADVANCED
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "route": inputs.route(),
                "budget_mib": inputs.budget_mib(),
                "tile_size": ("INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": tile, **more}),
                "coverage": ([AUTO, OVERRIDE_ONLY, WHOLE_MODEL], {"default": AUTO, "tooltip": coverage, **more}),
                "min_keys": ("INT", {"default": 1024, "min": 0, "max": 1048576, "step": 1, "tooltip": keys, **more}),
                "nan_guard": inputs.nan_guard(),
            },
            "optional": {
                "earlier_patch": (others.CHOICES, {"default": AUTO, "tooltip": earlier, **more}),
            },
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT"},
        }

    def patch(
        self,
        model: Any,
        route: str,
        budget_mib: int,
        tile_size: int,
        coverage: str,
        min_keys: int,
        nan_guard: bool,
        earlier_patch: str = AUTO,
        unique_id: str | None = None,
        prompt: dict[str, Any] | None = None,
    ) -> tuple[Any]:
        """A clone of ``model`` with our override in front of the one it had, or behind it."""
        settings = Settings(inputs.config(route, budget_mib, tile_size), min_keys, nan_guard)
        patched = model.clone()
        diffusion_model = patched.get_model_object("diffusion_model")
        engine = Engine(settings, name_of_model(patched.model), "diffusion model", unique_id)
        before = previous_of(patched.model_options.get("transformer_options", {}).get(OVERRIDE))
        behind = runs_first(before, earlier_patch)
        install(patched, engine, before, whole_model=coverage != OVERRIDE_ONLY, behind=behind)
        blocks = count_blocks(diffusion_model)
        line = f"{blocks} blocks of {engine.subject}, {engine.describe()}"
        if before is not None:
            line += f"; {name_of(before)} {'runs before this node' if behind else 'is replaced'}"
        unused = where_only_weights_go(prompt or {}, unique_id)
        if unused:
            line += f"; WITHOUT EFFECT: {unused}"
        _host.say(line, unique_id)
        return (patched,)


# What ComfyUI runs, from the outside in, and how attention calls there are named if they have no name of their own:
# some models refine the prompt before the first step, ControlNets are called beside the model; and on multi-GPU hosts
# the model itself runs in a thread of its own.
_AROUND = {"OUTER_SAMPLE": "preparation call", "CALC_COND_BATCH": "ControlNet call", "APPLY_MODEL": "call"}


def install(patched: Any, engine: Engine, before: Any, *, whole_model: bool, behind: bool) -> None:
    """Put our override, wrappers and callbacks on a fresh clone; a patch of ours that it had is replaced."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    options = patched.model_options["transformer_options"] = patched.model_options["transformer_options"].copy()
    patched.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    patched.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    scope = Scope()
    for around in (*_AROUND, "PREPARE_SAMPLING"):
        patched.remove_wrappers_with_key(getattr(WrappersMP, around), KEY)
    for around, word in _AROUND.items():
        if whole_model or around == "APPLY_MODEL":
            wrapper = make_wrapper(engine, scope, word, catches=whole_model)
            patched.add_wrapper_with_key(getattr(WrappersMP, around), KEY, wrapper)
    override: Any = make_override(engine, scope, before, runs_first=behind)
    options[OVERRIDE] = override
    if override.memory_efficient:
        patched.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, _estimate_host.preparing)
        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, _estimate_host.batching)
    names = whole_model and not _host.uses_sdpa()  # where torch's SDPA is used, the wrapper sees these calls there
    replace_functions(patched, lambda model: _named(engine, scope, model) if names else {})
    patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, lambda patcher: _before_run(engine, patcher))
    after = functools.partial(_after_run, engine, before=before, behind=behind)
    patched.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, after)


def _named(engine: Engine, scope: Scope, model: nn.Module) -> Replacements:
    """Methods of the diffusion model's modules that call attention by its name, past the override."""
    network = model.diffusion_model
    assert isinstance(network, nn.Module)
    found: Replacements = {}
    for name, module in network.named_modules(prefix="diffusion_model"):
        for method in by_name(type(module)):
            block = name.removeprefix("diffusion_model").lstrip(".") or "model"
            found[f"{name}.{method}"] = named_attention(engine, scope, block, "by name")
    return found


def _before_run(engine: Engine, patcher: Any) -> None:
    engine.share(*shared_over(patcher))
    engine.begin()


def _after_run(engine: Engine, patcher: Any, before: Any, behind: bool) -> None:
    if not engine.is_running:  # something failed before the sampling began
        return
    current = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    run = engine.run
    if run.count() == 0 and engine.is_compiled:
        run.note("compiled by torch.compile: attention runs inside the compiled graph, where calls are not counted")
    elif run.count() == 0 and not engine.failure:
        engine.warn(f"no attention call reached the patch: {_why_none(engine, current, run.came_before)}")
    if before is not None and run.count():
        run.note(_beside(name_of(before), behind, run))
    finished = engine.end()
    if finished is not None:
        _host.say(finished.line(), engine.unique_id, status_line(finished, _host.attention_name()))


def _beside(name: str, behind: bool, run: Any) -> str:
    if behind:
        return (
            f"{name}, set before this patch, may change the result and runs first: it received {run.came_before:,} "
            f"calls; {run.count():,} calls reached this patch ('earlier_patch' changes the order)"
        )
    return (
        f"{name}, set before this patch, only computes attention and is replaced: this patch took "
        f"{run.count('taken'):,} calls, the other {run.count(PASSED):,} ('earlier_patch' changes the order)"
    )


def _why_none(engine: Engine, current: Any, came_before: int) -> str:
    if current is None:
        return "another node removed it; put that node before Pascal Attention Patch"
    if engine_of(current) is not engine:
        return f"{name_of(current)} replaced it and passes nothing on; put that node before Pascal Attention Patch"
    previous = previous_of(current)
    if came_before:
        return (
            f"{name_of(previous)}, set before it, computed all {came_before:,} calls itself; set 'earlier_patch' to "
            f"'{REPLACE}' if that patch does not change the result"
        )
    return f"this model does not offer its attention calls to patches; try coverage '{AUTO}'"


def name_of_model(model: nn.Module) -> str:
    """``"Flux"``, ``"SDXL"``: ComfyUI's class of the model; ``"SD15"``, that of its configuration, where many share it;
    its network's where there is neither."""
    kinds = type(model).__name__, type(getattr(model, "model_config", None)).__name__
    shared = ("BaseModel", "NoneType", "BASE")
    return next((kind for kind in kinds if kind not in shared), type(model.diffusion_model).__name__)


def count_blocks(model: nn.Module) -> int:
    """How many entries of the model's lists of blocks hold attention."""
    names = [name for name, module in model.named_modules() if _is_attention(module)]
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = set()
    for name in names:
        parents = [entry for entry in lists if name.startswith(f"{entry}.")]
        if parents:
            outer = min(parents, key=len)
            blocks.add((outer, name[len(outer) + 1 :].partition(".")[0]))
        else:
            blocks.add((name, ""))
    return len(blocks)


_PROJECTIONS = ({"to_q", "to_k"}, {"q", "k"}, {"qkv"}, {"to_qkv"}, {"q_proj", "k_proj"}, {"wq", "wk"}, {"linear1"})


def _is_attention(module: nn.Module) -> bool:
    children = {name for name, _ in module.named_children()}
    kind = type(module).__name__
    return any(names <= children for names in _PROJECTIONS) or kind.endswith(("Attention", "AttentionBlock"))
