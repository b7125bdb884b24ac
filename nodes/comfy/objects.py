"""Functions of a model's modules: where attention is computed, and how they are replaced for one clone of its ComfyUI
patcher.

Object patches, not injections: an injection of a forgotten clone stays in the model for good. ComfyUI takes object
patches out whenever it loads another clone of the model, since their backup belongs to all clones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .host import KEY

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
#: by name in the model ("decoder.mid.attn_1.forward"): from the function there to the one that replaces it
Replacements = dict[str, Make]
_MARK = "pascal_attn_replacement"
_PROJECTIONS = ({"to_q", "to_k"}, {"q", "k"}, {"qkv"}, {"to_qkv"}, {"q_proj", "k_proj"}, {"wq", "wk"}, {"linear1"})


def replace_functions(patcher: Any, find: Callable[[nn.Module], Replacements]) -> None:
    """Replace what ``find`` names in the patcher's model, for this clone and those made from it.

    Our replacement that the clone already has is taken off. A clone that gets a model of its own (another device,
    or no dynamic loading) has the functions of that model replaced, not those of this one.
    """
    from comfy.patcher_extension import CallbacksMP

    def follow(before: Any, clone: Any) -> None:
        if clone.model is not before.model:
            _replace(clone, find(clone.model))

    _replace(patcher, find(patcher.model))
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    patcher.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, follow)


def _replace(patcher: Any, replacements: Replacements) -> None:
    earlier = [name for name, function in patcher.object_patches.items() if is_ours(function)]
    for name in dict.fromkeys([*earlier, *replacements]):
        below = patcher.object_patches.pop(name, None)
        while is_ours(below):
            below = getattr(below, _MARK)[1]
        if below is not None:
            patcher.add_object_patch(name, below)
    for name, make in replacements.items():
        below = patcher.object_patches.get(name)
        # Not from the live model: that may carry another clone's replacement.
        function = make(patcher.get_model_object(name))
        # Its own name in the mark: functools.wraps of another pack copies marks.
        setattr(function, _MARK, (function, below))
        patcher.add_object_patch(name, function)


def is_ours(function: Any) -> bool:
    return getattr(function, _MARK, (None, None))[0] is function is not None


def replaced_by_others(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The names among ``names`` where the loaded model has a function that is not ours."""
    places = {name: name.rpartition(".") for name in names}
    return [name for name, (at, _, last) in places.items() if not is_ours(vars(model.get_submodule(at)).get(last))]


# ---- where attention is computed -------------------------------------------------------------------------------------


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
