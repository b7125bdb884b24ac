"""Which packed sequences of different lengths go to the fused kernel at once, and in which launches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import whole
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD
from attn_support.fused.packed import ends_of
from torch import Tensor

from pascal_attn_core import UnsupportedAttention
from pascal_attn_core.call import check_call
from pascal_attn_core.config import default_config
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.packed import packed_launches
from pascal_attn_core.fused.launch.plan import Packed
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.observe import report
from pascal_attn_core.stand_ins.sageattention import sageattn_varlen

LENGTHS = [40, 7, 64]


@pytest.fixture
def queued() -> Iterator[list[Launch]]:
    """The launches, which are not executed."""
    with emulated_card(lambda launch: None) as kernels:
        yield kernels.queued


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the route of the default configuration."""

    def change(route: str) -> None:
        monkeypatch.setenv("PASCAL_ATTN_ROUTE", route)
        default_config.cache_clear()

    yield change
    monkeypatch.undo()
    default_config.cache_clear()


def _attend(
    q_lengths: list[int] = LENGTHS,
    k_lengths: list[int] = LENGTHS,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[tuple[Tensor, ...], Any]:
    shapes = [(sum(n), h, head_dim) for n, h in zip((q_lengths, k_lengths, k_lengths), (*heads, heads[1]))]
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    ends = torch.tensor(ends_of(q_lengths)), torch.tensor(ends_of(k_lengths))
    return (q, k, v), flash_attn_varlen_func(q, k, v, *ends, **options)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": True, "window_size": (5, 5)},
        {"q_lengths": [9, 9, 9], "k_lengths": [9, 80, 9], "heads": (8, 2)},
        {"q_lengths": [40, 0, 7], "k_lengths": [40, 3, 0]},
        {"dtype": torch.bfloat16, "deterministic": True, "return_attn_probs": True},
    ],
    ids=str,
)
def test_sequences_of_different_lengths_are_one_launch(queued: list[Launch], how: dict[str, Any]) -> None:
    with report.record() as seen:
        _attend(**how)
    assert [launch.function for launch in queued] == ["pa_forward"]
    assert seen.routes() == {"fused": 1}


@pytest.mark.torch_2_5
@pytest.mark.parametrize(
    "how",
    [
        {"q_lengths": [40, 40, 40], "k_lengths": [40, 40, 40]},
        {"q_lengths": [40, 0], "k_lengths": [40, 3]},
        {"q_lengths": [1, 1, 1], "k_lengths": [40, 7, 64], "heads": (8, 2)},
        {"q_lengths": [8, 5, 2], "k_lengths": [40, 7, 64], "heads": (8, 2)},
        {"dropout_p": 0.1},
        {"alibi_slopes": torch.ones(2)},
        {"dtype": torch.float64},
        {"head_dim": 18},
    ],
    ids=str,
)
def test_what_the_kernel_cannot_take_or_is_worse_at_goes_as_before(queued: list[Launch], how: dict[str, Any]) -> None:
    with report.record() as seen:
        _attend(**how)
    assert not queued
    assert "fused" not in seen.routes()
    assert seen.total


@pytest.mark.parametrize("k_lengths", [LENGTHS, [9, 9, 9]], ids=str)
def test_an_upper_left_rule_is_one_launch_where_lengths_are_equal(queued: list[Launch], k_lengths: list[int]) -> None:
    q, k = torch.randn(sum(LENGTHS), 2, 16), torch.randn(sum(k_lengths), 2, 16)
    ends = torch.tensor(ends_of(LENGTHS)), torch.tensor(ends_of(k_lengths))
    sageattn_varlen(q, k, k, *ends, is_causal=True)
    assert (len(queued) == 1) == (k_lengths == LENGTHS)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), torch.float16), ((8, 6), torch.float32)])
def test_a_card_with_tensor_cores_takes_it_only_by_name(
    capability: tuple[int, int], dtype: torch.dtype, environment: Callable[[str], None]
) -> None:
    with emulated_card(lambda launch: None, replace(CARD, capability=capability)) as kernels:
        for route, queued in (("auto", 0), ("fused", 1), ("tiled", 1)):
            environment(route)
            _attend(dtype=dtype)
            assert len(kernels.queued) == queued


def test_by_name_what_it_cannot_take_is_an_error(queued: list[Launch], environment: Callable[[str], None]) -> None:
    environment("fused")
    with pytest.raises(UnsupportedAttention, match="the fused kernel has no dropout"):
        _attend(dropout_p=0.1)
    assert not queued
    _attend([40, 40], [40, 40])
    assert {launch.params.cu_q for launch in queued} == {None}


def _planned(lengths: list[int], k_lengths: list[int]) -> list[Launch]:
    query, key = (torch.zeros(1, 2, max(1, sum(n)), 64) for n in (lengths, k_lengths))
    call = check_call(query, key, key)
    launches = forward_launches(call, whole(call), torch.empty_like(query))
    found = packed_launches(launches, Packed.of(ends_of(lengths), ends_of(k_lengths), query.device, lower_right=True))
    assert launches[0].params.cu_q is None
    return found


def test_no_part_is_longer_than_allowed_where_one_sequence_has_all_the_work() -> None:
    lengths = [3, 3, 1300, 3, 3, 3]
    (launch,) = _planned(lengths, lengths)
    rows = launch.variant.geometry.rows
    limit = 2 * rows * 1300 * 128 * 3  # three tiles of the long one, two heads
    covered: list[tuple[int, int]] = []
    for part in parts(launch, limit):
        tiles = range(part.params.first_tile, part.params.first_tile + part.grid[0])
        batches = range(part.params.first_batch, part.params.first_batch + part.grid[2])
        covered += [(tile, batch) for tile in tiles for batch in batches]
        held = sum(max(0, min(rows, lengths[b] - t * rows)) * lengths[b] for t in tiles for b in batches)
        assert 2 * 128 * held <= limit
    assert sorted(covered) == [(tile, batch) for tile in range(launch.grid[0]) for batch in range(6)]
