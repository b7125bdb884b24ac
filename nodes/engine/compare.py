"""The host's own function on the host's own arguments, for a few queries of a call: what ours must equal.

A result can be exact for other arguments than the host's, if these were read otherwise than the host reads them. So
rows of each new kind of call are computed by the host's function too, from the arguments as they came: sliced, but
neither split into heads nor reordered here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core.reference.checks import Gap, gap
from ..comfy import host
from ..comfy.layout import NAMES, bound, is_container

ROWS = 16
_WHOLE_BYTES = 32 << 20  # float32 copies of key and value up to this size: with all heads; beyond, the last head alone
_MOST_BYTES = 256 << 20  # and beyond this not at all


@dataclass(frozen=True)
class Difference:
    """How far our rows of one call were from the host's.

    Attributes:
        function: the host's function, ``"attention_pytorch"``.
        gap: the distance of our rows from the host's; rows in which the host's own is not finite do not count.
        dtype: number format of the call; the host's function was given the same numbers in float32.
    """

    function: str
    gap: Gap
    dtype: torch.dtype

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference; another reading of the arguments changes the leading digits."""
        return self.gap.is_rounding(self.dtype)

    def text(self) -> str:
        """``"1.2e-07 away from ComfyUI's attention_pytorch (values up to 1.5)"``."""
        return f"{self.gap.error:.2g} away from {self.function} (values up to {self.gap.largest:.2g})"


def with_host(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], ours: Tensor) -> Difference | None:
    """A call of ComfyUI's attention functions; ``ours`` in the layout that the host wants. None = too large to compare.

    Raises:
        Exception: whatever the host's function raises.
    """
    given = bound(args, kwargs)
    query, key, value, heads, mask = (given[name] for name in ("q", "k", "v", "heads", "mask"))
    by_head = bool(given["skip_reshape"])
    tokens = query.shape[2 if by_head else 1]
    size = 4 * (key.numel() + value.numel())
    last_head = size > _WHOLE_BYTES
    if (size / heads if last_head else size) > _MOST_BYTES:
        return None
    rows = _rows(tokens, query.device)
    sliced: dict[str, Any] = {"q": query.index_select(2 if by_head else 1, rows), "k": key, "v": value}
    sliced["mask"] = None if mask is None else _mask_rows(mask, rows)
    if last_head:
        head_dim = query.shape[-1] if by_head or query.dim() == 4 else query.shape[-1] // heads
        sliced = {name: _last_head(name, part, by_head, head_dim) for name, part in sliced.items()}
        sliced |= {"heads": 1, "enable_gqa": False}
    sliced = {name: _in_float32(part) for name, part in sliced.items()}
    reference, name = host.exact_attention(function, plain=mask is None and "scale" not in given)
    # The arguments as they came, with the slices in place of the tensors; without what would lead back to us.
    by_position = [sliced.get(name, value) for name, value in zip(NAMES, args)]
    by_name = {name: sliced.get(name, value) for name, value in kwargs.items() if name != "transformer_options"}
    assert not any(map(is_container, [*by_position, *by_name.values()]))
    right = reference(*by_position, **by_name)
    if given["skip_output_reshape"]:
        part = ours.index_select(2, rows)
        part = part[:, -1:] if last_head else part
    else:
        part = ours.index_select(1, rows)
        part = part[..., -(part.shape[-1] // heads) :] if last_head else part
    return Difference(name, gap(part, right), query.dtype)


def _rows(tokens: int, device: torch.device) -> Tensor:
    """Queries spread over all tokens."""
    count = min(ROWS, tokens)
    return torch.tensor([i * (tokens - 1) // max(1, count - 1) for i in range(count)], device=device)


def _mask_rows(mask: Tensor, rows: Tensor) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask.index_select(-2, rows)


def _last_head(name: str, part: Any, by_head: bool, head_dim: int) -> Any:
    if part is None or (name == "mask" and (part.dim() < 4 or part.shape[1] == 1)):
        return part
    if by_head or name == "mask":
        return part[:, -1:]
    return part[:, :, -1:] if part.dim() == 4 else part[..., -head_dim:]


def _in_float32(part: Any) -> Any:
    floating = isinstance(part, Tensor) and part.is_floating_point() and part.dtype != torch.float64
    return part.float() if floating else part
