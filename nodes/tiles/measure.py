"""Time a few tile sizes on the card, for some seconds at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...pascal_attn_core import AttentionConfig, sdpa
from ...pascal_attn_core.device import MIB
from ...pascal_attn_core.observe.progress import between_blocks
from ..comfy import host
from .choice import Card, Shape

AUTO = 0  # the tiled route decides for each call
_SECONDS = 4.0
_TURNS, _LEAST_TURNS = 7, 4
_CANDIDATES = (256, 512, 1024, 2048, 4096)
_MOST_SCORES = {True: 1 << 31, False: 1 << 25}  # of the timed call, on a GPU and on a CPU


class CannotMeasure(RuntimeError):
    """There is no room or no time for a measurement; the message says which."""


class _TimeIsUp(Exception):
    pass


class Timing(NamedTuple):
    """Milliseconds by keys per tile, 0 = left to the tiled route, and the call that was timed."""

    milliseconds: dict[int, float]
    shape: Shape


def measure(card: Card, shape: Shape, planned: int, device: torch.device) -> Timing:
    """Time the call, or one with fewer heads and tokens if it is too large: in turns, medians.

    Args:
        planned: what the plan says, always among the candidates.
    Raises:
        CannotMeasure: no room, or no turn of all candidates in the time.
    """
    shape = within_limits(card, shape)
    candidates = [AUTO, *sorted({size for size in (*_CANDIDATES, planned) if size < shape.tokens or size == planned})]
    deadline = time.monotonic() + _SECONDS
    turns: list[list[float]] = []
    try:
        tensors, shape = _warmed_up(shape, device, deadline, _SECONDS / (len(candidates) * _LEAST_TURNS))
        for _ in range(1 + _TURNS):
            turns.append([_time(shape.config, size, tensors, deadline) for size in candidates])
    except torch.OutOfMemoryError as error:
        raise CannotMeasure(f"the card ran out of memory: {str(error).splitlines()[0]}") from error
    except _TimeIsUp:
        pass
    if not turns:
        raise CannotMeasure(f"the call takes too long to be timed in {_SECONDS:g} seconds")
    kept = turns[1:] or turns  # the first one warms up
    medians = (statistics.median(times) * 1e3 for times in zip(*kept))
    return Timing(dict(zip(candidates, medians)), shape)


def _warmed_up(
    shape: Shape, device: torch.device, deadline: float, most_seconds: float
) -> tuple[tuple[Tensor, Tensor, Tensor], Shape]:
    """Tensors of a call that takes ``most_seconds`` at most, and its shape."""
    while True:
        tensors = _numbers(shape, device, 0), _numbers(shape, device, 1), _numbers(shape, device, 2)
        taken = min(_time(shape.config, AUTO, tensors, deadline) for _ in range(2))
        if taken <= most_seconds or not shape.can_shrink:
            return tensors, shape
        shape = shape.smaller()


def within_limits(card: Card, shape: Shape) -> Shape:
    """The same call with as few heads, and then tokens, as time and free memory ask for."""
    budget = (shape.budget_mib * MIB) or card.info.default_budget_bytes()
    room = card.free_bytes // 2 - budget if card.total_bytes else 1 << 62
    most = _MOST_SCORES[card.info.is_gpu]
    while (shape.heads * shape.tokens**2 > most or _bytes(shape) > room) and shape.can_shrink:
        shape = shape.smaller()
    if _bytes(shape) > room:
        raise CannotMeasure(f"only {card.free_bytes / MIB:.0f} MiB are free")
    return shape


def _bytes(shape: Shape) -> int:
    """Query, key, value and result, and the copies that a route may make of two of them in float32."""
    numbers = shape.tokens * shape.heads * shape.head_dim
    return numbers * (4 * shape.dtype.itemsize + 2 * 4)


def _numbers(shape: Shape, device: torch.device, seed: int) -> Tensor:
    """Not from the global generator: the seed of the user's picture is his."""
    tensor = shape.tensor(device)
    wave = torch.arange(shape.tokens * shape.head_dim, device=device, dtype=torch.float32).mul_(0.618 + seed).sin_()
    tensor.copy_(wave.view(1, 1, shape.tokens, shape.head_dim))
    return tensor


def _time(config: AttentionConfig, size: int, tensors: tuple[Tensor, Tensor, Tensor], deadline: float) -> float:
    host.throw_if_interrupted()
    _finished(tensors[0])
    start = time.perf_counter()
    with between_blocks(_checkpoint(deadline)):
        out = sdpa(*tensors, config=replace(config, kv_block=size or None))
    _finished(out)
    return time.perf_counter() - start


def _checkpoint(deadline: float) -> Callable[[int, int], None]:
    def checkpoint(done: int, total: int) -> None:
        host.throw_if_interrupted()
        if time.monotonic() > deadline and done < total:
            raise _TimeIsUp

    return checkpoint


def _finished(tensor: Tensor) -> None:
    """Wait for the device, of whatever kind: a number can be read when it is there."""
    tensor[0, 0, 0, 0].item()
