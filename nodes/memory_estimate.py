"""Node: Pascal Memory Estimate."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch

from ..pascal_attn_core.device import MIB, device_info
from .attention_patch import name_of_model
from .comfy import host as _host
from .estimate.arithmetic import arithmetic, dtype_of
from .estimate.figures import Host, figures
from .estimate.inputs import Conditioning, Latent, guessed_conditioning, prompts
from .estimate.text import Subject, text_of
from .estimate.trace import ModelCall, trace_model
from .ffn_chunking import budget_from

log = logging.getLogger("pascal_attn")


class PascalMemoryEstimate:
    """MODEL, LATENT -> STRING, FLOAT: what sampling this latent will need, before it is sampled."""

    DESCRIPTION = (
        "Before the run: what attention and the feed-forward layers of this resolution and frame count will need, with "
        "and without the patches, beside the memory of the card. One call of the model is followed without computing "
        "it: nothing is loaded, moved or changed, and it takes a second or so."
    )
    CATEGORY = "model/patch/attention"
    SEARCH_ALIASES = ("vram", "will it fit", "out of memory", "predict memory", "resolution", "pascal", "gtx 1080")
    RETURN_TYPES = ("STRING", "FLOAT")
    RETURN_NAMES = ("estimate", "saved_mib")
    OUTPUT_TOOLTIPS = (
        "The estimate as text: what is needed, what is counted and what is not.",
        "How many MiB less the run needs at its peak with Pascal Attention Patch and Pascal FFN Chunking; 0 = they "
        "save nothing here.",
    )
    FUNCTION = "estimate"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        guidance = (
            "Whether the sampler's cfg is above 1: the negative prompt then doubles the batch, if ComfyUI finds room."
        )
        tokens = "Length of the prompt in tokens if no conditioning is connected. 0 = 77 for UNets, 256 otherwise."
        conditioning = "The prompt, for its exact length and for models that need more than a text."
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model that will sample. It is neither loaded nor changed."}),
                "latent": ("LATENT", {"tooltip": "The latent that will be sampled: its size, frames and batch count."}),
                "guidance": ("BOOLEAN", {"default": True, "tooltip": guidance}),
            },
            "optional": {
                "conditioning": ("CONDITIONING", {"tooltip": conditioning}),
                "text_tokens": ("INT", {"default": 0, "min": 0, "max": 65536, "tooltip": tokens}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def estimate(
        self,
        model: Any,
        latent: dict[str, Any],
        guidance: bool = True,
        conditioning: Conditioning | None = None,
        text_tokens: int = 0,
        unique_id: str | None = None,
    ) -> tuple[str, float]:
        """The estimate, and the MiB that the patches save."""
        wanted = Latent.of(model, latent)
        device = model.load_device
        free, total = _host.free_and_total_bytes(device)
        copies = batch_copies(model, wanted, free) if guidance else 1
        tokens = text_tokens or (77 if _is_unet(model) else 256)
        with torch.random.fork_rng(devices=[]):  # the workflow's random numbers are not ours
            call, copies, how = follow(model, wanted, conditioning, tokens, copies)
        host = Host(device, device_info(device), _own_attention(), budget_from(total))
        found = figures(call, host)
        name = name_of_model(model.model)
        text = text_of(call, found, host, Subject(name, wanted.shapes, copies, how, model.model_size(), free, total))
        need = f"{found.total_without / MIB:.0f} MiB besides its weights, {found.total_with / MIB:.0f} with the patches"
        _host.say(f"memory estimate: {name} needs {need}", unique_id, f"{name}: {need}")
        return text, max(0.0, (found.total_without - found.total_with) / MIB)


class Followed(NamedTuple):
    """The model's calls, prompts per batch, and how they were found."""

    call: ModelCall
    copies: int
    how: str


def follow(model: Any, latent: Latent, conditioning: Conditioning | None, tokens: int, copies: int) -> Followed:
    """One call of the model with ``copies`` prompts in a batch, or one where the model takes no more."""
    reason = "nothing is known of the prompts that it takes"
    for number in dict.fromkeys((copies, 1)):
        for prompt in [conditioning] if conditioning else guessed_conditioning(model, tokens):
            try:
                call = trace_model(model, latent, max(prompts(prompt), key=_length), number)
            except _host.interrupts():
                raise
            except Exception as error:  # whatever a model raises when it is followed without numbers
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                log.debug("pascal_attn: memory estimate", exc_info=True)
                continue
            if call.attention:
                whose = "the prompt given" if conditioning else f"a prompt of {tokens} tokens"
                how = f"Found by following one call of the model, with {whose}, without computing it."
                return Followed(call, number, how)
            reason = "it announces no attention call"
    config = getattr(getattr(model.model, "model_config", None), "unet_config", {})
    shape = (latent.shapes[0][0] * copies, *latent.shapes[0][1:])
    call = arithmetic(model.model.diffusion_model, config, shape, tokens, dtype_of(model.model))
    how = f"A rough estimate from the model's configuration, since the model could not be followed ({reason})."
    return Followed(call, copies, how if conditioning else f"{how} Connect the prompt's conditioning for a better one.")


def batch_copies(model: Any, latent: Latent, free_bytes: int) -> int:
    """2 if ComfyUI will compute prompt and negative prompt in one batch, else 1: by its own estimate."""
    weights = max(0, model.model_size() - model.loaded_size())
    both = [2 * latent.samples.shape[0], *latent.samples.shape[1:]]
    return 2 if model.model.memory_required(both) * 1.5 < max(0, free_bytes - weights) else 1


def _length(prompt: dict[str, Any]) -> int:
    text = prompt.get("cross_attn")
    return math.prod(text.shape[:-1]) if isinstance(text, torch.Tensor) else 0


def _is_unet(model: Any) -> bool:
    return hasattr(model.model.diffusion_model, "input_blocks")


def _own_attention() -> str:
    return "" if _host.uses_sdpa() else _host.versions()["attention"]
