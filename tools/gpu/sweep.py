"""``python -m tools.gpu.sweep``: other geometries than the table's, compiled on the spot, compared with float64, then
timed in turns with the shipped one.

What has been measured is told after every job (a kernel kind, head_dim, dtype and kind of mask), and known to the next
process (:mod:`.told`): a run that is cut short goes on where it was. A candidate that ended its process is not tried
again.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call, empty_output
from pascal_attn_core.cli.bench.contest import quiet_torch
from pascal_attn_core.contest.timing_table import milliseconds
from pascal_attn_core.fused.code.kinds import sibling
from pascal_attn_core.fused.code.source import (
    GRAD_ALL_HEAD_DIMS,
    HEAD_DIMS,
    KINDS,
    AnyGeometry,
    Variant,
    all_variants,
    source,
)
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.gpu.runtime import CompileError
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch import plan as plans
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.packed import packed_launches
from pascal_attn_core.fused.launch.stream_k import distribute
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.out_of_memory import is_out_of_memory
from pascal_attn_core.machine.room import available_bytes
from pascal_attn_core.machine.runtime import runtime_of

from . import told
from .geometries import Candidate, details, fits, shapes, words

_COMMON = (64, 128, 40, 80)
_DTYPES = ("float32", "float16")
# Blocks for each place on the card: the last, partly filled round of blocks is a small share of the time.
_WAVES = 24
_SHARE_OF_MEMORY = 0.1
_SECONDS_OF_ROUND = 0.01
# What the check call has beyond one flush of float32 sums (512 keys).
_CHECKED_KEYS = 512
_SOFTCAP = 30.0
# Blocks that are listed for each place on the card: there is something to distribute.
_EVEN_WAVES = 1.4
# Seconds after which a candidate hangs on its first call, and a job while it is timed.
_LIMIT, _LIMIT_OF_JOB = 60, 300
_DECODE = (32, 8)  # query heads, key and value heads of the call with one query


@dataclass
class Lane:
    """One candidate of a job. None = not known; ``note`` says why.

    Attributes:
        registers, spilled: of the thread of its kernel that needs most, in registers and bytes; shared_bytes: of a
            block.
        error: largest difference from float64 relative to the largest value.
        seconds: the median over rounds; times: each; over_shipped: the median over rounds of its time divided by the
            shipped geometry's in the same round.
    """

    name: str
    tiles: dict[str, int] | None = None
    registers: int | None = None
    spilled: int | None = None
    shared_bytes: int | None = None
    error: float | None = None
    seconds: float | None = None
    over_shipped: float | None = None
    times: list[float] = field(default_factory=list)
    note: str = ""


# ---- compilation -----------------------------------------------------------------------------------------------------


def compile_one(text: str, arch: int, macros: dict[str, object]) -> nvrtc.Compiled | str:
    """Machine code by this machine's NVRTC, or why there is none."""
    library = nvrtc.find(arch)
    return "no NVRTC" if library is None else _compiled(library, text, arch, macros)


def _compiled(library: Any, text: str, arch: int, macros: dict[str, object]) -> nvrtc.Compiled | str:
    try:
        return library.compile(text, arch, macros)
    except CompileError as error:
        lines = str(error).strip().splitlines()
        return next((line for line in lines if "error" in line), lines[0])[:200]


class Compilations:
    """Compiles ahead, in processes of its own: NVRTC compiles one text at a time. One process is this one."""

    def __init__(self, kernels: Kernels, arch: int, processes: int):
        self.arch, self.compile = arch, compile_one
        self.asked: dict[Candidate, Future[nvrtc.Compiled | str]] = {}
        self.pool: Executor = ThreadPoolExecutor(1)
        if processes > 1:
            self.pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        elif isinstance(kernels.gpu, CudaRuntime):
            self.compile = functools.partial(_compiled, kernels.gpu.find_compiler(arch))

    def ask(self, candidates: Iterable[Candidate]) -> None:
        """Begin to compile these, after all that has been asked for before."""
        for candidate in candidates:
            if candidate not in self.asked:
                task = source(candidate.kind), self.arch, candidate.macros()
                self.asked[candidate] = self.pool.submit(self.compile, *task)

    def get(self, candidate: Candidate) -> nvrtc.Compiled | str:
        """The machine code, or why there is none."""
        self.ask([candidate])
        return self.asked[candidate].result()


