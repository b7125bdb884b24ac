"""Conditioning without a text encoder, a latent that is never cached, and a file of what came out."""

from typing import ClassVar

import torch

from .model_nodes import RECORDS, Probe


class _Anything(str):
    """A type name that equals every other."""

    def __ne__(self, other):
        return False


ANYTHING = _Anything("*")
COUNT = ("INT", {"default": 0, "min": 0, "max": 1 << 30})
TEXT = ("STRING", {"default": ""})


class _Fresh(Probe):
    """The host runs it again, whatever it has cached."""

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")


class ProbeCond(Probe):
    """Random conditioning of any width; ``mask`` hides the second half of the tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {
        **dict.fromkeys(("tokens", "dim", "pooled", "seed"), COUNT),
        "mask": ("BOOLEAN", {"default": False}),
    }

    def run(self, tokens, dim, pooled, seed, mask):
        generator = torch.Generator().manual_seed(seed)
        extra = {}
        if pooled:
            extra["pooled_output"] = torch.randn(1, pooled, generator=generator)
        if mask:
            keep = torch.ones(1, tokens, dtype=torch.int64)
            keep[:, tokens // 2 :] = 0
            extra["attention_mask"] = keep
        return ([[torch.randn(1, tokens, dim, generator=generator), extra]],)


class ProbeSound(Probe):
    """An empty latent of sound as LTX-2 has it, of any length."""

    RETURN_TYPES = ("LATENT",)
    INPUTS: ClassVar = {"length": COUNT}

    def run(self, length):
        return ({"samples": torch.zeros(1, 8, length, 16), "type": "audio"},)


class ProbeFresh(_Fresh):
    """Hands its input on, and makes the host run what follows again."""

    RETURN_TYPES = (ANYTHING,)
    INPUTS: ClassVar = {"value": (ANYTHING,)}

    def run(self, value):
        return (value,)


def _tensors(value):
    """LATENT, IMAGE, CONDITIONING or nested latents as a flat list of tensors."""
    if isinstance(value, dict):
        value = value["samples"]
    if getattr(value, "is_nested", False):
        return [tensor.detach().cpu().clone() for tensor in value.unbind()]
    if isinstance(value, list):
        return [tensor for part, _ in value for tensor in _tensors(part)]
    return [value.detach().cpu().clone()]


class ProbeCapture(_Fresh):
    """Writes a LATENT, IMAGE, CONDITIONING or STRING to ``path`` (torch.save), with the counts kept under ``tag``."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    INPUTS: ClassVar = {"value": (ANYTHING,), "path": TEXT, "tag": TEXT}

    def run(self, value, path, tag):
        result = {"text": value, "tensors": []} if isinstance(value, str) else {"text": "", "tensors": _tensors(value)}
        torch.save({**result, "counts": RECORDS.pop(tag, {})}, path)
        return {"ui": {"text": [path]}}


class ProbeFlash(Probe):
    """This class holds what a pack does whose attention is flash_attn: it imports it when it is needed."""

    RETURN_TYPES = ("LATENT",)
    INPUTS: ClassVar = {"latent": ("LATENT",), "seed": COUNT}

    def run(self, latent, seed):
        from flash_attn import flash_attn_func

        query = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed))
        return ({"samples": flash_attn_func(query, query, query, causal=True)},)
