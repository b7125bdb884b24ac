"""Node: Pascal VAE Attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .comfy import host, inputs
from .comfy.objects import Make, Replacements, replace_functions
from .comfy.sites import attributes, calls_directly, host_names
from .engine.engine import Engine, PatchSettings
from .engine.watch import not_finite
from .patches.bands import AS_IT_IS, METHODS, MODES, NEEDED, Estimate, estimate_of, in_bands
from .patches.replacements import Replacement, in_run, status, warn_if_replaced, whole_call
from .patches.scope import Scope

_WHOLE = ("decode", "encode", "decode_tiled", "encode_tiled")  # of VAEs, and of the networks in them


class PascalVAEAttention:
    """VAE -> VAE: decoding and encoding in bands where they do not fit, attention by the fastest exact route."""

    DESCRIPTION = (
        "For out-of-memory errors at the end of a run, without the seams and colour shifts of tiles: where decoding or "
        "encoding does not fit, every layer is computed in bands of rows or frames, exactly. Attention never stores "
        "its whole score matrix. For black images: an attention output that is not finite is recomputed in float32, "
        "and if the NaN comes from elsewhere, the node says where. When bypassed, the VAE is exactly the original."
    )
    CATEGORY = "model/patch/attention"
    SEARCH_ALIASES = (
        "vae decode",
        "vae encode",
        "tiled",
        "seams",
        "out of memory",
        "black image",
        "nan",
        "low vram",
        "pascal",
        "gtx 1080",
        "p40",
    )
    RETURN_TYPES = ("VAE",)
    OUTPUT_TOOLTIPS = ("The patched VAE. Connect it to VAE Decode or VAE Encode.",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        decode = (
            "How decoding and encoding are computed. in bands when needed: the VAE runs as it is, but if by ComfyUI's "
            "estimate it does not fit, or if memory runs out, in bands of rows or frames: the same image in less "
            "memory, instead of ComfyUI's tiles. always in bands: the least memory, a little slower. as it is: only "
            "attention is patched. A VAE is checked on a small image first; one that cannot run in bands runs as it "
            "is, and the report says why."
        )
        return {
            "required": {
                "vae": ("VAE", {"tooltip": "The VAE to patch. A copy is patched; the original is not changed."}),
                "route": inputs.route(),
                "budget_mib": inputs.budget_mib(),
                "nan_guard": inputs.nan_guard(),
            },
            "optional": {"decode": (list(MODES), {"default": NEEDED, "tooltip": decode, **inputs.ADVANCED})},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self,
        vae: Any,
        route: str,
        budget_mib: int,
        nan_guard: bool,
        unique_id: str | None = None,
        decode: str = NEEDED,
    ) -> tuple[Any]:
        """A copy of ``vae`` that decodes and encodes in bands and whose attention is ours; ``vae`` itself where there
        is nothing to patch."""
        network = _network_of(vae)
        settings = PatchSettings(inputs.config(route, budget_mib), min_keys=0, nan_guard=nan_guard)
        engine = Engine(settings, type(network).__name__, "VAE", unique_id)
        bands = _Bands(vae, decode)
        sites = _Sites(engine, network, bands)
        blocks = len(sites.blocks) + len(sites.direct)
        host.say(_status(engine, blocks, bands), unique_id)
        if not blocks and not bands.wanted:
            return (vae,)
        patched = copy.copy(vae)
        patched.patcher = vae.patcher.clone()
        patched.pascal_attn = engine
        patched.__class__ = _with_runs(type(vae))  # type: ignore[arg-type]  # mypy: a class is not Hashable
        replace_functions(patched.patcher, lambda model: _Sites(engine, model, bands).replacements)
        return (patched,)


class _Bands:
    """The methods of a VAE's network that run in bands, and the mode that says when."""

    def __init__(self, vae: Any, mode: str):
        self.mode, self.wanted = mode, mode != AS_IT_IS
        self.estimates: dict[str, Estimate | None] = {method: estimate_of(vae, method) for method in METHODS}

    def around(self, engine: Engine, network: nn.Module, method: str, whole: Make) -> Make:
        """``whole`` with bands within, if the method can have them."""
        if not self.wanted or method not in METHODS:
            return whole
        bands = in_bands(engine, network, method, self.mode, self.estimates[method])
        return lambda previous: whole(bands(previous))


