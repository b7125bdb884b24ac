"""Containers of arguments are taken apart and put together as torch does it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from pascal_attn_core.vae.trees import leaves, mapped

Pair = namedtuple("Pair", "first second")
TREES = [
    7,
    None,
    torch.Size([2, 3]),
    (1, [2, (3,)], {"b": 4, "a": [5]}),
    ((), [], {}),
    Pair(1, [2]),
    [OrderedDict(z=1, a=(2, 3)), torch.Size([4])],
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_as_torch_does_it(tree: Any) -> None:
    found, expected = (apply(lambda leaf: (leaf, "seen"), tree) for apply in (mapped, tree_map))
    assert found == expected
    assert type(found) is type(expected)
    assert list(leaves(tree)) == tree_leaves(tree)
