"""The calls of a model by arithmetic from its configuration, where it cannot be traced."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...pascal_attn_core.ffn.find import find_ffn
from .trace import AttentionShape, FfnShape, ModelCall

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_WIDTHS = ("hidden_size", "inner_dim", "dim", "hidden_dim", "inner_size")


def arithmetic(
    network: Any, config: dict[str, Any], latent: tuple[int, ...], text_tokens: int, dtype: Any
) -> ModelCall:
    """Self-attention over all tokens of the latent and the prompt, and the widest feed-forward layer over them.

    Args:
        network: the diffusion model, of which sizes are read.
        config: its configuration as its loader keeps it.
        latent: ``[B, C, (frames,) height, width]``.
    """
    patch = _number(network, config, ("patch_size",), default=1 if "model_channels" in config else 2)
    spatial = [size if i < len(latent) - 4 else math.ceil(size / patch) for i, size in enumerate(latent[2:])]
    tokens = math.prod(spatial) + (0 if "model_channels" in config else text_tokens)
    width = _number(network, config, (*_WIDTHS, "model_channels"), default=1536)
    heads = _number(network, config, _HEADS, default=max(1, width // 64))
    heads = heads if heads > 0 else max(1, width // max(1, int(config.get("num_head_channels", 64))))
    shape = (latent[0], heads, tokens, max(1, width // heads))
    live = 4 * latent[0] * tokens * width * dtype.itemsize
    call = ModelCall([AttentionShape(shape, shape, shape, dtype, False, live)], other_bytes=live, is_rough=True)
    wide = [found for found in find_ffn(network) if not found.why_not]
    for name, module, _ in wide[:1]:
        inner = max(getattr(layer, "out_features", 0) for layer in module.modules())
        extra = 2 * latent[0] * tokens * inner * dtype.itemsize
        call.ffn.append(FfnShape(name, type(module).__name__, (latent[0], tokens, width), dtype, extra, live))
    return call


def _number(network: Any, config: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    for source in (config.get, lambda name: getattr(network, name, None)):
        for name in names:
            value = source(name)
            value = value[-1] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def dtype_of(model: Any) -> torch.dtype:
    """The number format that a model computes in."""
    found = model.get_dtype_inference() if hasattr(model, "get_dtype_inference") else getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32
