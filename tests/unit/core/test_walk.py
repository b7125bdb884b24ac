"""What the route tiled works out once per kind of call: tiles, views and ranges, and never for another kind."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pascal_attn_core import AttentionConfig, LazyMask, sdpa
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import tiled as tiled_route
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


def _call(shape: tuple[int, ...] = (2, 4, 70, 8), mask: Tensor | LazyMask | None = None, **options) -> AttentionCall:
    return check_call(torch.randn(shape), torch.randn(shape), torch.randn(shape), mask, **options)


def _tokens_first(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2)


SHAPE = (2, 4, 70, 8)
KINDS: dict[str, Callable[[], AttentionCall]] = {
    "plain": _call,
    "shorter": lambda: _call((2, 4, 69, 8)),
    "another dtype": lambda: check_call(*(torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))),
    "query by tokens": lambda: check_call(_tokens_first(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE)),
    "key by tokens": lambda: check_call(torch.randn(SHAPE), _tokens_first(SHAPE), torch.randn(SHAPE)),
    "value by tokens": lambda: check_call(torch.randn(SHAPE), torch.randn(SHAPE), _tokens_first(SHAPE)),
    "fewer keys": lambda: check_call(torch.randn(SHAPE), *(torch.randn(2, 4, 60, 8) for _ in range(2))),
    "wider values": lambda: check_call(torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2, 4, 70, 9)),
    "grouped": lambda: check_call(torch.randn(SHAPE), *(torch.randn(2, 2, 70, 8) for _ in range(2)), enable_gqa=True),
    "bool mask": lambda: _call(mask=torch.ones(70, 70, dtype=torch.bool)),
    "transposed mask": lambda: _call(mask=torch.ones(70, 70, dtype=torch.bool).T),
    "float mask": lambda: _call(mask=torch.zeros(70, 70)),
    "padding": lambda: _call(mask=torch.ones(2, 1, 1, 70, dtype=torch.bool)),
    "lazy mask": lambda: _call(mask=LazyMask((1, 1, 70, 70), lambda b, h, q, k: q >= k, device="cpu")),
    "causal": lambda: _call(is_causal=True),
    "window": lambda: _call(window=(3, 4)),
    "wider window": lambda: _call(window=(3, 5)),
    "window at the end": lambda: check_call(
        torch.randn(2, 4, 60, 8), *(torch.randn(SHAPE) for _ in range(2)), window=(3, 4), alignment="lower_right"
    ),
    "dropout": lambda: _call(dropout_p=0.5),
    "softcap": lambda: _call(softcap=5.0),
    "sinks": lambda: _call(sinks=torch.zeros(4)),
}


def test_calls_of_one_kind_share_a_walk(walks: Walks) -> None:
    for make in KINDS.values():
        assert walks.of(make(), TILED) is walks.of(make(), TILED)


def test_no_two_kinds_share_a_walk(walks: Walks) -> None:
    found = [walks.of(make(), TILED) for make in KINDS.values()]
    found += [walks.of(_call(), AttentionConfig(budget_mib=1)), walks.of(_call(), AttentionConfig(q_block=16))]
    found += [walks.of(_call(), AttentionConfig(kv_block=16)), walks.of(_call(), TILED, backward=True)]
    found += [walks.of(_call(), TILED, most_bytes=1 << 16)]
    assert len({id(walk) for walk in found}) == len(KINDS) + 5


def test_another_card_has_other_walks(walks: Walks) -> None:
    call = _call((8, 8, 1024, 64))
    with using(Runtime(CPU, DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), num_sms=28))) as runtime:
        assert runtime.part(Walks).of(call, TILED).tiles.units > walks.of(call, TILED).tiles.units


def test_a_budget_that_does_not_suffice_is_refused_every_time(walks: Walks) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="budget_mib must be at least"):
            walks.of(_call((1, 1, 4096, 64)), AttentionConfig(budget_mib=0.0625, q_block=4096))


def test_what_is_kept_is_bounded(walks: Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_route, "_MOST_KINDS", 5)
    for length in range(1, 20):
        walks.of(_call((1, 1, length, 4)), TILED)
        assert 1 <= len(walks._walks) <= 5
    walks._walks.clear()
    long = check_call(torch.empty(1, 1, 8192, 1), torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1))
    assert len(walks.of(long, AttentionConfig(q_block=1)).q_ranges) == 8192
    assert not walks._walks


def test_no_tensor_of_a_call_is_kept(walks: Walks) -> None:
    tensors = [torch.randn(2, 4, 70, 8) for _ in range(3)] + [torch.rand(70, 70) < 0.5]
    out = sdpa(*tensors, config=TILED)
    dead = [weakref.ref(tensor) for tensor in (*tensors, out)]
    assert walks._walks
    del tensors, out
    gc.collect()
    assert [ref() for ref in dead] == [None] * 5


def test_sizes_of_a_trace_are_not_kept(walks: Walks) -> None:
    query = torch.randn(1, 2, 70, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q: sdpa(q, q, q, config=TILED), (query,))
    torch.testing.assert_close(traced(query), sdpa(query, query, query, config=TILED))
    kept = [size for kind in walks._walks for part in kind if isinstance(part, tuple) for size in part]
    assert not any(isinstance(size, Tensor) for size in kept)


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
