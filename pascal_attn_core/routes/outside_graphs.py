"""Calls that torch.compile leaves between two graphs. Imported only while something is being compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Options, check_call
from ..config import AttentionConfig, default_config
from ..lazy_mask import LazyMask
from .run import run


@torch.compiler.disable
def sdpa_with_an_unregistered_mask_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: LazyMask,
    options: Options,
    config: AttentionConfig | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None): a graph cannot hold a LazyMask whose rule is not registered by
    :func:`~pascal_attn_core.lazy_mask.mask_rule`."""
    call = check_call(query, key, value, attn_mask, options)
    return run(call, default_config() if config is None else config, with_lse=with_lse)
