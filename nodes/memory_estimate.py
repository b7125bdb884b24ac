"""Node: Pascal Memory Estimate."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch

from ..pascal_attn_core.machine.device import MIB, device_info
from .comfy import host as _host
from .comfy import inputs
from .estimate.figures import Figures, Host
from .estimate.inputs import Conditioning, Latent, prompts
from .estimate.largest import Axis, Size, axes_of, bisected, find_largest
from .estimate.text import Subject, largest_text, need_text, text_of
from .estimate.trace import ModelCall, trace_model
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
        wanted, device = Latent.of(model, latent), model.load_device
        free, total = _host.free_and_total_bytes(device)
        copies = batch_copies(model, wanted, free) if guidance else 1
        name = _host.name_of_model(model.model)
        with torch.random.fork_rng(devices=[]):  # the workflow's random numbers are not ours
            followed = follow(model, wanted, conditioning, copies)
            if isinstance(followed, str):
                _host.say(f"memory estimate: {name}: {followed}", unique_id, f"{name}: no estimate")
                return f"{name}: {followed}", 0.0
            attention = _host.attention_name()
            host = Host(device, device_info(device), "" if attention == SDPA else attention, budget_from(total))
            available = min(total, free + model.loaded_size())
            subject = Subject(name, wanted.shapes, model.model_size(), available, total)
            trace = functools.partial(_traced, followed, model, wanted, conditioning)
            axes = axes_of_latent(model, wanted) if available else []
            fits = [(axis, find_largest(axis, trace, host, subject.room)) for axis in axes]
        found = Figures(followed, host)
        text, fits = text_of(found, subject), [(axis, ways) for axis, ways in fits if ways]
        if axes:
            decode = vae and bisected(axes[0].sizes, functools.partial(_bytes_of_decoding, vae), available)
            text += "\n" + largest_text(fits, subject, decode)
        _host.say(f"memory estimate: {name} {need_text(found)}", unique_id, f"{name}: {need_text(found)}")
        return text, max(0.0, found.saved_bytes / MIB)


def _bytes_of_decoding(vae: Any, size: Size) -> int:
    return int(vae.memory_used_decode(size.shape, vae.vae_dtype))


def axes_of_latent(model: Any, latent: Latent) -> list[Axis]:
    """The axes along which the latent may grow; none for several streams, whose sizes depend on each other."""
    if len(latent.shapes) != 1 or len(latent.shapes[0]) not in (4, 5):
        return []
    form = getattr(model.model, "latent_format", None)
    pixels = getattr(form, "spacial_downscale_ratio", 8)
    frames = getattr(form, "temporal_downscale_ratio", 4)
    return axes_of(tuple(int(size) for size in latent.shapes[0]), pixels, frames)


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
            if call.attention:
                return call
            reason = "it does not offer its attention calls to patches"
    return f"no estimate, since the model could not be traced ({reason})."


def _traced(
    known: ModelCall, model: Any, latent: Latent, conditioning: Conditioning, shape: tuple[int, ...]
) -> ModelCall:
    if shape == tuple(latent.shapes[0]):
        return known
    samples = torch.zeros(shape)
    found = follow(model, Latent(samples, [samples.shape]), conditioning, known.copies)
    return ModelCall() if isinstance(found, str) else found


def batch_copies(model: Any, latent: Latent, free_bytes: int) -> int:
    """2 if ComfyUI will compute prompt and negative prompt in one batch, else 1: by its own estimate."""
    weights = max(0, model.model_size() - model.loaded_size())
    both = [2 * latent.samples.shape[0], *latent.samples.shape[1:]]
    return 2 if model.model.memory_required(both) * 1.5 < max(0, free_bytes - weights) else 1


def _length(prompt: dict[str, Any]) -> int:
    text = prompt.get("cross_attn")
    return math.prod(text.shape[:-1]) if isinstance(text, torch.Tensor) else 0
