"""Conditioning without a text encoder, a latent that is never cached, and a file of what came out."""

import torch

from .model_nodes import RECORDS


class ProbeCond:
    """Random conditioning of any width; ``mask`` hides the second half of the tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "probe"

    @classmethod
    def INPUT_TYPES(cls):
        count = ("INT", {"default": 0, "min": 0, "max": 1 << 20})
        return {
            "required": {
                "tokens": count,
                "dim": count,
                "pooled": count,
                "seed": count,
                "mask": ("BOOLEAN", {"default": False}),
            }
        }

    def make(self, tokens, dim, pooled, seed, mask):
        generator = torch.Generator().manual_seed(seed)
        extra = {}
        if pooled:
            extra["pooled_output"] = torch.randn(1, pooled, generator=generator)
        if mask:
            keep = torch.ones(1, tokens, dtype=torch.int64)
            keep[:, tokens // 2 :] = 0
            extra["attention_mask"] = keep
        return ([[torch.randn(1, tokens, dim, generator=generator), extra]],)


class ProbeSound:
    """An empty latent of sound as LTX-2 has it, of any length."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "probe"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"length": ("INT", {"default": 16, "min": 1, "max": 1 << 20})}}

    def make(self, length):
        return ({"samples": torch.zeros(1, 8, length, 16), "type": "audio"},)


class _Anything(str):
    """A type name that equals every other."""

    def __ne__(self, other):
        return False


ANYTHING = _Anything("*")


class ProbeFresh:
    """Hands its input on, and makes the host run what follows again, whatever it has cached."""

    RETURN_TYPES = (ANYTHING,)
    FUNCTION = "hand_on"
    CATEGORY = "probe"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": (ANYTHING,)}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def hand_on(self, value):
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


class ProbeCapture:
    """Writes a LATENT, IMAGE, CONDITIONING or STRING to ``path`` (torch.save), with the counts kept under ``tag``."""

    RETURN_TYPES = ()
    FUNCTION = "write"
    CATEGORY = "probe"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        text = ("STRING", {"default": ""})
        return {"required": {"value": (ANYTHING,), "path": text, "tag": text}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def write(self, value, path, tag):
        if isinstance(value, str):
            result = {"text": value, "tensors": []}
        else:
            result = {"text": "", "tensors": _tensors(value)}
        torch.save({**result, "counts": RECORDS.pop(tag, {})}, path)
        return {"ui": {"text": [path]}}


class ProbeFlash:
    """What a pack does whose attention is flash_attn: it imports it when it is needed."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "probe"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "seed": ("INT", {"default": 0, "min": 0, "max": 1 << 30})}}

    def make(self, latent, seed):
        from flash_attn import flash_attn_func

        query = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed))
        return ({"samples": flash_attn_func(query, query, query, causal=True)},)
