"""The record of attention while one model ran, kept for the report: all samplings, decodings or encodings that one node
makes in one prompt are one Run."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...pascal_attn_core.call import TiledStats

if TYPE_CHECKING:
    from .compare import Difference

TAKEN, PASSED = "taken", "passed to ComfyUI"  # outcomes of a call; the host computes what is passed to it itself
_PENDING = 512  # after this many pairs of CUDA events those that are over are read


@dataclass(frozen=True)
class CallKind:
    """Calls of one kind are counted together.

    Attributes:
        block: where in the model: ``"double 3"``, ``"input 4.0"``, ``"call 17"``.
        outcome: ``TAKEN`` or ``PASSED``.
        route: ``"torch"``, ``"tiled"``, ``"fused"``, ``"math"``; "" where it was passed to ComfyUI.
        why: one sentence: why this route, or why it was passed to ComfyUI.
        query, key: shapes ``[B, H, L, D]`` and ``[B, Hkv, S, D]``; () where they could not be read.
        dtype, mask: ``"float16"``; ``"none"``, ``"bool [1, 1, 77, 77]"``.
        over_torch, torch_stores: what the route's choice says of torch's own function, see ``routes.Choice``.
    """

    block: str
    outcome: str
    route: str
    why: str
    query: tuple[int, ...] = ()
    key: tuple[int, ...] = ()
    dtype: str = ""
    mask: str = "none"
    over_torch: float | None = None
    torch_stores: bool | None = None

    @property
    def is_taken(self) -> bool:
        return self.outcome == TAKEN

    @property
    def math_bytes(self) -> int:
        """Size of the score matrix, which torch's math attention stores at least for one such call, in bytes."""
        if not self.query or not self.key:
            return 0
        size = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        return self.query[0] * self.query[1] * self.query[2] * self.key[2] * size