def _status(engine: Engine, blocks: int, bands: _Bands) -> str:
    if not bands.wanted:
        return status(engine, blocks, "VAE")
    text = status(engine, blocks, "VAE") if blocks else f"{engine.subject} has no attention"
    return f"{text}; decoding and encoding {bands.mode}"


def _network_of(vae: Any) -> nn.Module:
    check = getattr(vae, "throw_exception_if_invalid", None)
    if check is not None:
        check()
    network, patcher = getattr(vae, "first_stage_model", None), getattr(vae, "patcher", None)
    if not isinstance(network, nn.Module) or not hasattr(patcher, "add_object_patch"):
        raise TypeError(f"vae must be a VAE of ComfyUI, got {type(vae).__name__}; use a Load VAE node of ComfyUI")
    return network


class _Sites:
    """The places where a VAE's network computes attention, and their replacements.

    Attributes:
        blocks: modules whose attention is replaced by name.
        direct: modules that call attention where only a mode around the network sees it.
        replacements: the functions to replace, those that decode and encode among them.
    """

    def __init__(self, engine: Engine, network: nn.Module, bands: _Bands):
        scope = Scope()
        found: Replacements = {}
        for name, module in network.named_modules():
            ours = Replacement(engine, scope, name)
            for attribute in attributes(module):
                found[f"{name}.{attribute}".lstrip(".")] = ours.channels_first
            if host_names(type(module)):
                found[f"{name}.forward".lstrip(".")] = ours.named
        self.blocks = sorted({name.rpartition(".")[0] for name in found})
        self.direct = calls_directly(network, self.blocks)
        names = list(found)
        for name in [name for name in _WHOLE if hasattr(network, name)]:
            found[name] = bands.around(engine, network, name, _whole(engine, scope, network, name, names))
        self.replacements = found


def _whole(engine: Engine, scope: Scope, network: nn.Module, what: str, names: list[str]) -> Make:
    """A whole decoding or encoding: watched, and with a word of warning where another node took our place."""

    def watch(args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if not names and not engine.run.gains and engine.run.count() == 0:
            engine.run.note(f"{what} runs as it is; this VAE has no attention")
        warn_if_replaced(engine, network, names)
        if engine.settings.nan_guard:
            _say_where_nan_comes_from(engine, what, [*args, *kwargs.values()], result)

    return functools.partial(whole_call, engine=engine, scope=scope, watch=watch, catches=True)


def _say_where_nan_comes_from(engine: Engine, what: str, given: list[Any], result: Any) -> None:
    if not isinstance(result, Tensor) or not not_finite([result]):
        return
    if not_finite(given):
        source = "latent" if what.startswith("decode") else "image"
        engine.warn(f"the {source} given to {what} already holds NaN or infinity: the fault is before the VAE")
    else:
        dtype = str(result.dtype).removeprefix("torch.")
        engine.warn(f"{what} produced NaN or infinity in {dtype}: start ComfyUI with --fp32-vae")


@functools.cache
def _with_runs(kind: type) -> type:
    """A subclass of the host's VAE class whose decodings and encodings, all their tiles together, are one run each."""
    if hasattr(kind, "_pascal_attn_runs"):
        return kind

    def one_run(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with in_run(self.pascal_attn):
                return function(self, *args, **kwargs)

        return method

    methods = {name: one_run(getattr(kind, name)) for name in _WHOLE if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "_pascal_attn_runs": True, "__module__": kind.__module__})
