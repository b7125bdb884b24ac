"""Node: Pascal Attention Patch, which is made of what the nodes for one part each do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..pascal_attn_core.int8.float16 import Float16Binding
from ..pascal_attn_core.patching.patch import UNABLE
from .comfy import host, inputs, others
from .comfy.objects import count_blocks
from .comfy.others import AUTO
from .comfy.prompt import without_effect
from .eight_bit import DEFAULTS
from .engine.engine import Engine, PatchSettings, left_off
from .engine.runs import Run
from .ffn_chunking import LEAST_TOKENS, Chunking, chunk
from .patches import injection, int8
from .patches.attention import install
from .patches.bands import NEEDED
from .text_encoder_attention import patched_clip
from .vae_attention import patched_vae

OVERRIDE_ONLY, WHOLE_MODEL = "attention override", "whole model"
EXACT, FLOAT16, EIGHT_BIT = PRECISIONS = "exact", "float16 where it saves time", "8-bit where it saves time"


# What the inputs do, as their tooltips say it.
_TILE = "Keys per tile of the tiled route. 0 = derived from the card's L2 cache."
_KEYS = (
    "Calls with fewer keys are passed to ComfyUI, which is fast at them, unless their score matrix would "
    "exceed the memory budget. 0 = take every call."
)
_COVERAGE = (
    "auto, whole model: every attention call, both the calls that ComfyUI offers to patches and those that "
    "some models make without it. attention override: only the calls that ComfyUI offers to patches, for "
    "comparison."
)
_EARLIER = (
    "What to do if another node has patched attention before this one. auto: a patch that only computes "
    "attention (Sage, flash, ComfyUI's backend node) is replaced, and receives the calls that this node does "
    "not take; a patch that may change the result (sparse attention, masks, maps) runs first, and this node "
    "receives the calls it passes on."
)
_CHUNKED = (
    "Runs feed-forward layers on a part of the tokens at a time where a call would take more memory than a "
    "share of the card's: the same result. Pascal FFN Chunking before or after this node sets the budget."
)
_PRECISION = (
    "exact: the same image within rounding. The others are not exact; each layer is measured, and the errors are shown "
    "on this node after the run. float16 where it saves time: for models that ComfyUI runs in float32 since float16 "
    "overflows in them (Qwen-Image on RTX 20xx, V100, P100): the linear layers' products in float16, with a scale for "
    "each token; errors of about 0.04 % a layer are typical. 8-bit where it saves time: attention and linear layers "
    "in 8-bit integers, each layer where it is faster so; errors of about 1 % a layer are typical. Pascal 8-Bit runs "
    "all layers so, for the memory."
)
_ENCODER = "The text encoder, if its attention is to be patched too. A clone is patched."
_DECODER = (
    "The VAE, if its attention is to be patched too, and decoding that does not fit is to run in bands: the "
    "same image in less memory, without the seams of tiles. A copy is patched."
)


class PascalAttentionPatch(inputs.PascalNode):
    """MODEL, CLIP, VAE -> the same: attention by the fastest exact route of this card, feed-forward layers in chunks
    and decoding in bands where they would not fit."""

    DESCRIPTION = (
        "For out-of-memory errors and slow attention on GTX 9xx/10xx, P40, P100, V100, RTX 20xx, Vega, MI50, RX "
        "5000/6000 and other cards without flash attention. Attention is computed exactly and never stores the whole "
        "score matrix; feed-forward layers run in chunks, and with the VAE connected decoding runs in bands instead of "
        "tiles, where they would not fit. It picks the fastest route for each call and reports which one and why. "
        "Connect CLIP and VAE, too, if you like. Works with images and video, UNets and transformers, LoRAs and other "
        "attention patches. When bypassed, everything is exactly the original."
    )
    SEARCH_ALIASES = inputs.aliases(
        "flash attention, sdpa, low vram, out of memory, pascal, gtx 1080, p40, mi50, radeon, rocm, black "
        "image, vae decode, text encode, feed forward"
    )
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    OUTPUT_TOOLTIPS = (
        "The patched model. Connect it to the sampler.",
        "The patched text encoder, if one is connected. Connect it to CLIP Text Encode.",
        "The patched VAE, if one is connected. Connect it to VAE Decode.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        more = inputs.ADVANCED
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to patch. A clone is patched; the original is not changed."}),
                "route": inputs.route(),
                "budget_mib": inputs.budget_mib(),
                "tile_size": ("INT", {"default": 0, "min": 0, "max": 65536, "step": 1, "tooltip": _TILE, **more}),
                "coverage": ([AUTO, OVERRIDE_ONLY, WHOLE_MODEL], {"default": AUTO, "tooltip": _COVERAGE, **more}),
                "min_keys": ("INT", {"default": 1024, "min": 0, "max": 1048576, "step": 1, "tooltip": _KEYS, **more}),
                "nan_guard": inputs.nan_guard(),
            },
            "optional": {
                "earlier_patch": (others.CHOICES, {"default": AUTO, "tooltip": _EARLIER, **more}),
                "precision": (list(PRECISIONS), {"default": EXACT, "tooltip": _PRECISION}),
                "chunk_feed_forward": ("BOOLEAN", {"default": True, "tooltip": _CHUNKED, **more}),
                "clip": ("CLIP", {"tooltip": _ENCODER}),
                "vae": ("VAE", {"tooltip": _DECODER}),
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
        precision: str = EXACT,
        chunk_feed_forward: bool = True,
        clip: Any = None,
        vae: Any = None,
        unique_id: str | None = None,
        prompt: dict[str, Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Clones of what is connected with our changes; None for what is not."""
        settings = PatchSettings(inputs.config(route, budget_mib, tile_size), min_keys, nan_guard)
        patched, line = _patched_model(model, settings, unique_id, coverage, earlier_patch)
        # A node shows some 90 characters of its status: what the user must know comes first.
        unused, lines = without_effect(prompt or {}, str(unique_id)), [line]
        first = [unused and f"WITHOUT EFFECT: {unused}"]
        if chunk_feed_forward:
            lines += _chunked(patched, unique_id)
        if precision == FLOAT16:
            first.append(_in_float16(patched, unique_id))
        if precision == EIGHT_BIT:
            wanted = replace(DEFAULTS, only_faster=True, earlier_patch=earlier_patch)
            patched = int8.patch(patched, wanted, unique_id)[0]
            first.append(f"not exact: 8 bits, {DEFAULTS.text(attention=True)}")
        whole = replace(settings, config=inputs.config(route, budget_mib), min_keys=0)
        if clip is not None:
            clip, line = patched_clip(clip, whole, unique_id)
            lines.append(line)
        if vae is not None:
            vae, line = patched_vae(vae, whole, NEEDED, unique_id)
            lines.append(line)
        first.append(left_off(settings.config))
        host.say("; ".join(filter(None, first + lines)), unique_id)
        return patched, clip, vae


