"""Functions of a model's modules, replaced for one clone of its ComfyUI patcher.

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
