"""Node: Pascal Tile Size; the tiles of a workload on a card are planned, or the fastest of a few that are timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pascal_attn_core import AttentionConfig, sdpa
from ..pascal_attn_core.call import check_call
from ..pascal_attn_core.contest.timing_table import median_times
from ..pascal_attn_core.machine.device import MIB, DeviceInfo, device_info
from ..pascal_attn_core.machine.out_of_memory import out_of_memory
from ..pascal_attn_core.observe.progress import between_blocks
from ..pascal_attn_core.tiled.plan import plan_call
from ..pascal_attn_core.tiled.tiles import TilePlan
from .comfy import host, inputs
from .reporting.words import dtype_text, plural

FROM_CARD, MEASURE = "from the card", "measure"
_AS_COMFYUI = "as ComfyUI computes"
GIB = 1 << 30
OWN_CHOICE = "own choice"  # of the tiled route, for each call
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
        "a few sizes. You need it only to inspect or to experiment: with tile_size at 0, the patch makes the same "
        "choice for each call by itself."
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
            "card, for at most four seconds."
        )
        dtype = f"Data type of attention. {_AS_COMFYUI}: what ComfyUI picks on this card for a float16 model."
        tokens = "Tokens of the largest attention call: 4096 for 1024 x 1024 in most models, 32760 for 5 s of 480p Wan."
        budget = "Largest extra memory of one call in MiB, as on Pascal Attention Patch. 0 = chosen from the card."
        return {
            "required": {"mode": ([FROM_CARD, MEASURE], {"default": FROM_CARD, "tooltip": mode})},
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
        shape, (free, total) = Shape(dtype, tokens, heads, head_dim, budget_mib), host.free_and_total_bytes(device)
        info = device_info(device)
        plan = plan_for(info, shape, free)
        size, words = plan.kv_block, plan_text(plan)
        if mode != FROM_CARD:
            timed = smaller(shape, free // 2, is_gpu=info.is_gpu)
            try:
                times = measured(timed, plan.kv_block, device)
                size, words = fastest(times), measured_text(times, timed)
            except out_of_memory() as error:
                words += f", not measured: the card ran out of memory ({str(error).splitlines()[0]})"
        text = f"{card_text(info, free, total)}: for {shape.text()} {words}."
        host.say(text, unique_id, f"{size:,} keys per tile" if size else "0: the patch chooses best by itself")
        return size, text


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

    def config(self, kv_block: int | None = None) -> AttentionConfig:
        return AttentionConfig(route="tiled", budget_mib=self.budget_mib or None, kv_block=kv_block)

    def text(self) -> str:
        """``"4096 tokens, 24 heads of 64 in float16"``."""
        return f"{self.tokens} tokens, {plural(self.heads, 'head')} of {self.head_dim} in {self.dtype}"


def card_text(info: DeviceInfo, free: int, total: int) -> str:
    """``"NVIDIA GeForce GTX 1080 Ti with 2.75 MiB of L2 cache and 9.8 of 11.0 GiB free"``."""
    cache = "L2 cache" if info.is_gpu else "shared cache"
    known = f"{info.l2_bytes / MIB:.4g} MiB of {cache}" if info.l2_bytes else f"{cache} of unknown size"
    return f"{info.name or info.kind} with {known} and {free / GIB:.1f} of {total / GIB:.1f} GiB free"


def plan_for(info: DeviceInfo, shape: Shape, free: int) -> TilePlan:
    """The tiles that the tiled route would choose for the call, in half of the free bytes.

    Raises:
        ValueError: not even the smallest tile fits the budget.
    """
    query = shape.tensor("meta")
    return plan_call(check_call(query, query, query), info, shape.config(), most_bytes=free // 2)


def plan_text(plan: TilePlan) -> str:
    tile = f"{plural(plan.units, 'head')} x {plan.q_block} queries x {plan.kv_block} keys at a time"
    return f"the tiled route takes {plan.kv_block} keys per tile ({tile}, {plan.extra_bytes / MIB:.1f} MiB)"


# ---- the measurement ----


def smaller(shape: Shape, room: int, *, is_gpu: bool) -> Shape:
    """A call like the given one with as few heads, and then tokens, as time and ``room`` bytes ask for: its query, key,
    value and result, and the copies that a route may make of two of them in float32."""
    number_bytes = 4 * shape.tensor("meta").element_size() + 2 * 4
    while (
        shape.heads * shape.tokens**2 > _MOST_SCORES[is_gpu]
        or shape.tokens * shape.heads * shape.head_dim * number_bytes > room
    ):
        if shape.heads > 1:
            shape = shape._replace(heads=(shape.heads + 1) // 2)
        elif shape.tokens > _LEAST_TOKENS:
            shape = shape._replace(tokens=max(_LEAST_TOKENS, (shape.tokens + 1) // 2))
        else:
            break
    return shape


def measured(shape: Shape, planned: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a call by keys per tile, ``planned`` ones among them, and by the route's own choice; without
    those for which there was no time."""
    sizes = sorted({size for size in (*_CANDIDATES, planned) if size < shape.tokens or size == planned})
    # Not from the global generator: the user's seed must not change.
    numbers = torch.Generator(device).manual_seed(0)
    tensors = [shape.tensor(device).normal_(generator=numbers) for _ in range(3)]

    def attend(kv_block: int | None) -> Tensor:
        host.throw_if_interrupted()
        with between_blocks(lambda done, total: host.throw_if_interrupted()):
            return sdpa(tensors[0], tensors[1], tensors[2], config=shape.config(kv_block))

    attempts: list[Callable[[], Tensor]] = [functools.partial(attend, size) for size in (None, *sizes)]
    times = zip((OWN_CHOICE, *map(str, sizes)), median_times(attempts, device, seconds=_SECONDS))
    return {size: ms for size, ms in times if ms < math.inf}


def fastest(times: Mapping[str, float]) -> int:
    """Keys per tile; 0 where no fixed size is clearly faster than the route's own choice."""
    best = min(times, key=times.__getitem__)
    return 0 if times[best] > _WORTH * times[OWN_CHOICE] else int(best)


def measured_text(times: Mapping[str, float], shape: Shape) -> str:
    keys = fastest(times)
    words = f"{keys} keys per tile are fastest" if keys else "the tiled route is fastest with its own choice"
    listed = ", ".join(f"{size}: {ms:.5g} ms" for size, ms in times.items())
    return f"{words}, as measured with {shape.text()} ({listed})"
