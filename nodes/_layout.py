"""From the arguments of ComfyUI's attention functions to ``[B, H, L, D]`` tensors, and back.

ComfyUI calls ``attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
skip_output_reshape=False, **kwargs)``, positionally or by keyword as each model likes. Each of q, k and v comes as
``[B, N, H*D]`` or ``[B, N, H, D]``, all of them as ``[B, H, N, D]`` under ``skip_reshape``, each possibly inside a
container that is emptied by its reader. Nothing here imports ComfyUI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Keyword arguments that do not change the result, or whose meaning is kept here whatever their value is:
# - attn_precision asks for scores in float32, which they always are;
# - low_precision_attention and preferred_attention are hints at other kernels.
_HINTS = {"_inside_attn_wrapper", "transformer_options", "attn_precision", "low_precision_attention"}
_HINTS |= {"preferred_attention"}
_NAMES = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


class NotOurs(ValueError):
    """The call cannot be expressed as ``sdpa``; the message says why. It is handed on as it came."""


@dataclass(eq=False)
class HostCall:
    """One attention call of the host, its tensors as views ``[B, H, L, D]``.

    Attributes:
        query: ``[B, Hq, L, D]``; key ``[B, Hkv, S, D]``; value ``[B, Hkv, S, Dv]``.
        mask: None or four dimensions that broadcast to ``[B, Hq, L, S]``, bool (True = takes part) or float (added).
        scale: factor of the scores, None = 1 / sqrt(D).
        enable_gqa: there are fewer key/value heads than query heads.
        keep_heads: the host wants ``[B, H, L, D]`` back, not ``[B, L, H*D]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float | None
    enable_gqa: bool
    keep_heads: bool

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any]) -> HostCall:
        """The call with these arguments.

        Raises:
            NotOurs: an argument that is not known, or shapes that do not fit together.
        """
        given = bound(args, kwargs)
        query, key, value, heads = given["q"], given["k"], given["v"], int(given["heads"])
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            if not isinstance(tensor, Tensor):
                raise NotOurs(f"{name} is a {type(tensor).__name__}, not a tensor")
        grouped = bool(given.pop("enable_gqa", False))
        if given["skip_reshape"]:
            if not query.dim() == key.dim() == value.dim() == 4:
                raise NotOurs(f"q, k and v have {query.dim()}, {key.dim()} and {value.dim()} dimensions")
        else:
            query, key, value = _split_heads(query, key, value, heads, grouped)
        if query.shape[1] != heads:
            raise NotOurs(f"q has {query.shape[1]} heads, not {heads}")
        mask = given["mask"]
        keep_heads = bool(given["skip_output_reshape"])
        return HostCall(
            query,
            key,
            value,
            None if mask is None else four_dimensions(mask),
            given.get("scale"),
            grouped and key.shape[1] != query.shape[1],
            keep_heads,
        )

    def returned(self, out: Tensor) -> Tensor:
        """``[B, H, L, Dv]`` as the host wants it: as it is, or ``[B, L, H*Dv]``."""
        return out if self.keep_heads else out.transpose(1, 2).flatten(2)


def bound(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults filled in, containers emptied, hints left out.

    Raises:
        NotOurs: an argument is missing, doubled, or would change the result in a way that is not known here.
    """
    if len(args) > len(_NAMES):
        raise NotOurs(f"{len(args)} positional arguments")
    given: dict[str, Any] = {"mask": None, "skip_reshape": False, "skip_output_reshape": False}
    for name, value in zip(_NAMES, args):
        if name in kwargs:
            raise NotOurs(f"two values for {name}")
        given[name] = value
    for name, value in kwargs.items():
        if name in _NAMES or name in ("scale", "enable_gqa"):
            given[name] = value
        elif name not in _HINTS and value is not None and value is not False:
            raise NotOurs(f"its argument {name} is not known")
    missing = [name for name in ("q", "k", "v", "heads") if name not in given]
    if missing:
        raise NotOurs(f"no {' and no '.join(missing)}")
    for name in ("q", "k", "v"):
        given[name] = _peek(given[name])
    return given


def empty_containers(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same arguments with tensors in place of their containers, which are empty afterwards."""
    return tuple(_take(value) for value in args), {name: _take(value) for name, value in kwargs.items()}


def is_container(value: Any) -> bool:
    """Whether this is one of ComfyUI's single-owner containers of a tensor."""
    return not isinstance(value, Tensor) and hasattr(value, "take") and hasattr(value, "peek")


def _peek(value: Any) -> Any:
    return value.peek() if is_container(value) else value


def _take(value: Any) -> Any:
    return value.take() if is_container(value) else value


def _split_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, N, H*D]`` or ``[B, N, H, D]`` each as ``[B, H, N, D]``; without ``grouped`` all have ``heads`` heads."""
    width = query.shape[-1] * query.shape[-2] if query.dim() == 4 else query.shape[-1]
    if width % heads:
        raise NotOurs(f"q has {width} channels, which {heads} heads do not divide")
    head_dim = width // heads
    kv_dim = head_dim if grouped else None
    return (
        _with_heads("q", query, heads, None),
        _with_heads("k", key, heads, kv_dim),
        _with_heads("v", value, heads, kv_dim),
    )


def _with_heads(name: str, tensor: Tensor, heads: int, head_dim: int | None) -> Tensor:
    if tensor.dim() == 4:
        return tensor.transpose(1, 2)
    if tensor.dim() != 3:
        raise NotOurs(f"{name} has {tensor.dim()} dimensions")
    sizes = (heads, -1) if head_dim is None else (-1, head_dim)
    if tensor.shape[-1] % (head_dim or heads):
        raise NotOurs(f"{name} has {tensor.shape[-1]} channels, which {head_dim or heads} does not divide")
    return tensor.view(*tensor.shape[:2], *sizes).transpose(1, 2)


def four_dimensions(mask: Tensor) -> Tensor:
    """A mask of two (``[L, S]``), three (``[B, L, S]``) or four dimensions as ``[B, H, L, S]``, as ComfyUI reads it."""
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() == 3:
        return mask[:, None]
    if mask.dim() != 4:
        raise NotOurs(f"the mask has {mask.dim()} dimensions")
    return mask
