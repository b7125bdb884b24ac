"""Capture the attention calls of a running model into one file, and load them again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class CapturedCall:
    """The arguments of one call of ``scaled_dot_product_attention``, as they came.

    Attributes:
        name: where it comes from, for tables.
        count: how many calls of this shape were seen.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    name: str = ""
    count: int = 1
