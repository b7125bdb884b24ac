"""Arguments of operators: numbers, tensors, and tuples, lists and dicts of them.

``torch.utils._pytree`` knows more containers and takes several times as long, which adds up: every operator of a
decoder in bands looks through its arguments again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of the containers with each leaf replaced by ``function(leaf)``, from the first to the last."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(function, item) for item in tree])
    if kind is list:
        return [mapped(function, item) for item in tree]
    if kind is dict:
        return {name: mapped(function, item) for name, item in tree.items()}
    return _pytree.tree_map(function, tree) if isinstance(tree, (tuple, list, dict)) else function(tree)


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, tree)
    return found
