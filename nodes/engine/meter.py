"""Time and memory of one call, whether tensors are finite, and rows kept for the exactness check."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...pascal_attn_core.call import AttentionCall
from ...pascal_attn_core.observe.memory import PeakMemory
from .runs import CallKind, CallTally, Run, Sample, stale

_WIDE = (torch.float32, torch.float64)
_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 64 << 20


class Meter:
    """Times the block that it is entered for, and measures its memory if asked.

    On CUDA the time is that between two events, read at the end of the run, and the memory the allocator's own peak. On
    a CPU the memory is counted exactly, which slows that call down, so only the first call of a kind is measured. Other
    devices work on after a call has returned and are not timed, nor is what a CUDA graph captures.

    Attributes:
        out_bytes: size of the result, to be set inside the block; it is not extra memory.
    """

    def __init__(self, run: Run, tally: CallTally, device: torch.device, *, measures: bool):
        self.run, self.tally, self.device, self.measures = run, tally, device, measures
        self.out_bytes = 0

    def __enter__(self) -> Meter:
        self._is_timed = self.device.type in ("cpu", "cuda") and not stale(self.device)
        self._memory = None
        if self._is_timed and self.measures:
            self._keep_peak()
            self._memory = PeakMemory(self.device, follow=self.device.type == "cpu").__enter__()
        if self._is_timed:
            self._start = self._now()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._is_timed:
            return
        if self.device.type == "cuda":
            self.run.time_later(self.tally, self._start, self._now())
        else:
            self.tally.elapsed_ms += (self._now() - self._start) * 1e3
        if self._memory is not None:
            self._memory.__exit__(kind, error, traceback)
            self.tally.extra_bytes = max(self.tally.extra_bytes or 0, self._memory.peak_bytes - self.out_bytes)
            self._keep_peak()

    def _keep_peak(self) -> None:
        """The run's peak so far: a measurement of memory on CUDA begins a new one."""
        if self.device.type == "cuda":
            self.run.saw_memory(torch.cuda.max_memory_allocated(self.device))

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def start_of_run(device: torch.device) -> None:
    """Peaks are counted from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_of_run(device: torch.device) -> int | None:
    """Most memory since the start of the run: torch's tensors on CUDA; on a CPU the whole process, and since it
    started. None where neither can be asked."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite. One pass without a temporary; on a GPU it waits for the result."""
    # Sums of 16 bits are returned in 16 bits, which overflow soon.
    wide = tensor.dtype in _WIDE
    total = tensor.sum() if wide else tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    # A sum can overflow where no element has.
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def not_finite(values: Iterable[Any]) -> bool:
    """Whether a floating-point tensor among ``values`` holds NaN or infinity; no others are looked at."""
    tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return any(not stale(tensor.device) and tensor.numel() > 0 and not is_finite(tensor) for tensor in tensors)


def sample_of(call: AttentionCall, kind: CallKind, out: Tensor) -> Sample | None:
    """Copies in the computer's own memory of evenly spaced rows of the last head of the first batch element, with all
    of its keys; None if the keys alone would take too much."""
    size = call.seq_len_kv * (call.head_dim + call.head_dim_v) * call.query.element_size()
    if call.query.dim() != 4 or size > _SAMPLE_BYTES or call.is_causal or call.is_empty:
        return None
    # Nothing is saved for a backward pass: gradient checkpointing counts what is.
    query, key, value, out = (part.detach() for part in (call.query, call.key, call.value, out))
    mask = call.attn_mask.detach() if isinstance(call.attn_mask, Tensor) else None
    rows = torch.linspace(0, call.seq_len_q - 1, min(_SAMPLE_ROWS, call.seq_len_q), device=out.device).long()
    head = call.num_heads - 1
    if mask is not None:
        mask = mask.expand(*call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv)[0, head, rows]
    # The last key/value head serves the last query head, also where the host lets one head serve all by broadcasting.
    parts = query[0, head, rows], key[0, -1], value[0, -1], out[0, head, rows]
    query, key, value, result = (part.to("cpu", copy=True) for part in parts)
    kept_mask = None if mask is None else mask.to("cpu", copy=True)
    return Sample(kind, query, key, value, kept_mask, call.scale, result)
