"""The Triton kernel of the package flash-attn, for AMD cards that torch has no fused kernel for.

It is a candidate where the user has installed the package and switched that backend on as the package itself wants it,
by ``FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE``; nothing is imported otherwise. Before a kind of call goes to it, a small
one is compared with plain attention. It ignores windows and softcap, which are refused as torch's function refuses
them.
"""

from __future__ import annotations

import functools
import importlib.metadata
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..config import variables
from ..machine.out_of_memory import is_out_of_memory
from ..machine.runtime import runtime_of
from ..patching.stand_in import real_package
from .torch_faults import Fault, FaultyKind, broken_promise, is_shown, is_torchs_own, is_wrong, unkept, wave

KERNEL = "flash-attn's Triton backend"
_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
_LARGEST_HEAD_DIM = 256
_TOKENS = 192  # of the small call: more than one block of any tile


def takes(call: AttentionCall) -> bool:
    """Whether the package computes a call, rightly, that torch's function takes but has no fused kernel for."""
    return (
        runtime_of(call.query.device).info.kind == "hip"
        and _is_on()
        and call.query.dtype in (torch.float16, torch.bfloat16)
        and call.head_dim == call.head_dim_v <= _LARGEST_HEAD_DIM
        and call.attn_mask is None
        and not call.dropout_p
        and (not call.is_causal or call.seq_len_q == call.seq_len_kv)  # it aligns to the lower right
        and not torch._C._are_functorch_transforms_active()
        and not broken_promise(call, KERNEL)
        and not is_shown(_fault(call.head_dim, call.groups, call.is_causal, call.needs_grad), FaultyKind.of(call))
    )


def _is_on() -> bool:
    return variables(_SWITCH).get(_SWITCH) == "TRUE"


def conditions() -> dict[str, str]:
    """Return what timings on a card depend on if the package is a candidate there."""
    if not _is_on():
        return {}
    try:
        return {"flash_attn": importlib.metadata.version("flash_attn")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The call by the package: tensors ``[B, H, L, D]``.

    Raises:
        RouteUnavailable: it has raised, and takes no call of this kind any more.
    """
    try:
        return _attend(query, key, value, None, 0.0, call.is_causal, scale=call.scale)
    except Exception as error:
        if is_out_of_memory(error) or not is_torchs_own(error):
            raise
        raise unkept(call, error, KERNEL) from error


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: None, dropout_p: float, is_causal: bool, *, scale: float
) -> Tensor:
    """Call the package with the arguments of torch's function."""
    with torch.cuda.device(query.device) if query.device.type == "cuda" else nullcontext():  # where Triton launches
        inputs = (t.transpose(1, 2) for t in (query, key, value))
        out: Tensor = _function()(*inputs, softmax_scale=scale, causal=is_causal)
    return out.transpose(1, 2)


@functools.cache
def _function() -> Any:
    """The package's function. ImportError: it is not installed, or ours stands in for it."""
    if real_package("flash_attn") is None:
        raise ImportError("flash_attn is not installed")
    return importlib.import_module("flash_attn").flash_attn_func


@functools.cache
def _fault(head_dim: int, groups: int, is_causal: bool, gradients: bool) -> Fault:
    """That the package is not installed, raises, or is wrong for calls of a kind."""

    def probe(kind: FaultyKind) -> bool:
        heads = (2 * groups, 0.7), (2, 1.3), (2, 1.9)
        inputs = [wave((1, count, _TOKENS, head_dim), kind.device, kind.dtype, step) for count, step in heads]
        options = {"scale": head_dim**-0.5, "is_causal": is_causal, "gradients": gradients}
        return is_wrong(inputs, None, by=_attend, **options)

    name = f"no {KERNEL} for head_dim {head_dim}, groups {groups}, is_causal {is_causal}, gradients {gradients}"
    return Fault(name, name, lambda call: True, probe)