# ---- calls -----------------------------------------------------------------------------------------------------------


@functools.cache
def _known() -> frozenset[Variant]:
    return frozenset(all_variants())


def all_jobs() -> list[Variant]:
    """The variants to sweep, the most used first."""
    found = [Variant("forward", dim, dtype) for dim in _COMMON for dtype in _DTYPES]
    found += [Variant(kind, dim, "float32") for dim in (64, 128) for kind in ("grad_query", "grad_key_value")]
    found += [Variant("grad_all", dim, "float32") for dim in (64, 128)]
    found += [Variant("split", dim, dtype) for dim in (64, 128) for dtype in _DTYPES]
    found += [Variant("forward", dim, dtype, "bool") for dim in _COMMON for dtype in _DTYPES]
    found += [Variant("forward", dim, dtype) for dim in HEAD_DIMS for dtype in _DTYPES]
    gradients = [dim for dim in HEAD_DIMS if dim <= 256]
    found += [Variant(kind, dim, "float32") for dim in gradients for kind in ("grad_query", "grad_key_value")]
    found += [Variant("grad_all", dim, "float32") for dim in GRAD_ALL_HEAD_DIMS]
    found += [Variant("forward", dim, "float32", padded=True) for dim in _COMMON]
    found += [Variant("split", dim, "float16") for dim in HEAD_DIMS]
    # Kernels on tensor cores, and the other kinds. The card says which of them are for it.
    for dim, mask in ((64, "none"), (128, "none"), (80, "none"), (64, "bool"), (128, "bool")):
        found += [v for kind in KINDS if (v := Variant(kind, dim, "float16", mask)) in _known()]
    rare = ("int8", "packed", "capped", "even")
    return sorted(dict.fromkeys(found), key=lambda variant: any(word in variant.kind for word in rare))


def timed_call(variant: Variant, device: torch.device, tokens: int, heads: int) -> AttentionCall:
    """A call of random numbers that the variant takes: ``[1, heads, tokens, D]``, or for few query rows one query with
    ``heads`` batch elements and grouped heads."""
    dim = variant.head_dim - (4 if variant.padded else 0)
    dtype = getattr(torch, variant.dtype)
    softcap = _SOFTCAP if "capped" in variant.kind else None
    generator = torch.Generator(device).manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if variant.is_small:
        q_heads, kv_heads = _DECODE
        key, value = numbers(heads, kv_heads, tokens, dim), numbers(heads, kv_heads, tokens, dim)
        mask = numbers(1, tokens) > 0 if variant.mask == "bool" else None
        return check_call(numbers(heads, q_heads, 1, dim), key, value, mask, enable_gqa=True, softcap=softcap)
    mask = numbers(tokens, tokens) if variant.mask != "none" else None
    mask = mask > 0 if variant.mask == "bool" and mask is not None else mask
    query, key, value = (numbers(1, heads, tokens, dim) for _ in range(3))
    return check_call(query, key, value, mask, softcap=softcap)


def num_heads(variant: Variant, device: torch.device, tokens: int, waves: int) -> int:
    """As many as fill the card some times over, within a share of its memory."""
    own, info = variant.geometry, runtime_of(device).info
    size = getattr(torch, variant.dtype).itemsize
    if variant.is_small:
        wanted, each = 1, 2 * _DECODE[1] * tokens * variant.head_dim * size
    else:
        rounds = min(waves, _EVEN_WAVES) if variant.is_even else waves
        wanted = math.ceil(rounds * info.num_sms * own.blocks * own.rows / tokens)
        tensors = 8 if variant.is_gradient else 4
        each = tensors * tokens * variant.head_dim * size
    free = available_bytes(device)
    return max(1, wanted if free is None else min(wanted, int(_SHARE_OF_MEMORY * free / each)))


