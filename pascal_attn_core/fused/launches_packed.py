"""Sequences of different lengths, one behind the other in one tensor, as launches that keep them apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .launches import Launch


@dataclass(frozen=True, eq=False)
class Packed:
    """The sequences in the tokens of a call with one batch element.

    Attributes:
        cu_q, cu_k: int32 ``[B + 1]``, contiguous, on the device of the call: the first query and the first key of each
            sequence, and where the last one ends.
        max_q, max_k: queries and keys of the longest sequence.
        end_q, end_k: where the last sequence ends.
        lower_right: each sequence's band begins in the corner of its last query and last key, else of its first ones.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    end_q: int
    end_k: int
    lower_right: bool

    @staticmethod
    def of(q_ends: list[int], k_ends: list[int], device: torch.device, *, lower_right: bool) -> Packed:
        """From equally many numbers that start at 0, never fall, and end within the tokens of the call: the kernels
        believe them."""
        cu_q, cu_k = torch.tensor([q_ends, k_ends], dtype=torch.int32, device=device)
        return Packed(cu_q, cu_k, _longest(q_ends), _longest(k_ends), q_ends[-1], k_ends[-1], lower_right)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.cu_q.shape[0] - 1


def _longest(ends: list[int]) -> int:
    return max((last - first for first, last in itertools.pairwise(ends)), default=0)


def packed_launches(launches: Iterable[Launch], packed: Packed) -> list[Launch]:
    """The launches of a call ``[1, H, total, D]`` as those of its sequences. Blocks behind the end of a sequence that
    is shorter than the longest do nothing; what lies behind the last sequence is not written. ``pa_delta`` takes each
    query alone and stays as it is."""
    return [
        launch if launch.function == "pa_delta" else _packed(launch, packed)
        for launch in launches
        if launch.function == "pa_delta" or _longest_of(launch, packed)
    ]


def _packed(launch: Launch, packed: Packed) -> Launch:
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
    """Of the tokens whose tiles are the launch's blocks."""
    return {"pa_forward": packed.max_q, "pa_grad_query": packed.max_q, "pa_grad_key_value": packed.max_k}[
        launch.function
    ]
