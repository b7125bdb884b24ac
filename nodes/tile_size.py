"""Node: Pascal Tile Size; the tiles of a workload on a card are planned, or the fastest of a few that are timed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pascal_attn_core import AttentionConfig, sdpa
from ..pascal_attn_core.call import check_call
from ..pascal_attn_core.config import Unsupported
from ..pascal_attn_core.machine.device import MIB, DeviceInfo, device_info
from ..pascal_attn_core.machine.out_of_memory import out_of_memory
from ..pascal_attn_core.machine.runtime import Runtime, runtime_of
from ..pascal_attn_core.observe.progress import between_blocks
from ..pascal_attn_core.routes.tile_timing import tiles_digest
from ..pascal_attn_core.routes.timing_table import Clock, Contest, median_times
from ..pascal_attn_core.tiled.plan import plan_call
from ..pascal_attn_core.tiled.tiles import TilePlan, recommended_tile_size_for
from .comfy import host, inputs
from .reporting.words import dtype_text

FROM_CARD, MEASURE, AGAIN = "from the card", "measure", "measure again"
_AS_COMFYUI = "as ComfyUI computes"
GIB = 1 << 30
_SHARE_OF_FREE = 2  # a call may take 1 / 2 of what is free, where that is less than its budget
OWN_CHOICE = "own choice"  # of the tiled route, for each call
MOST_KEYS = 65536
_WORTH = 0.97  # a fixed tile must take at most this part of the time that the route's own choice takes
_SECONDS = 4.0
_CANDIDATES = (256, 512, 1024, 2048, 4096)
_LEAST_TOKENS = 1024
_MOST_SCORES = {True: 1 << 30, False: 1 << 24}  # of the timed call, on a GPU and on a CPU


class PascalTileSize(inputs.PascalNode):
    """-> INT, STRING: keys per tile of the tiled route on this card, and why."""

    DESCRIPTION = (
        "How many keys the tiled route of Pascal Attention Patch should process at a time on this card, and one "
        "sentence that explains why. Reads the L2 cache size and the free memory of ComfyUI's compute device, or times "
        "a few sizes once and stores the fastest. You need it only to inspect or to experiment: with tile_size at 0, "
        "the patch makes the same choice for each call by itself."
    )
    SEARCH_ALIASES = ("l2 cache", "block size", "benchmark attention", "tile")
    RETURN_TYPES = ("INT", "STRING")
    RETURN_NAMES = ("tile_size", "explanation")
    OUTPUT_TOOLTIPS = (
        "Keys per tile, for the input tile_size of Pascal Attention Patch. 0 = the patch chooses best by itself.",
        "The choice in one sentence, with the numbers it comes from.",
    )
    FUNCTION = "choose"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        mode = (
            f"{FROM_CARD}: computed from the card's properties, without measuring. {MEASURE}: times a few sizes on the "
            f"card, for at most four seconds, and stores the result in ComfyUI's user folder. {AGAIN}: measures even "
            "if there is a stored result."
        )
        dtype = f"Data type of attention. {_AS_COMFYUI}: what ComfyUI picks on this card for a float16 model."
        tokens = "Tokens of the largest attention call: 4096 for 1024 x 1024 in most models, 32760 for 5 s of 480p Wan."
        budget = "Largest extra memory of one call in MiB, as on Pascal Attention Patch. 0 = chosen from the card."
        return {
            "required": {"mode": ([FROM_CARD, MEASURE, AGAIN], {"default": FROM_CARD, "tooltip": mode})},
            "optional": {
                "tokens": ("INT", {"default": 4096, "min": 1, "max": 1048576, "tooltip": tokens}),
                "heads": ("INT", {"default": 24, "min": 1, "max": 1024, "tooltip": "Attention heads of the model."}),
                "head_dim": ("INT", {"default": 64, "min": 1, "max": 1024, "tooltip": "Channels of one head."}),
                "dtype": ([_AS_COMFYUI, "float16", "bfloat16", "float32"], {"default": _AS_COMFYUI, "tooltip": dtype}),
                "budget_mib": ("INT", {"default": 0, "min": 0, "max": 65536, "tooltip": budget}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def choose(
        self,
        mode: str,
        tokens: int = 4096,
        heads: int = 24,
        head_dim: int = 64,
        dtype: str = _AS_COMFYUI,
        budget_mib: int = 0,
        unique_id: str | None = None,
    ) -> tuple[int, str]:
        device = host.compute_device()
        if dtype == _AS_COMFYUI:
            dtype = dtype_text(host.compute_dtype(device))
        shape = Shape(dtype, tokens, heads, head_dim, budget_mib)
        card = Card(device_info(device), *host.free_and_total_bytes(device))
        size, text = _from_card(card, shape) if mode == FROM_CARD else _measured(card, shape, device, mode == AGAIN)
        host.say(text, unique_id, f"{size:,} keys per tile" if size else "0: the patch chooses best by itself")
        return size, text


def _from_card(card: Card, shape: Shape, remark: str = "") -> tuple[int, str]:
    plan = plan_for(card, shape)
    return plan.kv_block, sentence(card, shape, plan) + remark


def _measured(card: Card, shape: Shape, device: torch.device, again: bool) -> tuple[int, str]:
    planned = plan_for(card, shape)
    try:
        timed = within_limits(card, shape)
        times = runtime_of(device).part(TileSizes).of(timed, planned.kv_block, again=again)
    except CannotMeasure as reason:
        return _from_card(card, shape, f" It could not be measured: {reason}.")
    keys = fastest(times)
    words = f"{keys} keys per tile are fastest" if keys else "the tiled route is fastest with its own choice"
    with_what = f" with {timed.text()}" if timed != shape else ""
    listed = ", ".join(f"{size}: {ms} ms" for size, ms in times.items())
    return keys, sentence(card, shape, planned, f"{words}, as measured{with_what} ({listed})")


class Shape(NamedTuple):
    """One attention call of a model, self-attention of ``tokens`` tokens, as ComfyUI's models lay it out.

    Attributes:
        dtype: ``"float16"``.
        budget_mib: extra memory of the call; 0 = the device's default.
    """

    dtype: str
    tokens: int
    heads: int
    head_dim: int
    budget_mib: int = 0

    def tensor(self, device: torch.device | str) -> Tensor:
        """An empty query, key or value: ``[1, H, N, D]``, a view of ``[1, N, H*D]``."""
        size = 1, self.tokens, self.heads, self.head_dim
        return torch.empty(size, dtype=getattr(torch, self.dtype), device=device).transpose(1, 2)

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(route="tiled", budget_mib=self.budget_mib or None)

    def text(self) -> str:
        """``"4096 tokens, 24 heads of 64 in float16"``."""
        return f"{self.tokens} tokens, {self.heads} head{'s' * (self.heads != 1)} of {self.head_dim} in {self.dtype}"


@dataclass(frozen=True)
class Card:
    """The device that computes: its facts, and free and all memory in bytes, 0 if unknown."""

    info: DeviceInfo
    free_bytes: int = 0
    total_bytes: int = 0

    def text(self) -> str:
        """``"NVIDIA GeForce GTX 1080 Ti with 2.75 MiB of L2 cache and 9.8 of 11.0 GiB free"``."""
        cache = "L2 cache" if self.info.is_gpu else "shared cache"
        known = f"{self.info.l2_bytes / MIB:.4g} MiB of {cache}" if self.info.l2_bytes else f"{cache} of unknown size"
        free = f" and {self.free_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB free" if self.total_bytes else ""
        return f"{self.info.name or self.info.kind} with {known}{free}"


def plan_for(card: Card, shape: Shape) -> TilePlan:
    """The tiles that the tiled route would choose for the call.

    Raises:
        ValueError: not even the smallest tile fits the budget.
    """
    query = shape.tensor("meta")
    call = check_call(query, query, query)
    most = card.free_bytes // _SHARE_OF_FREE if card.total_bytes else None
    return plan_call(call, card.info, shape.config, most_bytes=most)


def sentence(card: Card, shape: Shape, plan: TilePlan, measured: str = "") -> str:
    """The choice in plain words, with its numbers; ``measured``: what a measurement says instead of the plan."""
    constant = recommended_tile_size_for(card.info.l2_bytes if card.info.is_gpu else 0)
    tile = f"{plan.units} head{'s' * (plan.units != 1)} x {plan.q_block} queries x {plan.kv_block} keys at a time"
    planned = f"the tiled route takes {plan.kv_block} keys per tile ({tile}, {plan.extra_bytes / MIB:.1f} MiB)"
    square = f"the square tile that its L2 cache alone would allow is {constant} x {constant}"
    return f"{card.text()}: for {shape.text()} {measured or planned}; {square}."


# ---- the measurement ----


class CannotMeasure(Unsupported):
    """There is no room or no time for a measurement; the message says which."""


class TileSizes(Contest[Shape]):
    """Milliseconds of one device by keys per tile, in a file in ComfyUI's user folder."""

    file_kind, kind_type = "pascal_attn_tile_sizes", Shape

    def __init__(self, runtime: Runtime, *, clock: Clock | None = None, **options: Any):
        clock = clock or functools.partial(median_times, seconds=_SECONDS)
        # The user asks for this measurement: the variable that turns automatic ones off does not apply.
        given = {"folder": lambda: Path(host.user_directory()), "is_on": True, **options}
        super().__init__(runtime, clock=clock, **given)

    def of(self, shape: Shape, planned: int, *, again: bool = False) -> dict[str, float]:
        """The times for a call within limits, taken now if they are not known.

        Args:
            planned: keys per tile by the plan, always among the candidates.
            again: forget what is known.
        Raises:
            CannotMeasure: the message says why not.
        """
        if again:
            self.forget(shape)
        found = self.find(shape, lambda: self._measured(shape, planned))
        if found is None:
            raise CannotMeasure("the timing failed, as the log says")
        return found

    def _measured(self, shape: Shape, planned: int) -> dict[str, float]:
        sizes = sorted({size for size in (*_CANDIDATES, planned) if size < shape.tokens or size == planned})
        try:
            tensors = _numbers(shape, self.device, 0), _numbers(shape, self.device, 1), _numbers(shape, self.device, 2)
            attempts = {OWN_CHOICE: functools.partial(_attend, shape, None, tensors)}
            attempts |= {str(size): functools.partial(_attend, shape, size, tensors) for size in sizes}
            found = self.timed(shape, attempts) or {}
        except out_of_memory() as error:
            raise CannotMeasure(f"the card ran out of memory: {str(error).splitlines()[0]}") from error
        if len(found) < len(attempts):
            raise CannotMeasure(f"the call takes too long to be timed in {_SECONDS:g} seconds")
        return found

    def found_in(self, row: Mapping[str, Any]) -> dict[str, float]:
        found = super().found_in(row)
        if not all(0 < int(size) <= MOST_KEYS for size in found.keys() - {OWN_CHOICE}):
            raise ValueError(f"keys must be from 1 to {MOST_KEYS}, got {list(found)}")
        return {OWN_CHOICE: found[OWN_CHOICE], **found}

    def conditions(self) -> dict[str, str]:
        info = self.info
        return {"card": info.name or info.kind, "arch": info.arch, "torch": torch.__version__, "tiles": tiles_digest()}


