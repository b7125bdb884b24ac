"""The GEMM limit: a call's bare matrix products, at the best blocking found, and nothing else.

No attention made of these products can be faster (unless a mask leaves out more than padding at the end): the distance
to it is the cost of softmax, masks and bookkeeping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...capture import CapturedCall
from .clock import Clock


class Blocking(NamedTuple):
    """Score elements of one step: key/value heads x query rows (those of a group together) x keys."""

    heads: int
    rows: int
    keys: int


@dataclass
class _Step:
    """One step's operands and buffers, cut and allocated before the clock starts."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    out: Tensor

    def forward(self) -> None:
        torch.bmm(self.query, self.key.mT, out=self.scores)
        self.out.baddbmm_(self.scores, self.value)

    def forward_backward(self) -> None:
        """The 2 products of the forward pass and the 5 of the backward pass (one recomputes the scores)."""
        self.forward()
        torch.bmm(self.query, self.key.mT, out=self.scores)
        torch.bmm(self.out, self.value.mT, out=self.scores)
        torch.bmm(self.scores.mT, self.out)
        torch.bmm(self.scores, self.key)
        torch.bmm(self.scores.mT, self.query)


def best_products(call: CapturedCall, clock: Clock, *, backward: bool = False) -> tuple[Callable[[], None], Blocking]:
    """The bare products of a 4-dimensional call as a function to time, and the blocking at which they are fastest."""
    run: Callable[[], None]
    timed: list[tuple[float, int, Callable[[], None], Blocking]] = []
    for blocking in _blockings(call):
        steps = list(_steps(call, blocking))
        run = functools.partial(_run, steps, backward)
        seconds = clock.seconds(run)
        if seconds < 0.5:  # so short that starting the first call matters
            seconds = min(seconds, clock.seconds(run), clock.seconds(run))
        timed.append((seconds, len(timed), run, blocking))
    _, _, run, blocking = min(timed)
    return run, blocking


def _run(steps: list[_Step], backward: bool) -> None:
    for step in steps:
        step.forward_backward() if backward else step.forward()


def _blockings(call: CapturedCall) -> list[Blocking]:
    batch, kv_heads, keys = call.key.shape[:3]
    groups = call.query.shape[1] // kv_heads
    all_rows = groups * call.query.shape[2]
    is_cpu = call.query.device.type == "cpu"
    # (rows, keys, score elements of a step): around the cache on a CPU, enough to fill a GPU
    cpu: tuple[tuple[int, int, int], ...] = (
        (512, 512, 1 << 20),
        (1024, 512, 1 << 19),
        (1024, 512, 1 << 21),
        (2048, 512, 1 << 20),
    )
    gpu: tuple[tuple[int, int, int], ...] = (
        (2048, 2048, 1 << 22),
        (4096, 4096, 1 << 24),
        (4096, 4096, 1 << 26),
        (8192, 16384, 1 << 27),
    )
    if call.is_causal:  # narrow rows waste less beyond the diagonal
        cpu += ((128, 1024, 1 << 20), (256, 1024, 1 << 20))
        gpu += ((512, 2048, 1 << 24),)
    found = set()
    for rows, cols, elements in cpu if is_cpu else gpu:
        rows, cols = min(rows, all_rows), min(cols, keys)
        found.add(Blocking(max(1, min(elements // (rows * cols), batch * kv_heads)), rows, cols))
    return sorted(found)


def _steps(call: CapturedCall, blocking: Blocking) -> Iterator[_Step]:
    batch, kv_heads, num_keys, head_dim = call.key.shape
    groups, rows = call.query.shape[1] // kv_heads, call.query.shape[2]
    query = call.query.reshape(batch * kv_heads, groups, rows, head_dim)
    key, value = (t.reshape(batch * kv_heads, num_keys, -1) for t in (call.key, call.value))
    q_block = max(1, blocking.rows // groups)
    buffers: dict[tuple[int, ...], Tensor] = {}
    for heads, valid_keys in _head_blocks(call, blocking.heads):
        for row in range(0, rows, q_block):
            part = query[heads, :, row : row + q_block].flatten(1, 2)
            out = part.new_zeros(*part.shape[:2], value.shape[-1])
            last = min(valid_keys, row + q_block) if call.is_causal else valid_keys
            for col in range(0, last, blocking.keys):
                cols = slice(col, min(col + blocking.keys, last))
                size = (*part.shape[:2], cols.stop - col)
                if size not in buffers:
                    buffers[size] = part.new_empty(size)
                yield _Step(part, key[heads, cols], value[heads, cols], buffers[size], out)


def _head_blocks(call: CapturedCall, size: int) -> Iterator[tuple[slice, int]]:
    """Blocks of key/value heads, and how many keys each needs: padding at the end that is masked is not counted."""
    batch, kv_heads, num_keys = call.key.shape[:3]
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        for head in range(0, batch * kv_heads, size):
            yield slice(head, min(head + size, batch * kv_heads)), num_keys
        return
    numbers = torch.arange(1, num_keys + 1, device=mask.device)
    for sample, last in enumerate((mask * numbers).amax(-1).expand(batch, 1, 1).flatten().tolist()):
        for head in range(0, kv_heads, size):
            first = sample * kv_heads
            yield slice(first + head, first + min(head + size, kv_heads)), last
