"""Transformers: ``patch_transformers()`` registers this package as a named attention implementation.

    from pascal_attn_core import patch_transformers
    patch_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="pascal_chunked")

It registers the attention **and** its mask function: without the latter Transformers passes no mask at all, and padding
and sliding windows would be ignored. Needs Transformers 4.53 or newer. Neither scores nor a mask of L*S elements are
stored, except where the model itself needs one: a position bias (T5), a 4-D mask passed by hand,
``output_attentions=True``, and masks other than causal and padding inside a graph that torch.compile traces. Models
with their own attention code keep using it, which the log names. Continuous batching (``model.generate_batch``) is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention import sdpa, sdpa_with_lse
from ..config import AttentionConfig, config_of, default_config
from ..patching.patch import Patch, PatchGroup, replaced
from .call import Masked, refuse_what_we_do_not_know, weights, with_query_sinks
from .mask import HostMask, pascal_mask

__all__ = [
    "make_hf_attention_fn",
    "pascal_mask",
    "patch_transformers",
    "register_with_transformers",
]

# Transformers treats names with these parts specially.
_RESERVED = ("sdpa", "flash", "flex_attention", "paged|", "/")


def patch_transformers(name: str = "pascal_chunked", *, config: AttentionConfig | None = None) -> Patch:
    """Make ``attn_implementation=name`` (also ``model.set_attn_implementation(name)``) run through this package.

    Args:
        name: must not be "eager" nor contain "sdpa", "flash", "flex_attention", "paged|" or "/", which have a meaning
            in Transformers. Registering a name again replaces its previous function.
        config: how to compute; None = the default.
    Returns:
        A Patch; ``remove()`` unregisters the name, or restores its previous function. After that, models still set to
        this name cannot run until another implementation is set.
    Raises:
        ImportError: Transformers is missing or older than 4.53.
        ValueError, TypeError: an unusable name, or config is no AttentionConfig.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    if not name or name == "eager" or any(part in name for part in _RESERVED):
        raise ValueError(f"name must not be 'eager' nor contain any of {list(_RESERVED)}, got {name!r}")
    config_of(config)  # or raises
    attention = _attention_by(config)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return pascal_mask(*args, **kwargs)  # a new object for each registration, like the attention

    with PatchGroup(f"Transformers attention {name!r}") as group:
        for interface, function in zip(_interfaces(), (attention, mask)):
            group.add(replaced(interface._global_mapping, name, function))
    return group.patch()


def register_with_transformers(tile_size: int | str | None = "auto", name: str = "pascal_chunked") -> Patch:
    """:func:`patch_transformers` with the argument of pascal-attn, see :func:`make_hf_attention_fn`."""
    return patch_transformers(name, config=_config_of(tile_size))


def make_hf_attention_fn(tile_size: int | str | None = "auto") -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function alone, with the signature of ``AttentionInterface``::

        fn(module, query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv], attention_mask, scaling, ...)
            -> (output [B, L, Hq, Dv], None, or the weights [B, Hq, L, S] if output_attentions=True is passed)

    Args:
        tile_size: None or "auto" = the fastest route, with tiles chosen from device, shapes and budget. A number forces
            tiles of that many tokens. pascal-attn's default is 64; the tile size changes the time (64 is several times
            slower), not the result, so the default here is "auto".
    Raises:
        ValueError, TypeError: tile_size is neither a positive whole number, None nor "auto".
    """
    return _attention_by(_config_of(tile_size))


def _config_of(tile_size: int | str | None) -> AttentionConfig | None:
    if isinstance(tile_size, str) and tile_size != "auto":
        raise ValueError(f"tile_size must be a whole number, None or 'auto', got {tile_size!r}")
    if tile_size is None or isinstance(tile_size, str):
        return None
    return replace(default_config(), route="tiled", q_block=tile_size, kv_block=tile_size)


def _attention_by(config: AttentionConfig | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function to register; see :func:`make_hf_attention_fn` for its signature."""

    def pascal_attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | HostMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_what_we_do_not_know(kwargs)
        sinks = kwargs.get("sinks")
        masked = Masked.of(module, query, key, value, attention_mask, is_causal).with_bias(position_bias)
        options: dict[str, Any] = masked.options() | {"scale": scaling, "softcap": softcap}
        options |= {"sinks": None if s_aux is None else s_aux.flatten(), "enable_gqa": query.shape[1] != key.shape[1]}
        tensors = (query, masked.key, masked.value, masked.mask, dropout)
        lse: Any = None
        if sinks is None:
            out = sdpa(*tensors, **options, config=config)
        else:
            out, lse = sdpa_with_lse(*tensors, **options, config=config)
            out = with_query_sinks(out, lse, sinks)
        if kwargs.get("head_mask") is not None:  # scaling a head's probabilities scales its output
            out = out * kwargs["head_mask"]
        probs = None
        if kwargs.get("output_attentions"):
            probs = weights(query, key, masked, options)
            probs = probs if sinks is None else with_query_sinks(probs, lse, sinks)
        return out.transpose(1, 2).contiguous(), probs

    return pascal_attention_forward


# ---- registering ---------------------------------------------------------------------------------------------------


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"transformers must be installed, 4.53 or newer ({error})") from error
    return AttentionInterface, AttentionMaskInterface
