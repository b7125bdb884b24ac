"""Our kernel and torch's timed against each other on the user's own card, once per kind of call.

Which of two exact kernels is the faster one on an old card, with the torch and the driver that are installed there,
cannot be known beforehand: a small call of the same kind is run by both. The result is stored on disk, so that the same
machine decides the same way every time.
"""

from __future__ import annotations

import functools
import logging
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, check_call
from ..config import AttentionConfig, RouteUnavailable, cache_folder
from ..device import DeviceInfo
from ..fused.plan import variants_of
from ..fused.source import kernels_digest
from ..own_thread import in_backward, in_own_thread
from ..runtime import Runtime
from ..storage import name_for, read_object, write_object
from .route import Request, Route
from .torch_kernel import TorchForm, find_form, run_form

log = logging.getLogger("pascal_attn")

# The timed call is no larger than this: beyond, the time per score no longer depends on the length.
_TOKENS = 1024
_KEYS_OF_FEW_QUERIES = 16384
_ROWS = 1 << 16  # query rows of all heads together, several times what the largest card works on at once
_ROWS_WITH_GRADIENTS = 1 << 14  # there each head has memory of its own
_ROUNDS = 3
RETRY_SECONDS = 60.0  # after a timing that found no memory, or no kernel
_CONFIG = AttentionConfig()
Clock = Callable[[list[Callable[[], Any]], torch.device], list[float]]


