"""Finds the linear layers of a model, and which of them are worth running in 8 bits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..fused.code.kinds import MOST_COLUMNS
from ..gguf import hosts as gguf
from ..gguf.int8 import why_not as why_not_gguf
from ..patching.patch import OFF, UNABLE
from ..patching.selectors import Found, matches, selectors
from . import stored

# These set the timestep, the style and the scale of everything else: few numbers, which every layer depends on.
_SENSITIVE = re.compile(
    r"(?:^|[._])(?:time|timestep|t|guidance|vector|context|caption|label|pos|patch|x|y|img|txt)_?(?:emb|embed|embedder|"
    r"embedding|embeddings|in)(?:[._]|$)|embed|emb_layers|time_proj|distilled_guidance|modulation|"
    r"(?:^|[._])mod(?:[._]|$)|adaln|ada_?norm|(?:^|[._])norm|"
    r"router|(?:^|\.)gate$|lora_"
)
_IN_BLOCK = re.compile(r"(?:^|\.)\d+(?:\.|$)")
_LEAST_NUMBERS = 64 * 64


def find_linear(model: nn.Module, include: Any = None, exclude: Any = None) -> Iterator[Found]:
    """The linear layers of ``model``, each once; ``include`` and ``exclude`` as in :func:`.patch_linear_int8`."""
    chosen, dropped = selectors("include", include), selectors("exclude", exclude)
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        if not is_linear(module) or (dropped and matches(dropped, name, module)):
            continue
        if include is not None and not matches(chosen, name, module):
            continue
        others = [owner for owner in owners.get(id(module._parameters.get("weight")), ()) if owner != name]
        left = "" if include is not None else _left(name, module)
        reason = left or why_not(module, others)
        yield Found(name, module, (OFF if left else UNABLE) if reason else "", reason)


def is_linear(module: nn.Module) -> bool:
    """Whether it is ``x W^T + bias`` with a weight ``[out_features, in_features]`` of its own. A lazy layer is not yet:
    its weight has no shape before the first call."""
    if any(True for _ in module.children()) or not hasattr(module, "in_features"):
        return False
    weight, kind = getattr(module, "weight", None), type(module).__name__
    if not isinstance(weight, Tensor) or is_lazy(weight) or not (isinstance(module, nn.Linear) or "Linear" in kind):
        return False
    return isinstance(module, nn.Linear) or tuple(weight.shape) == (module.out_features, module.in_features)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """N and K of a linear layer, however its weight is stored."""
    return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]


def why_not(module: nn.Module, others: list[str]) -> str:
    """Why the layer cannot run in 8 bits; "" = it can. ``others``: further modules that have its weight."""
    weight = module._parameters.get("weight")
    host = gguf.host_of(module)
    if host is not None:
        return gguf.why_not(module, host) or why_not_gguf(gguf.format_of(module, host), shape_of(module)[1])
    if weight is None:
        return "its weight is computed, or is not a parameter"
    if tuple(weight.shape) != (module.out_features, module.in_features):
        return f"its weight is stored as {list(weight.shape)}"
    if reason := stored.why_not(module, weight):
        return reason
    if weight.shape[1] % 4 or weight.shape[1] > MOST_COLUMNS:
        return f"its width must be a multiple of 4 up to {MOST_COLUMNS}, got {weight.shape[1]}"
    if others:
        return f"it shares its weight with {others[0]}"
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "torch's MultiheadAttention uses its weight without calling it"
    return ""


def _left(name: str, module: nn.Module) -> str:
    """Why the default leaves a layer that could run in 8 bits."""
    if not _IN_BLOCK.search(name):
        return "outside the repeated blocks"
    if _SENSITIVE.search(name):
        return "every later layer depends on its few outputs"
    if math.prod(shape_of(module)) < _LEAST_NUMBERS:
        return f"fewer than {_LEAST_NUMBERS} weights"
    weight = module._parameters.get("weight")
    if weight is not None and stored.has_fewer_bits(weight):
        return f"{stored.format_of(weight)} takes less memory than 8 bits"
    return ""