def fastest(times: Mapping[str, float]) -> int:
    """Keys per tile; 0 where no fixed size is clearly faster than the route's own choice."""
    best = min(times, key=times.__getitem__)
    return 0 if times[best] > _WORTH * times[OWN_CHOICE] else int(best)


def within_limits(card: Card, shape: Shape) -> Shape:
    """A call like the given one with as few heads, and then tokens, as time and free memory ask for.

    Raises:
        CannotMeasure: there is no room for the smallest.
    """
    budget = (shape.budget_mib * MIB) or card.info.default_budget_bytes()
    room = card.free_bytes // 2 - budget if card.total_bytes else 1 << 62
    most = _MOST_SCORES[card.info.is_gpu]
    while shape.heads * shape.tokens**2 > most or _bytes(shape) > room:
        if shape.heads > 1:
            shape = shape._replace(heads=(shape.heads + 1) // 2)
        elif shape.tokens > _LEAST_TOKENS:
            shape = shape._replace(tokens=max(_LEAST_TOKENS, (shape.tokens + 1) // 2))
        elif _bytes(shape) > room:
            raise CannotMeasure(f"only {card.free_bytes / MIB:.0f} MiB are free")
        else:
            break
    return shape


def _bytes(shape: Shape) -> int:
    """Query, key, value and result, and the copies that a route may make of two of them in float32."""
    numbers = shape.tokens * shape.heads * shape.head_dim
    return numbers * (4 * shape.tensor("meta").element_size() + 2 * 4)


def _numbers(shape: Shape, device: torch.device, seed: int) -> Tensor:
    """Numbers for one tensor, not from the global generator: the user's seed must not change."""
    return shape.tensor(device).normal_(generator=torch.Generator(device).manual_seed(seed))


def _attend(shape: Shape, kv_block: int | None, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    host.throw_if_interrupted()
    with between_blocks(lambda done, total: host.throw_if_interrupted()):
        return sdpa(*tensors, config=replace(shape.config, kv_block=kv_block))
