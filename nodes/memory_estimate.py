"""Node: Pascal Memory Estimate."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from ..pascal_attn_core.machine.device import MIB, device_info
from .comfy import host as _host
from .comfy import inputs
from .estimate.figures import Figures, Subject, axes_of, bisected, find_largest
from .estimate.text import largest_text, need_text, text_of
from .estimate.trace import AttentionShape, Conditioning, Latent, ModelCall, prompts, trace_model
from .ffn_chunking import budget_from
from .reporting.gain import SDPA

log = logging.getLogger("pascal_attn")


class PascalMemoryEstimate(inputs.PascalNode):
    """MODEL, LATENT -> STRING, FLOAT: what sampling this latent will need before it is sampled, and the largest
    that would fit."""

    DESCRIPTION = (
        "Estimates before the run how much memory attention and the feed-forward layers will need at this resolution "
        "and frame count, with and without Pascal Attention Patch, compared with the memory of the card, and the "
        "largest resolution, frame count and batch that fit. Calls of the model are traced without computing them: "
        "nothing is loaded, moved or changed, and it takes a few seconds."
    )
    SEARCH_ALIASES = ("vram", "will it fit", "out of memory", "predict memory", "resolution", "pascal", "gtx 1080")
    RETURN_TYPES = ("STRING", "FLOAT")
    RETURN_NAMES = ("estimate", "saved_mib")
    OUTPUT_TOOLTIPS = (
        "The estimate as text: what is needed, what is counted and what is not, and the largest that fits.",
        "How many MiB less the run needs at its peak with Pascal Attention Patch; 0 = it saves nothing here.",
    )
    FUNCTION = "estimate"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        guidance = (
            "Whether the sampler's cfg is above 1: the negative prompt then doubles the batch, if ComfyUI finds enough "
            "memory."
        )
        size = "The latent that will be sampled: its size, frame count and batch size."
        vae = "The VAE that will decode: the largest image that it decodes in one piece is then shown."
        prompt = "The prompt that will be sampled: its length, and what a model is given besides text, count."
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model that will sample. It is neither loaded nor changed."}),
                "latent": ("LATENT", {"tooltip": size}),
                "conditioning": ("CONDITIONING", {"tooltip": prompt}),
                "guidance": ("BOOLEAN", {"default": True, "tooltip": guidance}),
            },
            "optional": {"vae": ("VAE", {"tooltip": vae})},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def estimate(
        self,
        model: Any,
        latent: dict[str, Any],
        conditioning: Conditioning,
        guidance: bool = True,
        vae: Any = None,
        unique_id: str | None = None,
    ) -> tuple[str, float]:
        """The estimate, and the MiB that the patch saves."""
        wanted, subject = Latent.of(model, latent), subject_of(model)
        copies = batch_copies(model, wanted) if guidance else 1

        def traced(shape: tuple[int, ...]) -> ModelCall | str:
            return follow(model, Latent(torch.zeros(shape), [shape]), conditioning, copies)

        with torch.random.fork_rng(devices=[]):  # the workflow's random numbers are not ours
            followed = follow(model, wanted, conditioning, copies)
            if isinstance(followed, str):
                _host.say(f"memory estimate: {subject.name}: {followed}", unique_id, f"{subject.name}: no estimate")
                return f"{subject.name}: {followed}", 0.0
            form = getattr(model.model, "latent_format", None)
            axes = axes_of(wanted.shapes, form) if subject.available_bytes else []
            fits = [find_largest(axis, followed, traced, subject) for axis in axes]
        found = Figures(followed, subject)
        text, needs = text_of(found, wanted.shapes), f"{subject.name} {need_text(found)}"
        if axes:
            room, sizes = subject.available_bytes, axes[0].sizes
            decode = vae and bisected(sizes, lambda size: vae.memory_used_decode(size.shape, vae.vae_dtype), room)
            text += "\n" + largest_text(zip(axes, fits), subject, decode)
        _host.say(f"memory estimate: {needs}", unique_id)
        return text, max(0.0, found.saved_bytes / MIB)


def subject_of(model: Any) -> Subject:
    """A MODEL on its card."""
    free, total = _host.free_and_total_bytes(model.load_device)
    attention = _host.attention_name()
    return Subject(
        _host.name_of_model(model.model),
        weight_bytes=model.model_size(),
        available_bytes=min(total, free + model.loaded_size()),
        total_bytes=total,
        device=model.load_device,
        info=device_info(model.load_device),
        attention="" if attention == SDPA else attention,
        ffn_budget_mib=budget_from(total),
    )


def follow(model: Any, latent: Latent, conditioning: Conditioning, copies: int) -> ModelCall | str:
    """Trace one call of the model with ``copies`` prompts in a batch, or one if it takes no more; returns a
    reason where that fails."""
    reason = ""
    for number in dict.fromkeys((copies, 1)):
        try:
            call = trace_model(model, latent, max(prompts(conditioning), key=_length), number)
        except _host.interrupts():
            raise
        except Exception as error:  # whatever a model raises when it is followed without numbers
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            log.debug("pascal_attn: memory estimate", exc_info=True)
        else:
            if call.of(AttentionShape):
                return call
            reason = "it does not offer its attention calls to patches"
    return f"no estimate, since the model could not be traced ({reason})."


def batch_copies(model: Any, latent: Latent) -> int:
    """2 if ComfyUI will compute prompt and negative prompt in one batch, else 1: by its own estimate."""
    weights = max(0, model.model_size() - model.loaded_size())
    free = max(0, _host.free_and_total_bytes(model.load_device)[0] - weights)
    both = [2 * latent.samples.shape[0], *latent.samples.shape[1:]]
    return 2 if model.model.memory_required(both) * 1.5 < free else 1


def _length(prompt: dict[str, Any]) -> int:
    text = prompt.get("cross_attn")
    return math.prod(text.shape[:-1]) if isinstance(text, torch.Tensor) else 0
