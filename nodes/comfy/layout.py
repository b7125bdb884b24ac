"""From the arguments of ComfyUI's attention functions to ``[B, H, L, D]`` tensors, and back.

ComfyUI calls ``attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
skip_output_reshape=False, **kwargs)``, positionally or by keyword as each model likes. Each of q, k and v comes as
``[B, N, H*D]`` or ``[B, N, H, D]``, all of them as ``[B, H, N, D]`` under ``skip_reshape``, each possibly inside a
container that is emptied by its reader. ComfyUI's functions read key and value by the query's batch and head_dim,
whatever shape they come in (HyperTile gives query ``[4, N/4, C]`` and key ``[1, N, C]``), and so does this module.
Nothing here imports ComfyUI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core.call import Arguments
from ...pascal_attn_core.config import Unsupported

# Keyword arguments that do not change the result, or whose meaning is kept here whatever their value is: attn_precision
# asks for scores in float32, which they always are; the last two are hints at other kernels.
_HINTS = {"_inside_attn_wrapper", "transformer_options", "attn_precision"}
_HINTS |= {"low_precision_attention", "preferred_attention"}
NAMES = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


class NotOurs(Unsupported, ValueError):
    """The call cannot be expressed as ``sdpa``; the message says why. It is passed to ComfyUI as it came."""


@dataclass(eq=False)
class HostCall:
    """One attention call of the host.

    Attributes:
        given: the arguments as ``sdpa`` takes them, the tensors as views ``[B, H, L, D]``, the mask in four dimensions.
        keep_heads: the host wants ``[B, H, L, D]`` back, not ``[B, L, H*D]``.
    """

    given: Arguments
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
        grouped = bool(given.get("enable_gqa", False))
        if given["skip_reshape"]:
            _check_heads(query, key, value, heads, grouped)
        else:
            query, key, value = _split_heads(query, key, value, heads, grouped)
        if query.shape[2] == 0 or key.shape[2] == 0:
            raise NotOurs("it has no queries" if query.shape[2] == 0 else "it has no keys")
        mask = None if given["mask"] is None else four_dimensions(given["mask"])
        grouped = grouped and key.shape[1] != query.shape[1]
        arguments = Arguments(query, key, value, mask, scale=given.get("scale"), enable_gqa=grouped)
        return HostCall(arguments, bool(given["skip_output_reshape"]))

    def returned(self, out: Tensor) -> Tensor:
        """``[B, H, L, Dv]`` as the host wants it: as it is, or ``[B, L, H*Dv]``."""
        return out if self.keep_heads else out.transpose(1, 2).flatten(2)  # b h n d -> b n (h d)


def bound(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults filled in, containers emptied, hints left out.

    Raises:
        NotOurs: an argument is missing, doubled, or would change the result in a way that is not known here.
    """
    if len(args) > len(NAMES):
        raise NotOurs(f"{len(args)} positional arguments")
    given: dict[str, Any] = {"mask": None, "skip_reshape": False, "skip_output_reshape": False}
    for name, value in zip(NAMES, args):
        if name in kwargs:
            raise NotOurs(f"two values for {name}")
        given[name] = value
    for name, value in kwargs.items():
        if name in NAMES or name in ("scale", "enable_gqa"):
            given[name] = value
        elif name not in _HINTS and value is not None and value is not False:
            raise NotOurs(f"its argument {name} is not known")
    missing = [name for name in ("q", "k", "v", "heads") if name not in given]
    if missing:
        raise NotOurs(f"no {' and no '.join(missing)}")
    for name in ("q", "k", "v"):
        given[name] = given[name].peek() if is_container(given[name]) else given[name]
    return given