@dataclass
class CallTally(TiledStats):
    """Calls of one kind: what their routes counted, their number, and:

    Attributes:
        elapsed_ms: time in them, by the device's own clock.
        extra_bytes: peak memory of the first of them besides inputs and output, None if not measured.
        repaired: outputs that were not finite and were computed again in float32.
    """

    elapsed_ms: float = 0.0
    extra_bytes: int | None = None
    repaired: int = 0

    def merge(self, other: CallTally) -> None:
        self.add(other)
        self.count += other.count
        self.elapsed_ms += other.elapsed_ms
        self.repaired += other.repaired
        if other.extra_bytes is not None:
            self.extra_bytes = max(self.extra_bytes or 0, other.extra_bytes)


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows of one real call, enough to check them against float64.

    Of one head query is ``[rows, D]`` and out ``[rows, Dv]``; of its key/value head key is ``[S, D]`` and value
    ``[S, Dv]``; mask is None or ``[rows or 1, S]``.
    """

    kind: CallKind
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    out: Tensor


@dataclass(eq=False)
class Run:
    """One run of one patched object.

    Attributes:
        subject: class of the model, ``"Flux"``.
        part: ``"diffusion model"``, ``"VAE"``, ``"text encoder"``, ``"feed-forward"`` or ``"int8"``.
        settings: the patch's settings as one line.
        device, unique_id, prompt_id: where, by which node, in which prompt.
        tallies: what happened, by kind of call.
        warnings: sentences the user should read, each once.
        notes: further facts for the report, each once.
        gains: what was gained otherwise than in attention calls, a sentence each: a VAE in bands, layers in int8.
        is_exact: whether what was patched gives the unpatched results within rounding, by its nature.
        devices: where its calls ran, several on multi-GPU hosts.
        peak_bytes: most memory seen on one device during the run; None if not known.
        sample: rows of the largest call, for the exactness check; exactness: its result, see ``reporting.exactness``.
        compared: by kind of call, how far our first answer was from ComfyUI's own; None where it was not compared.
        lock: to be held while a tally is changed.
    """

    subject: str
    part: str
    settings: str
    device: str
    unique_id: str | None = None
    prompt_id: str = ""
    tallies: dict[CallKind, CallTally] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gains: list[str] = field(default_factory=list)
    is_exact: bool = True
    devices: set[str] = field(default_factory=set)
    peak_bytes: int | None = None
    sample: Sample | None = None
    exactness: Any = None
    started: float = field(default_factory=time.time)
    elapsed_s: float = 0.0
    finished: bool = False
    compared: dict[Hashable, Difference | None] = field(default_factory=dict, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _pending: list[tuple[CallTally, Any, Any]] = field(default_factory=list, repr=False)
    _since: float = field(default_factory=time.time, repr=False)  # it has gone on

    def tally(self, kind: CallKind) -> CallTally:
        """The counts of a kind, still 0 for one that is new."""
        with self.lock:
            return self.tallies.setdefault(kind, CallTally())

    def take_back(self, kind: CallKind) -> None:
        """Count one call less, and nothing of it if it was the only one."""
        with self.lock:
            tally = self.tallies[kind]
            tally.count -= 1
            if not tally.count:
                del self.tallies[kind]
            if self.sample is not None and self.sample.kind == kind:
                self.sample = None

    def warn(self, sentence: str) -> bool:
        """Keep a sentence for the report; returns whether it is new."""
        return self._keep(self.warnings, sentence)

    def note(self, sentence: str) -> None:
        self._keep(self.notes, sentence)

    def gain(self, sentence: str) -> None:
        """Keep what was gained otherwise than in attention calls."""
        self._keep(self.gains, sentence)

    def _keep(self, sentences: list[str], sentence: str) -> bool:
        with self.lock:
            is_new = sentence not in sentences
            if is_new:
                sentences.append(sentence)
            return is_new

    def saw_device(self, device: torch.device) -> bool:
        """A call runs on this device; returns whether it is the first there."""
        with self.lock:
            is_new = str(device) not in self.devices
            self.devices.add(str(device))
            return is_new

    def time_later(self, tally: CallTally, start: Any, end: Any) -> None:
        """Two CUDA events whose distance is read when they are over, at the latest when the run ends."""
        with self.lock:
            self._pending.append((tally, start, end))
            if len(self._pending) % _PENDING == 0:
                self._pending = [waiting for waiting in self._pending if not _read_clock(*waiting)]

    def saw_memory(self, peak_bytes: int) -> None:
        with self.lock:
            self.peak_bytes = max(self.peak_bytes or 0, peak_bytes)

    def finish(self) -> None:
        """Read the clocks; the run is complete."""
        with self.lock:
            for tally, start, end in self._pending:
                end.synchronize()
                _read_clock(tally, start, end)
            self._pending.clear()
            self.elapsed_s += time.time() - self._since
            self.finished = True

    def go_on(self, run: Run) -> Run:
        """It runs again, as ``run``, whose sentences come first; returns itself."""
        with self.lock:
            self.finished, self._since, self.is_exact = False, run._since, self.is_exact and run.is_exact
            for name in ("gains", "warnings", "notes"):
                setattr(self, name, list(dict.fromkeys(getattr(run, name) + getattr(self, name))))
            return self

    @property
    def identity(self) -> tuple[str | None, ...]:
        """Two runs of which it is equal are one: what was patched and how, by which node, in which prompt."""
        return self.subject, self.part, self.settings, self.device, self.unique_id, self.prompt_id

    # ---- sums ----

    def count(self, outcome: str | None = None) -> int:
        return sum(t.count for kind, t in self.tallies.items() if outcome in (None, kind.outcome))

    def total(self, name: str) -> int:
        """The sum of one of the counts in the tallies."""
        return sum(getattr(tally, name) for tally in list(self.tallies.values()))

    def routes(self) -> dict[str, int]:
        """Calls per route taken, most frequent first."""
        return self.counted(lambda kind: kind.route, TAKEN)

    def reasons(self, outcome: str | None = None) -> dict[str, int]:
        """Calls per sentence, of one outcome or of all, most frequent first."""
        return self.counted(lambda kind: kind.why, outcome)

    def counted(self, word: Callable[[CallKind], str], outcome: str | None) -> dict[str, int]:
        """Calls by what ``word`` says of their kind, most frequent first."""
        counts: Counter[str] = Counter()
        for kind, tally in list(self.tallies.items()):
            if outcome in (None, kind.outcome):
                counts[word(kind)] += tally.count
        return dict(counts.most_common())

    @property
    def elapsed_ms(self) -> float:
        """Time in the calls that were taken."""
        return sum(tally.elapsed_ms for tally in self.tallies.values())

    @property
    def share(self) -> float | None:
        """The share of these calls in the run's time, over all its devices; None while it runs."""
        whole = self.elapsed_s * max(1, len(self.devices))
        return min(1.0, self.elapsed_ms / 1e3 / whole) if whole else None

    @property
    def extra_bytes(self) -> int | None:
        """The most that one call needed besides its inputs and output; None if none was measured."""
        return max((t.extra_bytes for t in self.tallies.values() if t.extra_bytes is not None), default=None)

    @property
    def shares(self) -> dict[str, int]:
        """The number of heads that each device computed of the calls that several shared; {} if none were."""
        whole = TiledStats()
        for tally in list(self.tallies.values()):
            whole.add(tally)
        return whole.devices

    @property
    def math_bytes(self) -> int:
        """Size of the largest call's score matrix, which torch's math attention would have stored at least."""
        return max((kind.math_bytes for kind in self.tallies), default=0)

    @property
    def counts(self) -> str:
        """``"228 calls, 228 taken (torch 200, tiled 28), 0 passed to ComfyUI"``."""
        routes = ", ".join(f"{route} {count}" for route, count in self.routes().items())
        taken = f"{self.count(TAKEN)} taken{f' ({routes})' if routes else ''}"
        calls = self.count()
        return f"{calls} call{'' if calls == 1 else 's'}, {taken}, {self.count(PASSED)} passed to ComfyUI"

    def line(self) -> str:
        """``"Flux: 228 calls, ..."``, after what else was gained; without either the first note."""
        parts = self.gains[:1]
        if self.tallies or not (parts or self.notes):
            parts = [*parts, self.counts]
        return f"{self.subject}: {'; '.join(parts or self.notes[:1])}"


