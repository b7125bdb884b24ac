"""Node: Pascal Attention Patch."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import _host, _inputs
from ._engine import Engine, Settings
from ._host import KEY
from ._override import OVERRIDE, engine_of, make_override, previous_of
from ._scope import Scope, make_wrapper

OVERRIDE_ONLY, WHOLE_MODEL = "attention override", "whole model"


class PascalAttentionPatch:
    """MODEL -> MODEL: every attention call of the diffusion model by the fastest exact route of this card."""

    DESCRIPTION = (
        "Computes the model's attention exactly, without ever storing the whole score matrix: on GTX 9xx/10xx, P40, "
        "P100, V100, RX 5000/6000 and MI50 cards it saves memory where ComfyUI or PyTorch would fall back to a method "
        "that does. It picks the fastest route for each call and says which and why. Works with images and video, "
        "UNets and transformers, LoRAs and other attention patches. Bypassed, the model is exactly what it was."
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
        "black image",
    )
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with its attention patched. Give it to the sampler.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        tile = "Keys per tile of the tiled route. 0 = from the card's L2 cache. Takes the link from Pascal Tile Size."
        keys = (
            "Calls with fewer keys are left to ComfyUI, which is quick at them, unless their score matrix would be "
            "larger than the memory budget. 0 = take every call."
        )
        coverage = (
            "attention override: calls that ComfyUI announces to patches (nearly all models). whole model: also those "
            "that some models make directly; needs a ComfyUI that uses PyTorch attention, else the override works."
        )
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch; the model itself is not changed, a clone is."}),
                "route": _inputs.route(),
                "budget_mib": _inputs.budget_mib(),
                "tile_size": ("INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": tile}),
                "coverage": ([OVERRIDE_ONLY, WHOLE_MODEL], {"default": OVERRIDE_ONLY, "tooltip": coverage}),
                "min_keys": ("INT", {"default": 1024, "min": 0, "max": 1048576, "step": 1, "tooltip": keys}),
                "nan_guard": _inputs.nan_guard(),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
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
        unique_id: str | None = None,
    ) -> tuple[Any]:
        """A clone of ``model`` with our override in front of the one it had."""
        settings = Settings(_inputs.config(route, budget_mib, tile_size), min_keys, nan_guard)
        patched = model.clone()
        diffusion_model = patched.get_model_object("diffusion_model")
        engine = Engine(settings, name_of_model(patched.model), "diffusion model", unique_id)
        whole_model = coverage == WHOLE_MODEL and _host.uses_sdpa()
        _install(patched, engine, whole_model)
        blocks = count_blocks(diffusion_model)
        line = f"{blocks} blocks of {engine.subject}, {engine.describe()}"
        if whole_model:
            line += ", whole model"
        elif coverage == WHOLE_MODEL:
            function = _host.versions()["attention"]
            line += f"; not the whole model but the attention override: ComfyUI uses {function} here, not PyTorch's"
        _host.say(line, unique_id)
        return (patched,)


# What ComfyUI runs, from the outside in, and how attention calls there are named if they have no name of their own:
# some models refine the prompt before the first step, ControlNets are called beside the model; and on multi-GPU hosts
# the model itself runs in a thread of its own.
_AROUND = {"OUTER_SAMPLE": "preparation call", "CALC_COND_BATCH": "ControlNet call", "APPLY_MODEL": "call"}


def _install(patched: Any, engine: Engine, whole_model: bool) -> None:
    """Put our override, wrapper and callbacks on a fresh clone; a patch of ours that it had is replaced."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    options = patched.model_options["transformer_options"] = patched.model_options["transformer_options"].copy()
    patched.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    patched.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    scope = Scope()
    for around, word in _AROUND.items():
        kind = getattr(WrappersMP, around)
        patched.remove_wrappers_with_key(kind, KEY)
        if whole_model or around == "APPLY_MODEL":
            patched.add_wrapper_with_key(kind, KEY, make_wrapper(engine, scope, word, catches=whole_model))
    options[OVERRIDE] = make_override(engine, scope, previous_of(options.get(OVERRIDE)))
    patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, lambda patcher: _before_run(engine, patcher))
    patched.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, lambda patcher: _after_run(engine, patcher))


def _before_run(engine: Engine, patcher: Any) -> None:
    engine.begin()


def _after_run(engine: Engine, patcher: Any) -> None:
    if not engine.is_running:  # something failed before the sampling began
        return
    current = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    if engine.run.count() == 0 and engine.is_compiled:
        engine.run.note("compiled by torch.compile: attention runs inside its graph, where calls are not counted")
    elif engine.run.count() == 0 and not engine.failure:
        engine.warn(f"no attention call reached the patch: {_why_none(engine, current)}")
    finished = engine.end()
    if finished is not None:
        _host.say(finished.line(), engine.unique_id)


def _why_none(engine: Engine, current: Any) -> str:
    if current is None:
        return "another node removed it; put that node before Pascal Attention Patch"
    if engine_of(current) is not engine:
        return f"{_name_of(current)} replaced it and hands nothing on; put that node before Pascal Attention Patch"
    return f"this model announces no attention call to patches; try coverage '{WHOLE_MODEL}'"


def _name_of(function: Any) -> str:
    """``"pack.module.function"``."""
    module = str(getattr(function, "__module__", "") or "").replace("\\", "/")
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{module.rpartition('custom_nodes/')[2].rpartition('custom_nodes.')[2]}.{name}"


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
