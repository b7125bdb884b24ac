"""Node: Pascal VAE Attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .comfy import host, inputs
from .comfy.objects import attributes, is_innermost, replace_functions
from .engine.engine import Engine, PatchSettings, left_off
from .engine.meter import not_finite
from .patches.bands import AS_IT_IS, METHODS, MODES, NEEDED, Estimate, InBands
from .patches.replacements import Replace, Sites, channels_first, in_run, located, whole_call
from .reporting.words import dtype_text

_WHOLE = ("decode", "encode", "decode_tiled", "encode_tiled")  # of VAEs, and of the networks in them


class PascalVAEAttention(inputs.PascalNode):
    """VAE -> VAE: decoding and encoding in bands where they do not fit, attention by the fastest exact route."""

    DESCRIPTION = (
        "For out-of-memory errors at the end of a run, without the seams and colour shifts of tiles: where decoding or "
        "encoding does not fit, every layer is computed in bands of rows or frames, exactly. Attention never stores "
        "its whole score matrix. For black images: an attention output that is not finite is recomputed in float32, "
        "and if the NaN comes from elsewhere, the node says where. When bypassed, the VAE is exactly the original."
    )
    SEARCH_ALIASES = inputs.aliases(
        "vae decode, vae encode, tiled, seams, out of memory, black image, nan, low vram, pascal, gtx 1080, p40"
    )
    RETURN_TYPES = ("VAE",)
    OUTPUT_TOOLTIPS = ("The patched VAE. Connect it to VAE Decode or VAE Encode.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
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
        self, vae: Any, route: str, budget_mib: int, nan_guard: bool, unique_id: str | None = None, decode: str = NEEDED
    ) -> tuple[Any]:
        """A copy of ``vae`` that decodes and encodes in bands and whose attention is ours; ``vae`` itself where there
        is nothing to patch."""
        settings = PatchSettings(inputs.config(route, budget_mib), min_keys=0, nan_guard=nan_guard)
        patched, line = patched_vae(vae, settings, decode, unique_id)
        host.say("; ".join(filter(None, [left_off(settings.config), line])), unique_id)
        return (patched,)


def patched_vae(vae: Any, settings: PatchSettings, decode: str, unique_id: str | None) -> tuple[Any, str]:
    """The VAE that the node returns, and a sentence about it."""
    network = _network_of(vae)
    engine = Engine(settings, type(network).__name__, "VAE", unique_id)
    methods = () if decode == AS_IT_IS else METHODS
    estimates: dict[str, Estimate | None] = {name: getattr(vae, f"memory_used_{name}", None) for name in methods}
    sites = _sites(engine, network, decode, estimates)
    text = sites.status("VAE") if sites.blocks or not methods else f"{engine.subject} has no attention"
    if not sites.blocks and not methods:
        return vae, text
    patched = copy.copy(vae)
    patched.patcher = vae.patcher.clone()
    patched.pascal_attn = engine
    patched.__class__ = _with_runs(type(vae))  # type: ignore[arg-type]  # mypy: a class is not Hashable
    replace_functions(patched.patcher, lambda model: _sites(engine, model, decode, estimates).replacements)
    return patched, f"{text}; decoding and encoding {decode}" if methods else text


def _network_of(vae: Any) -> nn.Module:
    check = getattr(vae, "throw_exception_if_invalid", None)
    if check is not None:
        check()
    network, patcher = getattr(vae, "first_stage_model", None), getattr(vae, "patcher", None)
    if not isinstance(network, nn.Module) or not hasattr(patcher, "add_object_patch"):
        raise TypeError(f"vae must be a VAE of ComfyUI, got {type(vae).__name__}; use a Load VAE node of ComfyUI")
    return network


def _sites(engine: Engine, network: nn.Module, mode: str, estimates: dict[str, Estimate | None]) -> Sites:
    """The places of a VAE's network; ``estimates`` has ComfyUI's for each method that runs in bands."""

    def find(module: nn.Module) -> list[tuple[str, Replace]]:
        held: list[tuple[str, Replace]] = [(name, channels_first) for name in attributes(module)]
        return held or [("forward", located)] * is_innermost(module)

    def watch(what: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if not sites.names and not engine.run.gains and engine.run.count() == 0:
            engine.run.note(f"{what} runs as it is; this VAE has no attention")
        if not engine.settings.nan_guard or not isinstance(result, Tensor) or not not_finite([result]):
            return
        if not_finite([*args, *kwargs.values()]):
            source = "latent" if what.startswith("decode") else "image"
            engine.warn(f"the {source} given to {what} already holds NaN or infinity: the fault is before the VAE")
        else:
            engine.warn(f"{what} produced NaN or infinity in {dtype_text(result.dtype)}: start ComfyUI with --fp32-vae")

    def whole(name: str, previous: Callable[..., Any]) -> Callable[..., Any]:
        if name in estimates:
            previous = InBands(engine, network, name, mode, estimates[name], previous)
        return whole_call(previous, sites, functools.partial(watch, name))

    sites = Sites(engine, network, find)
    sites.replacements.update({name: functools.partial(whole, name) for name in _WHOLE if hasattr(network, name)})
    return sites


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
