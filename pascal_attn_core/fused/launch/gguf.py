"""The launch that expands blocks of a GGUF file. Nothing is launched or compiled here."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..code.compilation import DtypeVariant
from ..code.gguf_source import KERNELS, KIND, THREADS, WEIGHTS_OF_THREAD
from ..code.params import GgufExpand
from . import Launch

_OUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = tuple(_OUTS)


class ExpandCall(NamedTuple):
    """``out = expand(blocks, format, arithmetic, table=table)`` of :mod:`...reference.gguf_blocks`, rounded to the
    dtype of out.

    Attributes:
        blocks: uint8 ``[n, bytes]``, contiguous.
        format: a key of KERNELS.
        arithmetic: float32, float16 or bfloat16.
        table: int8 or float32.
        out: float32, float16 or bfloat16 ``[n, weights]``, contiguous, beginning at a multiple of 16 bytes; written.
    """

    blocks: Tensor
    format: str
    arithmetic: torch.dtype
    table: torch.dtype
    out: Tensor


@functools.lru_cache(maxsize=8)
def variant_of(arithmetic: torch.dtype) -> DtypeVariant:
    """The compilation for a dtype of the arithmetic."""
    return DtypeVariant(KIND, str(arithmetic).removeprefix("torch."))


def expand_launches(call: ExpandCall) -> list[Launch]:
    """The launch that writes ``call.out``."""
    count = call.out.numel()
    if not count:
        return []
    grid = -(-count // (THREADS * WEIGHTS_OF_THREAD)), 1, 1
    how = variant_of(call.arithmetic), KERNELS[call.format], grid, THREADS, GgufExpand
    numbers = {"count": count, "out_kind": _OUTS[call.out.dtype], "wide_table": int(call.table == torch.float32)}
    return [Launch.over(*how, {"blocks": call.blocks, "out": call.out}, **numbers)]
