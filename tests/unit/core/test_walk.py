"""What the route tiled works out once per kind of call: tiles, views and ranges, and never for another kind."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes.tiled import Walks
from pascal_attn_core.tiled.forward import units_of
from pascal_attn_core.tiled.layout import unit_views

CPU = torch.device("cpu")
TILED = AttentionConfig(route="tiled")


@pytest.fixture
def walks() -> Iterator[Walks]:
    """Those of a new runtime."""
    with using(Runtime(CPU)) as runtime:
        yield runtime.part(Walks)


def _tokens_first(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2)


SHAPE = (2, 4, 70, 8)


def test_no_tensor_of_a_call_is_kept(walks: Walks) -> None:
    tensors = [torch.randn(2, 4, 70, 8) for _ in range(3)] + [torch.rand(70, 70) < 0.5]
    out = sdpa(*tensors, config=TILED)
    dead = [weakref.ref(tensor) for tensor in (*tensors, out)]
    assert walks._walks
    del tensors, out
    gc.collect()
    assert [ref() for ref in dead] == [None] * 5


def test_a_walk_is_never_used_for_another_layout_of_the_same_shapes(walks: Walks) -> None:
    """Every kind again and again in mixed order, so that each finds the walks of the others."""
    for _ in range(2):
        for layouts in itertools.product((torch.randn, _tokens_first), repeat=3):
            tensors = [make(SHAPE) for make in layouts]
            for mask in (None, torch.rand(70, 70) < 0.5, (torch.rand(70, 70) < 0.5).T, torch.rand(2, 1, 1, 70) < 0.9):
                expected = reference_sdpa(*tensors, mask)[0]
                torch.testing.assert_close(sdpa(*tensors, mask, config=TILED), expected, atol=1e-6, rtol=1e-5)


# ---- views -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable[[tuple[int, ...]], Tensor], int]] = {  # and into how many parts a call is cut
    "dense": (torch.randn, 1),
    "by tokens": (_tokens_first, 3),
    "one batch element for all": (lambda shape: torch.randn(1, *shape[1:]).expand(shape), 3),
    "one head for all": (lambda shape: torch.randn(shape[0], 1, *shape[2:]).expand(shape), 3),
    "one for all": (lambda shape: torch.randn(1, 1, *shape[2:]).expand(shape), 1),
    "every second head": (lambda shape: torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, ::2], 1),
    "batch last": (lambda shape: torch.randn(*shape[1:], shape[0]).movedim(-1, 0), 3),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_are_views_of_the_call_in_order(layout: str, groups: int) -> None:
    make, parts = LAYOUTS[layout]
    query = torch.randn(3, 4 * groups, 5, 2) if layout != "by tokens" else _tokens_first((3, 4 * groups, 5, 2))
    key, value = make((3, 4, 7, 2)), make((3, 4, 7, 6))
    mask = torch.randn(3, 1, 1, 7)
    call = check_call(query, key, value, enable_gqa=True)
    masked = check_call(query, key, value, mask, enable_gqa=True)
    more = torch.randn(3, 4 * groups, 5)
    for one, most in ((call, parts), (masked, 3)):
        found = list(units_of(one, unit_views(one, (more, None)), (more, None)))
        assert len(found) == most
        assert [units.first for units in found] == [i * 12 // most for i in range(most)]
        expected = query.reshape(12, groups, 5, 2), key.reshape(12, 7, 2), value.reshape(12, 7, 6)
        for i, tensor in enumerate(expected):
            assert torch.equal(torch.cat([units[i] for units in found]), tensor)
        assert torch.equal(torch.cat([units.extra[0] for units in found]), more.reshape(12, groups, 5))
        assert all(units.extra[1] is None for units in found)
        assert all(units.key.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() for units in found)
        if one is masked:
            expected_mask = mask.expand(3, 4 * groups, 5, 7).reshape(12, groups, 5, 7)
            assert torch.equal(torch.cat([units.mask for units in found]), expected_mask)


def test_a_call_without_heads_is_one_unit() -> None:
    query, key = torch.randn(5, 2), torch.randn(7, 2)
    mask = torch.randn(7)
    call = check_call(query, key, key, mask)
    (units,) = units_of(call, unit_views(call), (torch.randn(5),))
    assert (units.query.shape, units.key.shape, units.mask.shape) == ((1, 1, 5, 2), (1, 7, 2), (1, 1, 5, 7))
    assert units.extra[0].shape == (1, 1, 5)
