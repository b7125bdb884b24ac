"""Finds the feed-forward modules of a model by name and structure, without knowing any host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..patching.patch import UNABLE
from ..patching.selectors import Found, matches, selectors

_FFN_NAME = re.compile(
    r"(?:^|\.)(?:\w+_)?(?:ff|ffn|mlp|feed_forward|feedforward|fc_block)(?:_(?:in|context|i|t|c|img|txt|\d+))?$"
)
_FFN_CLASS = re.compile(r"FeedForward|SwiGLU|GE?GLU|Mlp|MLP|FFN|Dense(?:Gated)?ActDense|FFLayer")
_NOT_FFN_CLASS = re.compile(
    r"Conv(?!1D$)|GLUMB|Embed|Norm|Router|Gate$|Attention|Block|M[oO][eE]|Experts|Pool|(?:Out|Final)Layer"
)
_NOT_FFN_NAME = re.compile(
    r"time_?(?:step)?s?_?(?:mlp|embed|emb|proj)|t_embedder|embedder|embedding|adaln|modulation|(?:^|\.)norm|router"
    r"|(?:^|\.)gate$|time_mlp|pooler"
)
_EXPERTS = re.compile(r"(?:^|\.)(?:experts|local_experts)\.")
_ATTENTION_CHILDREN = {"to_q", "to_k", "to_v", "q_proj", "k_proj", "v_proj", "qkv", "to_qkv", "query", "key", "value",
                       "qkv_proj", "c_attn", "q", "k", "v", "wq", "wk", "wv"}  # fmt: skip
_SINGLE_STREAM_CLASS = re.compile(r"Single(?:Stream)?(?:DiT|Transformer)?\w*Block|ParallelBlock")
_MOE_CLASS = re.compile(r"M[oO][eE]|[Rr]outer|FeedForward|MLP|Mlp")
_EXPANSION = 1.5


def find_ffn(model: nn.Module, include: Any = None, exclude: Any = None) -> Iterator[Found]:
    """The feed-forward modules of ``model``, outermost first, each once, and modules that look like one but cannot run
    in slices. A mixture that keeps its experts in a list stands for its experts: each is called with its own tokens.

    Args:
        include, exclude: see :func:`.patch_ffn`.
    """
    chosen, dropped = selectors("include", include), selectors("exclude", exclude)
    taken: list[str] = []
    named: list[str] = []
    mixtures: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or outer == "" for outer in taken):
            continue
        if dropped and matches(dropped, name, module):
            taken.append(name)
            continue
        is_chosen = include is None or matches(chosen, name, module)
        if is_chosen and _holds_experts(module):
            mixtures.append(f"{name}." if name else "")
            continue
        in_mixture = any(name.startswith(mixture) for mixture in mixtures)
        if (is_chosen or in_mixture) and isinstance(module, torch.jit.ScriptModule):
            if include is not None or looks_like_ffn(name, module):
                taken.append(name)
                yield Found(name, module, UNABLE, "it is TorchScript, whose state cannot be compared between calls")
            continue
        if include is None and (reason := _why_not(name, module)):
            if not any(name.startswith(f"{block}.") for block in named):
                named.append(name)
                yield Found(name, module, UNABLE, reason)
        elif (include is not None and is_chosen) or (
            (include is None or in_mixture) and looks_like_ffn(name, module, in_mixture=in_mixture)
        ):
            taken.append(name)
            yield Found(name, module)


def looks_like_ffn(name: str, module: nn.Module, *, in_mixture: bool = False) -> bool:
    """Whether ``module`` is named or built like a feed-forward network: wide inside, no attention, no convolution."""
    kind = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _NOT_FFN_CLASS.search(kind):
        return False
    if _EXPERTS.search(name) and not in_mixture:
        return False
    children = {child.rpartition(".")[2] for child, _ in module.named_modules() if child}
    if children & _ATTENTION_CHILDREN or any(_is_convolution(child) for child in module.modules()):
        return False
    sizes = _linear_sizes(module)
    if len(sizes) < 2:
        return False
    if _NOT_FFN_NAME.search(name):
        return False
    if _FFN_NAME.search(name) or _FFN_CLASS.search(kind):
        return True
    widest = max(out for _, out in sizes)
    return len(sizes) <= 3 and widest >= _EXPANSION * sizes[0][0] and sizes[-1][1] < widest


def _why_not(name: str, module: nn.Module) -> str:
    """Why the feed-forward work of ``module`` cannot be run in slices by a module's forward; "" if nothing is known."""
    children = dict(module.named_children())
    kind = type(module).__name__
    if _FFN_NAME.search(name) and len(children) > 1 and any(map(_is_convolution, children.values())):
        return "it mixes neighbouring tokens by a convolution"
    if "experts" in children and _MOE_CLASS.search(kind):
        return "it routes tokens to experts"
    fused = {"proj_mlp", "proj_out"} <= set(children) or {"linear1", "linear2"} <= set(children)
    inner = (name for key, child in children.items() if "attn" in key for name, _ in child.named_children())
    parallel = any("qkv_mlp" in name for name in (*children, *inner))
    own_ffn = any(_FFN_NAME.search(name) and len(_linear_sizes(child)) >= 2 for name, child in children.items())
    attends = any("attn" in name or "attention" in name.lower() for name in children)
    if (fused and (_SINGLE_STREAM_CLASS.search(kind) or attends)) or (parallel and not own_ffn):
        return (
            "a fused single-stream block, whose wide tensor is joined with the attention output outside any "
            "feed-forward module"
        )
    return ""


def _holds_experts(module: nn.Module) -> bool:
    """Whether it is a mixture of experts that are feed-forward modules of their own."""
    experts = dict(module.named_children()).get("experts")
    if not isinstance(experts, nn.ModuleList) or not len(experts):
        return False
    return all(looks_like_ffn(f"experts.{place}", expert, in_mixture=True) for place, expert in enumerate(experts))


def _linear_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """(in, out) of each linear layer, in order; the small ones that LoRA adds are left out."""
    found = [(name, sizes) for name, child in module.named_modules() if (sizes := _sizes(child))]
    return [sizes for name, sizes in found if "lora_" not in name]


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    if any(True for _ in module.children()):
        return None
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and weight is not None and weight.dim() == 2:  # GPT-2's linear layer
        return weight.shape[0], weight.shape[1]
    return None


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)
