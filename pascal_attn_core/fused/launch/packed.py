"""Sequences of different lengths, one behind the other in one tensor, as launches that keep them apart."""

from __future__ import annotations

from ..code.source import Variant
from . import Launch
from .plan import Packed

_OF_EACH_QUERY = ("pa_delta", "pa_delta_all", "pa_tensor_delta", "pa_round_query")


def packed_launches(launches: list[Launch], packed: Packed | None) -> list[Launch]:
    """The launches of a call ``[1, H, total, D]`` as those of its sequences, if it has any. Blocks behind the end of a
    sequence that is shorter than the longest do nothing; what lies behind the last sequence is not written. Kernels
    that take each query alone stay as they are."""
    if packed is None:
        return launches
    return [
        launch if launch.function in _OF_EACH_QUERY else _packed(launch, packed)
        for launch in launches
        if launch.function in _OF_EACH_QUERY or _longest_of(launch, packed)
    ]


def _packed(launch: Launch, packed: Packed) -> Launch:
    assert isinstance(launch.variant, Variant)
    tiles = -(-_longest_of(launch, packed) // launch.variant.geometry.rows)
    params = type(launch.params).from_buffer_copy(launch.params)
    # As if all were the longest: a part of the launch may hold just that one.
    work = launch.work // (params.lq * params.lk) * packed.count * packed.max_q * packed.max_k
    params.cu_q, params.cu_k = packed.cu_q.data_ptr(), packed.cu_k.data_ptr()
    params.lq, params.lk, params.batches = packed.max_q, packed.max_k, packed.count
    params.lower_right = packed.lower_right
    grid = (tiles, launch.grid[1], packed.count)
    return launch._replace(grid=grid, params=params, keep=(packed.cu_q, packed.cu_k, *launch.keep), work=work)


def _longest_of(launch: Launch, packed: Packed) -> int:
    """Length of the longest sequence of those tokens whose tiles are the launch's blocks."""
    has_keys = "grad_key_value" in launch.function or launch.function == "pa_grad_all"
    return packed.max_k if has_keys else packed.max_q
