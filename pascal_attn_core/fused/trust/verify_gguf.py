"""Whether the kernels that expand blocks of GGUF files give the definition's bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...gguf_blocks import FORMATS, expand
from ..code.gguf_source import KERNELS, GgufVariant
from ..launch import Launch
from ..launch.gguf import DTYPES, ExpandCall, expand_launches

_BLOCKS = 9


def largest_error(variant: GgufVariant, device: torch.device, run: Callable[[list[Launch]], object]) -> float:
    """0.0, or infinity where an output of any function has another bit, on blocks of random bits. ``run`` executes
    launches; the random state of torch is left alone."""
    arithmetic, generator = getattr(torch, variant.dtype), torch.Generator("cpu").manual_seed(1)
    for name in KERNELS:
        weights, size, _ = FORMATS[name]
        blocks = torch.randint(0, 256, (_BLOCKS, size), generator=generator, dtype=torch.uint8, device="cpu")
        for dtype in DTYPES:
            for table in (torch.int8, torch.float32):
                out = torch.full((_BLOCKS, weights), float("nan"), dtype=dtype, device=device)
                run(expand_launches(ExpandCall(blocks.to(device), name, arithmetic, table, out)))
                if not _same(out.cpu(), expand(blocks, name, arithmetic, table=table).to(dtype)):
                    return float("inf")
    return 0.0


def _same(found: Tensor, right: Tensor) -> bool:
    """Whether both have the same numbers; any NaN is as good as another."""
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(), right.nan_to_num())