def _read_clock(tally: CallTally, start: Any, end: Any) -> bool:
    """Add the time between two CUDA events if the second is over; returns whether it is."""
    if not end.query():
        return False
    tally.elapsed_ms += start.elapsed_time(end)
    return True


_lock = threading.Lock()
_recent: deque[Run] = deque(maxlen=32)


def remember(run: Run) -> Run:
    """Keep a run that has begun, for the report; the oldest is forgotten. Its sample replaces those of older runs.

    A node that runs again in the same prompt (the negative prompt, the next tile of an upscaler) goes on with the run
    that it had there, which is returned.
    """
    with _lock:
        for other in _recent:
            if run.prompt_id and run.unique_id and other.finished and other.identity == run.identity:
                return other.go_on(run)
            if other.subject == run.subject and other.part == run.part and other.finished:
                other.sample = None
        _recent.append(run)
        return run


def remembered() -> list[Run]:
    with _lock:
        return list(_recent)


def block_name(options: dict[str, Any] | None) -> str:
    """The block of the model that a call is in, as the host writes it into ``transformer_options``; "" where it is not.

    UNets write ``block = ("input", 4)`` and the index of the transformer block inside, ``"input 4.0"``; transformers
    write ``block_type`` and ``block_index``, ``"double 3"``.
    """
    options = options or {}
    block, index = options.get("block"), options.get("block_index")
    if isinstance(block, tuple) and len(block) == 2:
        return f"{block[0]} {block[1]}" + ("" if index is None else f".{index}")
    if index is not None:
        return f"{options.get('block_type') or 'block'} {index}"
    return ""


def stale(device: torch.device) -> bool:
    """Whether a device cannot be asked now: while a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
