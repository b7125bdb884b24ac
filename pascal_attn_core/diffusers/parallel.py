"""diffusers' context parallelism with our attention: what ``enable_parallelism`` has set up is used, and
``context_parallel_sdpa`` computes in place of diffusers' templates.

Those gather the keys of all processes before a ring begins, take no causal rule and no GQA, need a backend that returns
lse, and apply this process's part of a mask to the keys of every other. Here the keys travel, and masks are gathered.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..parallel import context_parallel_sdpa
from .redirect import this_thread


def attend_in_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    _parallel_config: Any,
    **operators: Any,
) -> Tensor:
    """Takes the place of diffusers' ``_templated_context_parallel_attention``.

    Args:
        query: ``[B, L, Hq, D]``, this process's tokens; key ``[B, S, Hkv, D]``; value ``[B, S, Hkv, Dv]``.
        operators: the forward and backward pass of diffusers' backend, which are not needed.
    """
    redirect, sharing = this_thread.redirect, _parallel_config.context_parallel_config
    assert redirect is not None
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if dropout_p or return_lse:
        raise ValueError(f"dropout_p must be 0 and return_lse False across processes, got {dropout_p} and {return_lse}")
    groups: dict[str, Any] = {
        "ring": sharing._ring_mesh.get_group() if sharing.ring_degree > 1 else None,
        "ulysses": sharing._ulysses_mesh.get_group() if sharing.ulysses_degree > 1 else None,
        "uneven": getattr(sharing, "ring_anything", False) or getattr(sharing, "ulysses_anything", False),
    }
    arguments = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return context_parallel_sdpa(*arguments, **groups, config=redirect.config).transpose(1, 2)