class Work:
    """A call with what its kernels write to, and the results that the gradients need. Kernels for packed sequences take
    its tokens as two of them."""

    def __init__(self, variant: Variant, call: AttentionCall):
        self.call = call
        self.out = empty_output(call).fill_(float("nan"))
        self.grads = [torch.full_like(t, float("nan")) for t in (call.query, call.key, call.value)]
        shape = self.out.shape
        self.results = torch.zeros_like(self.out), self.out.new_zeros(shape[:-1], dtype=torch.float32)
        self.log_sum = torch.zeros_like(self.results[1]) if variant.mask == "float" else None
        self.grad_out = torch.ones_like(self.out)
        self.packed: plans.Packed | None = None
        if "packed" in variant.kind:
            q_ends, k_ends = ([0, tokens // 2, tokens] for tokens in (call.seq_len_q, call.seq_len_kv))
            self.packed = plans.Packed.of(q_ends, k_ends, call.query.device, lower_right=True)

    def launches(self, candidate: Candidate, num_sms: int, capability: tuple[int, int] | None = None) -> list[Launch]:
        """Launches of the candidate's kernels, and of delta, which the gradients' kernels read from."""
        if not candidate.is_gradient:
            splits = 0
            if candidate.is_small and candidate.on_tensor_cores:
                wide = replace(candidate.plain, kind=sibling(candidate.kind, is_small=False))
                shape = plans.Shape.of(self.call)
                splits = max(1, plans.tensor_splits(shape, wide.geometry, candidate.geometry, num_sms)[0])
            elif candidate.is_small:
                places = num_sms * plans.resident_blocks(candidate, capability)
                plain = plans.variant_of(self.call, "forward").geometry
                splits = max(1, plans.num_splits(self.call, plain, candidate.geometry, num_sms, places))
            pieces = None
            if candidate.is_even:
                own, units = candidate.geometry, self.call.batch_size * self.call.num_heads
                tiles = plans.key_tiles(plans.Shape.of(self.call), own)
                pieces = distribute(tiles, units, own.cols, num_sms * own.blocks)
                if pieces is None:
                    raise KernelUnavailable("its keys are not worth cutting for this call")
            plan = plans.Plan(candidate, splits, packed=self.packed, pieces=pieces)
            make = int8_launches if candidate.kind == "int8" else forward_launches
            return self._packed(make(self.call, plan, self.out))
        own = candidate.plain
        chosen = tuple(candidate if variant == own else variant for variant in verify.all_gradients(own))
        query, key, value = self.grads
        launches = backward_launches(
            self.call,
            plans.Plan(plans.variant_of(self.call, "forward"), 0, chosen, self.packed),
            self.grad_out,
            *self.results,
            self.log_sum,
            None,
            (query, key, value),
        )
        launches = [launch for launch in launches if launch.variant == candidate or launch.function in verify.DELTAS]
        return self._packed(launches)

    def _packed(self, launches: list[Launch]) -> list[Launch]:
        return launches if self.packed is None else packed_launches(launches, self.packed)


def error_of(candidate: Candidate, kernels: Kernels) -> float:
    """That of a first use (:func:`.verify.largest_error`), with more keys than float32 sums are flushed after."""
    keys = _CHECKED_KEYS + candidate.geometry.cols + 9
    return verify.largest_error(candidate, kernels.device, kernels.run, keys)


# ---- one job ---------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """tokens: of a timed call; waves: how often it fills the card; rounds: timed; most: candidates of a job."""

    tokens: int = 2048
    waves: int = _WAVES
    rounds: int = 5
    most: int = 64


class Job:
    """The sweep over one variant.

    Args:
        teller: is told of a candidate before it runs for the first time, and of the variant before all are timed.
        known: what was told before, also of candidates that have ended their process.
    """

    def __init__(
        self,
        variant: Variant,
        kernels: Kernels,
        compilations: Compilations,
        settings: Settings,
        teller: told.Teller,
        known: told.Told,
    ):
        self.variant, self.kernels, self.compilations, self.settings = variant, kernels, compilations, settings
        self.teller, self.known = teller, known
        self.device = kernels.device
        tokens = settings.tokens * (4 if variant.is_small else 1)
        heads = num_heads(variant, kernels.device, tokens, settings.waves)
        self.call = timed_call(variant, kernels.device, tokens, heads)
        self.work = Work(variant, self.call)
        self.lanes: dict[AnyGeometry, Lane] = {}
        self.attempts: dict[str, Callable[[], Any]] = {}

    def run(self, next_candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Measure. ``next_candidates``: of the job behind this one, compiled while this one is timed."""
        self.enter(first_candidates(self.variant, self.settings))
        self.time()
        best = self.best()
        if best is not None:
            more = [tiles for tiles in details(best, self.variant.head_dim) if tiles not in self.lanes]
            candidates = _fitting(self.variant, more)[: self.settings.most]
            self.compilations.ask(candidates)
            self.compilations.ask(next_candidates)
            self.enter(candidates)
            self.time()
        self.attempts.clear()  # which hold this object, and so its tensors
        return self.report()

    def enter(self, candidates: Sequence[Candidate]) -> None:
        """Load candidates and compare each with the definition."""
        self.compilations.ask(candidates)
        for candidate in candidates:
            lane = Lane(words(candidate.tiles), asdict(candidate.tiles))
            self.lanes[candidate.tiles] = lane
            if candidate.name in self.known.ended:
                lane.note = self.known.ended[candidate.name]["message"]
                continue
            compiled = self.compilations.get(candidate)
            if isinstance(compiled, str):
                lane.note = compiled
                continue
            functions, lane.shared_bytes = nvrtc.usage(compiled.log)
            lane.registers, lane.spilled = max(functions, default=(None, None))
            self.teller.begin(candidate.name, _LIMIT, is_extra=True)
            lane.note = self.load(candidate, compiled.cubin, lane)

    def load(self, candidate: Candidate, cubin: bytes, lane: Lane) -> str:
        """Make a candidate ready to be timed; "" or why it is not."""
        with giving(self.kernels, candidate, cubin):
            try:
                error = error_of(candidate, self.kernels)
                launches = self.work.launches(candidate, self.kernels.info.num_sms, self.kernels.info.capability)
            except (RuntimeError, MemoryError) as failure:
                if not isinstance(failure, KernelUnavailable) and not is_out_of_memory(failure):
                    raise
                return _line(failure)
        lane.error = error if math.isfinite(error) else None
        if not error <= verify.tolerance(candidate):
            return "wrong"
        self.kernels.run(launches)
        timed = [launch for launch in launches if launch.function not in verify.DELTAS]
        self.attempts[lane.name] = lambda: self.kernels.run(timed)
        return ""

    def time(self) -> None:
        """Rounds in which each of those that have not been timed is called, and the shipped one."""
        self.teller.begin(self.variant.name, _LIMIT_OF_JOB)
        own = self.lanes[self.variant.geometry]
        ready = [lane for lane in self.lanes.values() if lane.name in self.attempts]
        new = [lane for lane in ready if lane is not own and not lane.times]
        lanes = [own, *new] if own in ready else new
        calls = {lane.name: self._calls(lane) for lane in lanes}
        rounds: dict[str, list[float]] = {lane.name: [] for lane in lanes}
        for number in range(self.settings.rounds):
            shift = number % max(1, len(lanes))  # none always runs after the same one
            for lane in lanes[shift:] + lanes[:shift]:
                rounds[lane.name].append(self._seconds(lane.name, calls[lane.name]))
        for lane in lanes:
            times = rounds[lane.name]
            lane.times = lane.times + times
            lane.seconds = statistics.median(lane.times)
            if own.name in rounds:
                lane.over_shipped = statistics.median(a / b for a, b in zip(times, rounds[own.name], strict=True))

    def _seconds(self, name: str, calls: int = 1) -> float:
        return milliseconds(self.attempts[name], self.device, calls) / 1e3

    def _calls(self, lane: Lane) -> int:
        first = self._seconds(lane.name)
        return max(1, min(50, math.ceil(_SECONDS_OF_ROUND / max(first, 1e-6))))

    def best(self) -> AnyGeometry | None:
        """The fastest so far, by its ratio to the shipped one."""
        timed = {tiles: lane.over_shipped or lane.seconds for tiles, lane in self.lanes.items() if lane.seconds}
        return min(timed, key=lambda tiles: timed[tiles] or math.inf, default=None)

    def report(self) -> dict[str, Any]:
        """All of it as plain values."""
        own, best = self.lanes[self.variant.geometry], self.best()
        tried = sorted(self.lanes.values(), key=lambda lane: lane.over_shipped or math.inf)
        refused = Counter(lane.note for lane in tried if lane.registers is None)
        return {
            "job": self.variant.name,
            "call": _text(self.call),
            "settings": asdict(self.settings),
            "shipped": own.name,
            "shipped_seconds": own.seconds,
            "shipped_note": own.note,
            "best": None if best is None else self.lanes[best].name,
            "best_over_shipped": None if best is None else self.lanes[best].over_shipped,
            "candidates": [_row(lane) for lane in tried if lane.registers is not None],
            "refused": dict(refused),
        }


def first_candidates(variant: Variant, settings: Settings) -> list[Candidate]:
    """The shipped geometry and those of other shapes."""
    return _fitting(variant, shapes(variant))[: settings.most]


def _fitting(variant: Variant, geometries: Iterable[AnyGeometry]) -> list[Candidate]:
    return [each for tiles in geometries if fits(each := Candidate.of(variant, tiles))]


@contextlib.contextmanager
def giving(kernels: Kernels, candidate: Candidate, cubin: bytes) -> Iterator[None]:
    """While the block runs, this machine code is what ships for the candidate."""
    before = kernels.shipped
    kernels.shipped = lambda variant, capability: cubin if variant == candidate else before(variant, capability)
    try:
        yield
    finally:
        kernels.shipped = before


def _row(lane: Lane) -> dict[str, Any]:
    """Figures of a candidate that are known."""
    return {name: _short(value) for name, value in asdict(lane).items() if value not in (None, [], "")}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:240]


def _text(call: AttentionCall) -> str:
    query, key = ("x".join(map(str, t.shape)) for t in (call.query, call.key))
    return f"query {query}, key {key}, {str(call.query.dtype).removeprefix('torch.')}"


# ---- all of them -----------------------------------------------------------------------------------------------------


def sweep(device: torch.device, jobs: list[Variant], settings: Settings, folder: Path, processes: int) -> None:
    """Go through the jobs that nothing is told of in ``folder``, and tell the result of each."""
    kernels, known = runtime_of(device).part(Kernels), told.read(folder)
    teller = told.Teller(folder, "share-1")
    capability = kernels.info.capability or (0, 0)
    jobs = [variant for variant in jobs if variant.runs_on(capability)]
    teller.tell(collected=len(jobs))
    todo = [variant for variant in jobs if variant.name not in known.ended]
    compilations = Compilations(kernels, 10 * capability[0] + capability[1], processes)
    try:
        for variant, coming in itertools.zip_longest(todo, todo[1:]):
            began = time.monotonic()
            ahead = [] if coming is None else first_candidates(coming, settings)
            found = Job(variant, kernels, compilations, settings, teller, known).run(ahead)
            note = found["shipped_note"]
            outcome = {"outcome": "failed", "message": note} if note else {"outcome": "passed"}
            teller.tell(test=variant.name, **outcome, seconds=round(time.monotonic() - began, 3), result=found)
    finally:
        compilations.pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """2: it is not for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--told", type=Path, required=True, metavar="FOLDER", help="see tools/gpu/told.py")
    parser.add_argument("--share", help="1/1: one process times at a time")
    parser.add_argument("--jobs", default="*", help="patterns, comma-separated: forward-64-*,split-*")
    defaults = Settings()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that compile")
    options = parser.parse_args(arguments)
    patterns = options.jobs.split(",")
    jobs = [variant for variant in all_jobs() if any(fnmatch.fnmatch(variant.name, each) for each in patterns)]
    device = torch.device(options.device)
    settings = Settings(**{name: getattr(options, name) for name in asdict(defaults)})
    kernels = runtime_of(device).part(Kernels)
    if not isinstance(kernels._gpu, CudaRuntime):
        print("the sweep is for NVIDIA's cards: the geometries of AMD's are in another table")
        return 2
    if kernels.machine_reasons or kernels.gpu.compiler_version(kernels.arch) is None:
        print("; ".join(kernels.machine_reasons) or kernels.gpu.no_compiler(kernels.arch))
        return 2
    with quiet_torch(1), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        sweep(device, jobs, settings, options.told, options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
