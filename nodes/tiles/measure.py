"""Time a few tile sizes on the card, for some seconds at most, and remember the fastest."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pascal_attn_core import AttentionConfig, sdpa
from ...pascal_attn_core.checks import is_out_of_memory
from ...pascal_attn_core.config import Unsupported
from ...pascal_attn_core.machine.device import MIB
from ...pascal_attn_core.machine.runtime import Runtime
from ...pascal_attn_core.observe.progress import between_blocks
from ...pascal_attn_core.routes.tile_timing import tiles_digest
from ...pascal_attn_core.routes.timing_table import Clock, TimingTable, median_times
from ..comfy import host
from .choice import Card, Shape, name_of

AUTO = 0  # the tiled route decides for each call
_WORTH = 0.97  # a fixed tile must take at most this part of the time that the route's own choice takes
_SECONDS = 4.0
_CANDIDATES = (256, 512, 1024, 2048, 4096)
_MOST_SCORES = {True: 1 << 30, False: 1 << 24}  # of the timed call, on a GPU and on a CPU


class Workload(NamedTuple):
    """The key of a stored measurement: a :class:`Shape` as plain values."""

    dtype: str
    tokens: int
    heads: int
    head_dim: int
    budget_mib: int

    @staticmethod
    def of(shape: Shape) -> Workload:
        return Workload(name_of(shape.dtype), shape.tokens, shape.heads, shape.head_dim, shape.budget_mib)


class TileSize(NamedTuple):
    """The result of a measurement.

    Attributes:
        keys: of the fastest tile; AUTO where no fixed one is clearly faster than the route's own choice.
        milliseconds: by keys per tile, "own choice" for AUTO.
        timed: the call that was timed, in words; measured: the day, ``"2026-11-22"``.
    """

    keys: int
    milliseconds: dict[str, float]
    timed: str
    measured: str


class TileSizes(TimingTable[Workload, TileSize]):
    """The measured tile sizes of one device, in a file in ComfyUI's user folder."""

    section, file_kind = "tile_sizes", "pascal_attn_tile_sizes"

    def __init__(self, runtime: Runtime, *, clock: Clock | None = None, **options: Any):
        clock = clock or functools.partial(median_times, seconds=_SECONDS)
        # The user asks for this measurement: the variable that turns automatic ones off does not apply.
        given = {"folder": lambda: Path(host.user_directory()), "is_on": True, **options}
        super().__init__(runtime, clock=clock, **given)

    def of(self, card: Card, shape: Shape, planned: int, *, again: bool = False) -> TileSize:
        """The fastest tiles for a call, timed now if they are not known.

        Args:
            planned: keys per tile by the plan, always among the candidates.
            again: forget what is known.
        Raises:
            CannotMeasure: the message says why not.
        """
        kind = Workload.of(shape)
        if again:
            self.forget(kind)
        found = self.find(kind, lambda: self._measured(card, shape, planned))
        if found is None:
            raise CannotMeasure("the card ran out of memory")
        return found

    def _measured(self, card: Card, shape: Shape, planned: int) -> TileSize:
        times, timed = measure(card, shape, planned, self.device, self.clock)
        best = min(times, key=lambda size: times[size])
        if times[best] > _WORTH * times[AUTO]:
            best = AUTO
        milliseconds = {"own choice" if size == AUTO else str(size): round(ms, 3) for size, ms in times.items()}
        return TileSize(best, milliseconds, timed.text(), datetime.date.today().isoformat())

    def conditions(self) -> dict[str, str]:
        info = self.info
        return {"card": info.name or info.kind, "arch": info.arch, "torch": torch.__version__, "tiles": tiles_digest()}

    def kind_of(self, fields: Mapping[str, Any]) -> Workload:
        return Workload(**fields)

    def row(self, found: TileSize) -> dict[str, Any]:
        return found._asdict()

    def found_in(self, row: Mapping[str, Any]) -> TileSize:
        keys = int(row["keys"])
        if not 0 <= keys <= 65536:
            raise ValueError(f"keys must be from 0 to 65536, got {keys}")
        return TileSize(keys, dict(row["milliseconds"]), str(row["timed"]), str(row["measured"]))


class CannotMeasure(Unsupported):
    """There is no room or no time for a measurement; the message says which."""


class Timing(NamedTuple):
    """Milliseconds by keys per tile, 0 = left to the tiled route, and the call that was timed."""

    milliseconds: dict[int, float]
    shape: Shape


def measure(card: Card, shape: Shape, planned: int, device: torch.device, clock: Clock) -> Timing:
    """Time the call, or one with fewer heads and tokens if it is too large.

    Args:
        planned: keys per tile by the plan, always among the candidates.
    Raises:
        CannotMeasure: no room, or no time.
    """
    shape = within_limits(card, shape)
    sizes = [AUTO, *sorted({size for size in (*_CANDIDATES, planned) if size < shape.tokens or size == planned})]
    try:
        tensors = _numbers(shape, device, 0), _numbers(shape, device, 1), _numbers(shape, device, 2)
        times = clock([functools.partial(_attend, shape.config, size, tensors) for size in sizes], device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CannotMeasure(f"the card ran out of memory: {str(error).splitlines()[0]}") from error
    if float("inf") in times:
        raise CannotMeasure(f"the call takes too long to be timed in {_SECONDS:g} seconds")
    return Timing(dict(zip(sizes, times)), shape)


def within_limits(card: Card, shape: Shape) -> Shape:
    """A call like the given one with as few heads, and then tokens, as time and free memory ask for."""
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
    """Numbers for one tensor, not from the global generator: the user's seed must not change."""
    tensor = shape.tensor(device)
    wave = torch.arange(shape.tokens * shape.head_dim, device=device, dtype=torch.float32).mul_(0.618 + seed).sin_()
    tensor.copy_(wave.view(1, 1, shape.tokens, shape.head_dim))
    return tensor


def _attend(config: AttentionConfig, size: int, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    host.throw_if_interrupted()
    with between_blocks(lambda done, total: host.throw_if_interrupted()):
        return sdpa(*tensors, config=replace(config, kv_block=size or None))