class Kind(NamedTuple):
    """Calls that are taken to be alike. Token and row counts are powers of two, at most those of the timed call.

    Attributes:
        variant: of the fused kernel: head_dim, dtype, kind of mask.
        head_dim, head_dim_v: of the call.
        q_tokens, kv_tokens: of a sequence.
        groups: query heads per key/value head.
        rows: query rows of all heads and batches together.
        mask_rows: 0 no mask, 1 one row for all queries, 2 a row for each.
        is_causal, gradients: whether the call is causal, and has gradients.
    """

    variant: str
    head_dim: int
    head_dim_v: int
    q_tokens: int
    kv_tokens: int
    groups: int
    rows: int
    mask_rows: int
    is_causal: bool
    gradients: bool

    def __str__(self) -> str:
        masks = ("", ", one mask row", ", a mask row per query")[self.mask_rows]
        words = ", causal" * self.is_causal + ", gradients" * self.gradients
        groups = f", groups of {self.groups}" if self.groups > 1 else ""
        return f"{self.variant}: {self.q_tokens} x {self.kv_tokens} tokens, {self.rows} rows{groups}{masks}{words}"

    @staticmethod
    def of(call: AttentionCall) -> Kind:
        """The kind of a call that the fused kernel takes."""
        mask = call.attn_mask
        q_tokens = min(_TOKENS, _power_of_two(call.seq_len_q))
        most_keys = min(_KEYS_OF_FEW_QUERIES, _TOKENS * _TOKENS // q_tokens)
        most_rows = _ROWS_WITH_GRADIENTS if call.needs_grad else _ROWS
        return Kind(
            variants_of(call).forward.name,
            call.head_dim,
            call.head_dim_v,
            q_tokens,
            min(most_keys, _power_of_two(call.seq_len_kv)),
            call.groups,
            min(most_rows, _power_of_two(call.batch_size * call.num_heads * call.seq_len_q)),
            0 if mask is None else 1 if mask.dim() < 2 or mask.shape[-2] == 1 else 2,
            call.is_causal,
            call.needs_grad,
        )


class Timings:
    """What has been timed on one device. Made by ``runtime.part(Timings)``; several threads may use it at once.

    Args:
        runtime: of the device.
        clock: as :func:`median_times`.
        folder: gives the folder of the file, or None: nothing is stored.
    """

    def __init__(
        self, runtime: Runtime, *, clock: Clock | None = None, folder: Callable[[], Path | None] = cache_folder
    ):
        self.device, self.info = runtime.device, runtime.info
        self.clock, self.folder = median_times if clock is None else clock, folder
        self._postponed: dict[Kind, tuple[Route, AttentionCall, int]] = {}
        self._again: dict[Kind, float] = {}  # when kinds that found no memory may be timed again
        self._lock = threading.RLock()

    @functools.cached_property
    def known(self) -> dict[Kind, float | None]:
        """Our kernel's time in units of torch's for each kind of call; None where it could not be found out, which is
        not stored."""
        folder = self.folder()
        return {} if folder is None else dict(_load(folder / file_name(self.info)))

    def fused_over_torch(self, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        """How long our kernel takes, in units of torch's time, for calls of this kind on this device.

        Both are timed at the first such call, which takes some milliseconds, and never again on this machine with the
        same card, torch and kernels.

        Args:
            ours: the fused route.
            call: one that the fused route takes, and torch's kernel as it is or rewritten.
            budget_bytes: extra memory that torch's route may use.
        Returns:
            The ratio, or None where it could not be found out (torch refuses the timed call; or memory was short: after
            RETRY_SECONDS it is tried again), or cannot be now: a graph is being captured, or this is a backward pass,
            for the end of which the timing of gradients would wait; the next call outside of it times this kind too.
        """
        kind = Kind.of(call)
        if kind in self.known and not self._postponed and not self._again:
            return self.known[kind]
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.known.get(kind)
        if in_backward():
            if kind not in self.known:
                self._postponed[kind] = ours, _without_numbers(call), budget_bytes
            return self.known.get(kind)
        with self._lock:
            for each in [each for each, due in self._again.items() if time.monotonic() >= due]:
                del self._again[each], self.known[each]
            waiting, self._postponed = {**self._postponed, kind: (ours, call, budget_bytes)}, {}
            for each, given in waiting.items():
                if each not in self.known:
                    self.known[each] = self._timed(each, *given)
                    self.save()
            return self.known[kind]

    def _timed(self, kind: Kind, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        device = call.query.device

        def times() -> list[float] | None:
            with torch.set_grad_enabled(kind.gradients):
                sample = sample_call(call, kind)
                form, plan = find_form(sample, budget_bytes), ours.plan(Request(sample, _CONFIG))
                if not isinstance(form, TorchForm) or isinstance(plan, list):
                    return None
                attempts: list[Callable[[], Tensor]] = [
                    lambda: (
                        ours.with_gradients(sample, _CONFIG, plan)[0]
                        if sample.needs_grad
                        else ours.forward(sample, _CONFIG, plan, with_lse=False, for_grad=False, stats=None).out
                    ),
                    lambda: run_form(sample, form),
                ]
                return self.clock([_with_gradients(sample, attempt) for attempt in attempts], device)

        try:
            found = in_own_thread(times, device)
        except (RouteUnavailable, torch.cuda.OutOfMemoryError):
            self._again[kind] = time.monotonic() + RETRY_SECONDS
            return None
        if found is None:
            return None
        our_time, its_time = found
        log.info("timed once on %s: fused %.2f ms, torch %.2f ms for %s", device, our_time, its_time, kind)
        return our_time / its_time

    def save(self) -> None:
        """Store what is known. What another process has stored meanwhile takes precedence, so that both decide the same
        way."""
        folder, name = self.folder(), file_name(self.info)
        if folder is None:
            return
        self.known.update(_load(folder / name))
        rows = [
            {"kind": kind._asdict(), "ratio": round(ratio, 4)}
            for kind, ratio in self.known.items()
            if ratio is not None
        ]
        try:
            write_object(folder / name, {**_conditions(self.info), "fused_over_torch": rows})
        except OSError as error:
            log.info("the timings could not be stored in %s: %s", folder, error)


def sample_call(call: AttentionCall, kind: Kind) -> AttentionCall:
    """A call of this kind on the same device: random numbers, and as many heads as make the kind's rows. Without
    gradients all heads share the memory of one."""
    kv_heads = max(1, kind.rows // (kind.q_tokens * kind.groups))
    device = call.query.device
    generator = torch.Generator(device).manual_seed(0)

    def numbers(heads: int, tokens: int, head_dim: int) -> Tensor:
        own_heads = heads if kind.gradients else 1
        shape = (1, own_heads, tokens, head_dim)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(call.query.dtype).expand(1, heads, -1, -1).requires_grad_(kind.gradients)

    mask = None
    if isinstance(call.attn_mask, Tensor):
        rows = kind.q_tokens if kind.mask_rows == 2 else 1
        mask = torch.zeros((1, 1, rows, kind.kv_tokens), dtype=call.attn_mask.dtype, device=device)
        mask = ~mask if mask.dtype == torch.bool else mask
    return check_call(
        numbers(kv_heads * kind.groups, kind.q_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim_v),
        mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=kind.groups > 1,
    )


def _without_numbers(call: AttentionCall) -> AttentionCall:
    """What :func:`sample_call` needs of a call, which can be kept."""
    mask = call.attn_mask
    query, key, value = (t.new_empty(0) for t in (call.query, call.key, call.value))
    return call.with_tensors(query, key, value, mask.new_empty(0) if isinstance(mask, Tensor) else mask)


def _with_gradients(call: AttentionCall, forward: Callable[[], Tensor]) -> Callable[[], Any]:
    if not call.needs_grad:
        return forward

    def both() -> Any:
        out = forward()
        return torch.autograd.grad(out, (call.query, call.key, call.value), out.detach())

    return both


def median_times(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median milliseconds of each, timed in turn, after one run of each that is not timed."""
    for attempt in attempts:
        attempt()
    times: list[list[float]] = [[] for _ in attempts]
    for _ in range(_ROUNDS):
        for attempt, its_times in zip(attempts, times):
            its_times.append(_milliseconds(attempt, device))
    return [statistics.median(its_times) for its_times in times]


def _milliseconds(attempt: Callable[[], Any], device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream(device))
    attempt()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return start.elapsed_time(end)


# ---- on disk -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def file_name(info: DeviceInfo) -> str:
    """The file of a card, with this torch and these kernels."""
    return name_for("timings", _conditions(info))


def _conditions(info: DeviceInfo) -> dict[str, str]:
    return {"card": info.name, "arch": info.arch, "torch": torch.__version__, "kernels": kernels_digest()}


def _load(path: Path) -> dict[Kind, float]:
    """The file's content; one that cannot be read counts as empty."""
    try:
        rows = read_object(path)["fused_over_torch"]
        return {Kind(**row["kind"]): float(row["ratio"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _power_of_two(count: int) -> int:
    """The smallest one that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()