def _chunked(patched: Any, unique_id: str | None) -> list[str]:
    """Chunk the feed-forward layers of a clone, unless a node before this one has; what to say of it, if anything."""
    if Chunking.key in patched.injections:
        return []
    report, line = chunk(patched, 0, LEAST_TOKENS, unique_id, is_quiet=True)
    return [line] if report.count(UNABLE) < len(report.lines) else []


def _patched_model(
    model: Any, settings: PatchSettings, unique_id: str | None, coverage: str, earlier_patch: str
) -> tuple[Any, str]:
    """A clone of ``model`` with our override in front of the one it had, or behind it, and a sentence about it."""
    patched = model.clone()
    engine = Engine(settings, host.name_of_model(patched.model), "diffusion model", unique_id)
    other = install(patched, engine, earlier_patch, whole_model=coverage != OVERRIDE_ONLY)
    blocks = count_blocks(patched.get_model_object("diffusion_model"))
    return patched, "; ".join(filter(None, [f"{blocks} blocks of {engine.subject}, {engine.describe()}", other]))


class Float16Layers(injection.Injection):
    """Linear layers of a model that ComfyUI runs in float32, multiplied in float16 while the model is loaded."""

    key, part = f"{host.KEY}_float16", "float16"
    binding: Float16Binding

    def begin(self, patcher: Any) -> None:
        self.binding.restart()

    def describe(self, run: Run, patcher: Any) -> None:
        report = self.binding.report(injection.network_of(patcher))
        first, *more = report.text().splitlines()
        run.is_exact = report.is_exact
        tell = run.note if run.is_exact else run.gain
        tell(first)
        for sentence in more:
            run.note(sentence.strip())


def _in_float16(patched: Any, unique_id: str | None) -> str:
    """Let the linear layers of a fresh clone run in float16. Returns a sentence about them."""
    binding = Float16Binding(max_error=0.002)
    layers = Float16Layers(binding, host.name_of_model(patched.model), "float16 linear layers", unique_id)
    injection.install(patched, layers)
    return f"not exact: linear layers in float16, error at most {binding.options.max_error:.1%}"