def has_containers(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor of the call comes in a container."""
    if len(args) > 2 and type(args[0]) is Tensor is type(args[1]):
        return False
    return any(map(is_container, args)) or any(map(is_container, kwargs.values()))


def empty_containers(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with each container replaced by its tensor; the containers are empty afterwards."""
    if not has_containers(args, kwargs):
        return args, kwargs
    return tuple(_take(value) for value in args), {name: _take(value) for name, value in kwargs.items()}


def is_container(value: Any) -> bool:
    """Whether this is one of ComfyUI's single-owner containers of a tensor."""
    return not isinstance(value, Tensor) and hasattr(value, "take") and hasattr(value, "peek")


def _take(value: Any) -> Any:
    return value.take() if is_container(value) else value


def signature(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """A key of everything that reading and routing a call depend on: shapes, strides and number formats of its
    tensors, and its other arguments, but not the numbers in the tensors."""
    marks: list[Any] = []
    for value in args:
        # _mark, written out for what nearly every argument is: this runs in each attention call.
        if type(value) is Tensor:
            marks.append((value.shape, value.stride(), value.dtype, value.device))
        else:
            marks.append(_mark(value) if value is not None else None)
    for name, value in kwargs.items():
        if name != "transformer_options":
            marks.append((name, _mark(value) if value is not None else None))
    return tuple(marks)


def _mark(value: Any) -> Any:
    kind = type(value)
    if kind is Tensor:
        return value.shape, value.stride(), value.dtype, value.device
    if value is None or kind in _PLAIN:
        return value if kind is not bool else (value,)  # True is not 1 here
    if isinstance(value, Tensor):
        return kind, value.shape, value.stride(), value.dtype, value.device
    return (kind, *_mark(value.peek())) if is_container(value) else kind


_PLAIN = {int, float, str, bool, torch.dtype}


def _check_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, grouped: bool) -> None:
    """Tensors that come as ``[B, H, N, D]``: ComfyUI's functions agree on these shapes only."""
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotOurs(f"q, k and v have {query.dim()}, {key.dim()} and {value.dim()} dimensions")
    (batch, q_heads), k_lead, v_lead = query.shape[:2], tuple(key.shape[:2]), tuple(value.shape[:2])
    if q_heads != heads:
        raise NotOurs(f"q has {q_heads} heads, not {heads}")
    fits = k_lead[0] == batch and (k_lead[1] == heads or (grouped and k_lead[1] and heads % k_lead[1] == 0))
    if k_lead != v_lead or not fits:
        raise NotOurs(f"q, k and v have {(batch, q_heads)}, {k_lead} and {v_lead} batches and heads")


def _split_heads(query: Tensor, key: Tensor, value: Tensor, heads: int, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, N, H*D]`` or ``[B, N, H, D]`` each as ``[B, H, N, D]`` of the query's batch; without ``grouped`` all have
    ``heads`` heads."""
    if query.dim() not in (3, 4):
        raise NotOurs(f"q has {query.dim()} dimensions")
    width = query.shape[-1] * query.shape[-2] if query.dim() == 4 else query.shape[-1]
    if heads < 1 or not width or width % heads:
        raise NotOurs(f"q has {width} channels, not divisible by {heads} heads")
    batch, head_dim = query.shape[0], width // heads
    kv_heads = None if grouped else heads
    query = _with_heads("q", query, batch, heads, head_dim)
    key = _with_heads("k", key, batch, kv_heads, head_dim)
    value = _with_heads("v", value, batch, kv_heads, head_dim)
    if key.shape[1:3] != value.shape[1:3]:
        raise NotOurs(f"k has {tuple(key.shape[1:3])} heads and tokens, v has {tuple(value.shape[1:3])}")
    return query, key, value


def _with_heads(name: str, tensor: Tensor, batch: int, heads: int | None, head_dim: int) -> Tensor:
    """``[B, H, N, D]`` of this batch; ``heads`` None = as many as the channels hold. A view if possible."""
    dims = tensor.dim()
    if dims not in (3, 4):
        raise NotOurs(f"{name} has {dims} dimensions")
    width = tensor.shape[-1] if dims == 3 else tensor.shape[-1] * tensor.shape[-2]
    if not (heads or width // head_dim) or (dims == 3 and width % head_dim):
        raise NotOurs(f"{name} has {width} channels, not divisible by head_dim {head_dim}")
    try:
        return tensor.reshape(batch, -1, heads or width // head_dim, head_dim).transpose(1, 2)
    except RuntimeError:
        wanted = f"batch {batch}, heads {heads}, head_dim {head_dim}"
        raise NotOurs(f"{name} has shape {tuple(tensor.shape)}, which does not match {wanted}") from None


def four_dimensions(mask: Tensor) -> Tensor:
    """A mask of two (``[L, S]``), three (``[B, L, S]``) or four dimensions as ``[B, H, L, S]``, as ComfyUI reads it."""
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() == 3:
        return mask[:, None]
    if mask.dim() != 4:
        raise NotOurs(f"the mask has {mask.dim()} dimensions")
    return mask
