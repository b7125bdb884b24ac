"""Where the modules of a model compute attention."""

from __future__ import annotations

from torch import nn

_PROJECTIONS = ({"to_q", "to_k"}, {"q", "k"}, {"qkv"}, {"to_qkv"}, {"q_proj", "k_proj"}, {"wq", "wk"}, {"linear1"})


def attributes(module: nn.Module) -> list[str]:
    """Attention functions that the module holds itself: ``optimized_attention``, ``optimized_vae_attention``."""
    held = vars(module).items()
    return [name for name, value in held if name.startswith("optimized_") and name.endswith("attention") and value]


def is_attention(module: nn.Module) -> bool:
    """Whether a module computes attention, by its class's name or its projections'."""
    is_named_so = type(module).__name__.endswith(("Attention", "AttentionBlock"))
    return is_named_so or any(names <= set(module._modules) for names in _PROJECTIONS)


def is_innermost(module: nn.Module) -> bool:
    """Whether a module computes attention, and none inside it does."""
    return is_attention(module) and not any(is_attention(each) for each in module.modules() if each is not module)


def count_blocks(model: nn.Module) -> int:
    """Number of entries of the model's lists of blocks that hold attention."""
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = set()
    for name in (name for name, module in model.named_modules() if is_attention(module)):
        outer = min((entry for entry in lists if name.startswith(entry)), key=len, default=f"{name}.")
        blocks.add((outer, name[len(outer) :].partition(".")[0]))
    return len(blocks)
