"""One call on several devices: each computes some of the key/value heads, and the results meet on the first.

It is asked before the routes of :data:`.run.ROUTES` where a configuration names several devices, and leaves the
computation to them: the route that the whole call would take on the first device takes each part, on whichever device,
with the tiles of the whole, so that the result has the same bits. Where anything goes wrong on another device, the
whole call is computed on the first one, and the other is left alone for a while.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, TiledStats, check_call, distinct, empty_output
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig, RouteUnavailable
from ..contest.timing_table import Contest
from ..machine.device import MIB, device_info
from ..machine.out_of_memory import is_out_of_memory
from ..machine.runtime import Runtime, runtime_of
from .math import MathRoute
from .route import Choice, Request, Route
from .short import TorchAsIs

log = logging.getLogger("pascal_attn")
PAUSE_SECONDS = 30.0  # a device that has failed, or has calls of its own, is left alone for this long
WORTH = 0.95  # of the time on the first device: a call that would take longer stays there
_TOKENS, _HEADS = 1024, {"cpu": 4, "cuda": 64}  # of the call that is timed
_CONFIG = AttentionConfig()

Inputs = Sequence[Any]  # query, key, value and a mask or None
Compute = Callable[[Inputs], Tensor]


@dataclass(frozen=True, eq=False)
class Shared:
    """The division of a call. It holds no tensor.

    Attributes:
        route: the route that computes the parts; shared: what it must know for that; config: that of the parts.
        helpers: the other devices.
        heads: key/value heads of each device, the first device's before the helpers'.
        why: one sentence.
    """

    route: Route
    shared: Any
    config: AttentionConfig
    helpers: tuple[Helper, ...]
    heads: tuple[range, ...]
    why: str


on_one_device = functools.lru_cache(maxsize=64)(functools.partial(replace, devices=()))  # a config without the others


def on_several(request: Request, alone: Choice) -> Choice:
    """The call on all devices that its config names, or else as on the first alone, with the reason."""
    found = _shared(request, alone)
    if isinstance(found, str):
        return replace(alone, why=f"{alone.why}; on one device: {found}")
    return Choice(SeveralRoute(), found.why, found, torch_stores=alone.torch_stores)


class SeveralRoute(Route):
    name = "several"

    def forward(
        self, call: AttentionCall, config: AttentionConfig, plan: Shared, *, stats: TiledStats | None, **wanted: bool
    ) -> Results:
        stats, out = TiledStats() if stats is None else stats, empty_output(call)
        counted: list[TiledStats] = []

        def compute(own: AttentionCall) -> Tensor:
            counted.append(its_stats := TiledStats())
            how = _possible(plan.route.plan_part(Request(own, plan.config), plan.shared))
            return plan.route.forward(own, plan.config, how, **wanted, stats=its_stats).out

        if _is_shared(call, plan, out, compute, stats):
            for each in counted:
                stats.add(each)
            return Results(out)
        del out  # memory may be short
        how = _possible(plan.route.plan(Request(call, plan.config)))
        return plan.route.forward(call, plan.config, how, **wanted, stats=stats)


def _is_shared(
    call: AttentionCall, plan: Shared, out: Tensor, compute: Callable[[AttentionCall], Tensor], stats: TiledStats
) -> bool:
    """Compute the parts of a call on all devices, with the results in ``out``. False where that failed: the reason is
    in ``stats``, and the whole call is to be computed on the first device. ``compute``: the output of a part, on
    whichever device."""

    def part(heads: range) -> tuple[Inputs, Tensor, Compute]:
        """The tensors that some heads need, the place of their result, and the work between them."""
        given = (call.query, call.key, call.value, call.attn_mask)
        *inputs, place = (_of_heads(tensor, heads, call.num_kv_heads) for tensor in (*given, out))
        return inputs, place, lambda own: compute(_part(call, heads, own))

    home, errands = plan.helpers[0].home, dict[Helper, Future[None]]()
    parts = {helper: heads for helper, heads in zip(plan.helpers, plan.heads[1:]) if heads}
    why = next(filter(None, (helper.why_not() for helper in parts)), "")
    if not why:
        try:
            with ThreadPoolExecutor(len(parts), "pascal_attn other device") as pool:  # its end waits for them
                errands |= {helper: helper.start(pool, *part(heads)) for helper, heads in parts.items()}
                own, place, work = part(plan.heads[0])
                place.copy_(work(own))
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, RouteUnavailable) and not is_out_of_memory(error):
                raise
            why = f"{home} could not compute its part ({_first_line(error)}): the call was computed undivided"
        for helper, errand in errands.items():
            fault = errand.exception()
            why = helper.failed(fault) if isinstance(fault, Exception) else why
    counts = [call.num_kv_heads, *[0] * len(plan.helpers)] if why else map(len, plan.heads)
    stats.devices = dict(zip(names_of([home, *(helper.device for helper in plan.helpers)]), counts))
    stats.remarks |= {why: 1} if why else {}
    return not why


# ---- the other devices -----------------------------------------------------------------------------------------------


class Helper:
    """One other device. The parts that several threads give it are computed one after the other."""

    def __init__(self, home: torch.device, device: torch.device):
        self.home, self.device = home, device
        self._why, self._until = "", 0.0

    @functools.cached_property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Two streams: copies to and from the first device, and this device's own work. Empty on a CPU."""
        return () if self.device.type == "cpu" else (torch.cuda.Stream(self.home), torch.cuda.Stream(self.device))

    def why_not(self) -> str:
        """Why the device is left alone now, "" if it is not."""
        return self._why if time.monotonic() < self._until else ""

    def leave_alone(self, why: str) -> None:
        self._why, self._until = why, time.monotonic() + PAUSE_SECONDS

    def failed(self, error: Exception) -> str:
        """Leave the device alone after an error there, and say so once in the log; returns the sentence."""
        how = "ran out of memory" if is_out_of_memory(error) else f"failed ({_first_line(error)})"
        sentence = f"{self.device} {how}: the call was computed on {self.home}"
        if not self._why.startswith(f"{self.device} {how}"):
            log.warning("%s", sentence)
        self.leave_alone(f"{self.device} {how} a moment ago")
        return sentence

    def start(self, pool: ThreadPoolExecutor, inputs: Inputs, out: Tensor, compute: Compute) -> Future[None]:
        try:
            self.follow_caller()
            return pool.submit(self.run, inputs, out, compute, torch.is_inference_mode_enabled())
        except RuntimeError as error:  # the device has no stream for it, or the system no thread
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def follow_caller(self) -> None:
        """Let what comes next run after all that this thread has put into the first device's current stream so far."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.home))

    def run(self, inputs: Inputs, out: Tensor, compute: Compute, in_inference: bool = False) -> None:
        """Copy ``inputs`` to the device, compute, copy the result into ``out``, and wait until all is done, also where
        it fails: nothing reads or writes the caller's tensors any more."""
        with torch.inference_mode(in_inference), torch.no_grad(), ExitStack() as stack:
            for stream in self.streams:
                stack.callback(stream.synchronize)  # raises what has gone wrong on the device meanwhile
                stack.enter_context(torch.cuda.stream(stream))
            result = compute([None if t is None else _copied(t, self.device) for t in inputs])
            out.copy_(result, non_blocking=True)


class Helpers(dict[tuple[torch.device, int], Helper]):
    """The devices that share one device's calls, each with its place among the others, as one may be there several
    times; a part of that device's :class:`~pascal_attn_core.machine.runtime.Runtime`."""

    def __init__(self, runtime: Runtime):
        self.home = runtime.device

    def __missing__(self, key: tuple[torch.device, int]) -> Helper:
        return self.setdefault(key, Helper(self.home, key[0]))


def seen_on(device: torch.device, devices: Sequence[torch.device]) -> None:
    """A call runs whose tensors are on ``device``: if that is one of the others, it is left alone for a while."""
    if device != devices[0] and device in devices and device.type == devices[0].type and not _missing(devices[:1]):
        helper = runtime_of(devices[0]).part(Helpers)[device, list(devices).index(device) - 1]
        helper.leave_alone(f"{device} computes attention of its own, as in ComfyUI's work split over several cards")


# ---- whether, and how much -------------------------------------------------------------------------------------------


def device_named(name: str) -> torch.device:
    """``"cuda"`` is the first CUDA device, whichever is current."""
    device = torch.device(name)
    return torch.device(device.type, 0) if device.index is None and device.type != "cpu" else device


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """``["cuda:0", "cuda:1"]``, ``["cpu", "cpu #2"]``."""
    counts = [devices[: i + 1].count(device) for i, device in enumerate(devices)]
    return [str(device) if count == 1 else f"{device} #{count}" for device, count in zip(devices, counts)]


def _missing(devices: Sequence[torch.device]) -> list[torch.device]:
    """CUDA devices that this machine does not have."""
    return [device for device in devices if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()]


def _shared(request: Request, alone: Choice) -> Shared | str:
    """How a call is shared out, or why it is not."""
    call, config = request.call, on_one_device(request.config)
    devices = tuple(device_named(name) for name in request.config.devices)
    why = _why_alone(call, request, devices)
    if why:
        return why
    if isinstance(alone.by, (TorchAsIs, MathRoute)):
        return "its score matrix is small"
    shared = alone.by.for_parts(call, config, alone.plan)
    if isinstance(shared, list):
        return shared[0]
    helpers = tuple(runtime_of(devices[0]).part(Helpers)[other, i] for i, other in enumerate(devices[1:]))
    found = _counts(request, alone.by, helpers)
    if isinstance(found, str):
        return found
    counts, grounds = found
    places = ", ".join(f"{count} on {name}" for name, count in zip(names_of(devices), counts) if count)
    words = f"of {call.num_kv_heads} key/value heads {places} ({grounds}); each part by {alone.route}: {alone.why}"
    heads = tuple(range(end - count, end) for end, count in zip(itertools.accumulate(counts), counts))
    return Shared(alone.by, shared, config, helpers, heads, words)


def _why_alone(call: AttentionCall, request: Request, devices: tuple[torch.device, ...]) -> str:
    """Why a call is not shared out, as far as its arguments tell; "" if nothing speaks against it."""
    device, least = call.query.device, request.config.share_from_tokens
    if device != devices[0]:
        seen_on(device, devices)
        return f"its tensors are on {device}, and only calls on {devices[0]} are shared"
    if min(call.seq_len_q, call.seq_len_kv) < least:
        return f"it has fewer than {least} queries or keys"
    kinds = {other.type for other in devices}
    checks = (
        (call.is_empty, "it is empty"),
        (call.num_kv_heads < 2, "it has one key/value head"),
        (bool(call.dropout_p), "it has dropout"),
        (isinstance(call.attn_mask, LazyMask), "its mask is a rule, not a tensor"),
        (call.sinks is not None, "it has attention sinks"),
        (call.score_rule is not None, "it has a score_mod"),
        (call.needs_grad or call.order > 1, "it needs gradients"),
        (request.with_lse, "its log-sum-exp is wanted"),
        (torch._C._are_functorch_transforms_active(), "transforms of torch.func are active"),
        (torch._C._get_tracing_state() is not None, "it is being traced"),
        (kinds not in ({"cpu"}, {"cuda"}), "devices of these kinds cannot share a call"),
        (device.type == "cuda" and torch.cuda.is_current_stream_capturing(), "a CUDA graph is being captured"),
        *((True, f"there is no device {missing}") for missing in _missing(devices)),
    )
    return next((why for holds, why in checks if holds), "")


def _counts(request: Request, route: Route, helpers: Sequence[Helper]) -> tuple[tuple[int, ...], str] | str:
    """(number of key/value heads of each device, on what grounds), or why one device is as good."""
    call, home = request.call, helpers[0].home
    able = [helper for helper in helpers if not helper.why_not()]
    if not able:
        return helpers[0].why_not()
    speeds = request.runtime.part(Speeds)
    known = tuple(speeds.of(call, route, helper, may_time=request.may_time) for helper in able)
    if None in known:
        return "the devices were not timed, and cannot be now"
    copied = [distinct(t).numel() for t in (call.query, call.key, call.value, call.attn_mask) if isinstance(t, Tensor)]
    crossing = (sum(copied) + math.prod(call.out_shape)) * call.query.element_size() / MIB
    scores = call.num_scores / MIB / (2 if call.is_causal else 1)
    heads = call.num_kv_heads
    counts, ratio = divided(heads, scores / heads, crossing / heads, known)
    if ratio > WORTH and speeds.is_on:
        return f"timed or estimated at {ratio:.2f} of the time of {home} alone"
    given = iter(counts[1:])
    counts = (counts[0], *(next(given) if helper in able else 0 for helper in helpers))
    return counts, f"timed: {ratio:.2f} of the time of {home} alone" if speeds.is_on else "nothing was timed"


@functools.lru_cache(maxsize=4096)
def divided(heads: int, scores: float, mib: float, speeds: tuple[Speed, ...]) -> tuple[tuple[int, ...], float]:
    """(heads of each device, the first one's first, such that the last is done as early as can be; that time in units
    of the first device's for all heads). The first device keeps one head at least.

    Args:
        scores: of one head, in units of 2^20; mib: that cross for it, there and back.
    """
    paces = [scores * speeds[0].home, *(scores * speed.away + mib * speed.copies for speed in speeds)]
    counts = [1] + [0] * len(speeds)
    for _ in range(heads - 1):
        ends = [(count + 1) * pace for count, pace in zip(counts, paces)]
        counts[ends.index(min(ends))] += 1
    last = max(count * pace for count, pace in zip(counts, paces))
    return tuple(counts), last / (heads * paces[0]) if paces[0] else 1.0


class Speed(NamedTuple):
    """Milliseconds of the first device and of another one for 2^20 scores, and of a MiB that crosses between them."""

    home: float
    away: float
    copies: float


class SpeedKind(NamedTuple):
    """Calls for which the devices are taken to be equally fast: ``"cuda:1 Tesla P40"``, the route of the parts, the
    dtype, head_dim."""

    device: str
    route: str
    dtype: str
    head_dim: int


class Speeds(Contest[SpeedKind]):
    """How fast the other devices of one device are; made by ``runtime.part(Speeds)``."""

    kind_type, file_kind = SpeedKind, "shares"

    def of(self, call: AttentionCall, route: Route, helper: Helper, *, may_time: bool) -> Speed | None:
        """The speed for a call, None where it was not timed and cannot be now. Where timing is off, all devices count
        as equally fast."""
        if not self.is_on:
            return Speed(1.0, 1.0, 0.0)
        name, dtype = device_info(helper.device).name, str(call.query.dtype).removeprefix("torch.")
        kind = SpeedKind(f"{helper.device} {name}", route.name, dtype, call.head_dim)
        times = self.find(kind, lambda: self._timed(kind, call, route, helper)) if may_time else self.known.get(kind)
        if times is None:
            return None
        scores = _HEADS[self.device.type] * _TOKENS**2 / MIB
        crossing = 4 * scores / _TOKENS * call.head_dim * call.query.element_size()
        home, away, copies = times["home"], times["away"], times["copies"]
        return Speed(home / scores, max(0.0, away - copies) / scores, copies / crossing)

    def _timed(self, kind: SpeedKind, call: AttentionCall, route: Route, helper: Helper) -> dict[str, float] | None:
        shape = (1, _HEADS[self.device.type], _TOKENS, call.head_dim)

        def compute(tensors: Inputs) -> Tensor:
            own = check_call(*tensors)
            plan = _possible(route.plan(Request(own, _CONFIG)))
            return route.forward(own, _CONFIG, plan, with_lse=False, for_grad=False, stats=None).out

        def there_and_back(work: Compute) -> None:
            helper.follow_caller()
            helper.run(inputs, out, work)

        try:
            with torch.no_grad():
                inputs = [torch.randn(shape, device=self.device).to(call.query.dtype) for _ in range(3)]
                out = torch.empty_like(inputs[0])
                attempts = {"home": lambda: compute(inputs), "away": lambda: there_and_back(compute)}
                return self.timed(kind, {**attempts, "copies": lambda: there_and_back(lambda own: own[0])})
        except Exception as error:
            raise RouteUnavailable(helper.failed(error)) from error  # asked again after a while

    def conditions(self) -> dict[str, str]:
        return {"card": self.info.name, "device": str(self.device), "torch": torch.__version__}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _part(call: AttentionCall, heads: range, inputs: Inputs) -> AttentionCall:
    """Some key/value heads of a call as a call of its own."""
    query, key, value, mask = inputs
    sizes = {"num_heads": len(heads) * call.groups, "num_kv_heads": len(heads)}
    return replace(call, query=query, key=key, value=value, attn_mask=mask, **sizes)  # type: ignore[arg-type]


def _of_heads(tensor: Any, heads: range, num_kv_heads: int) -> Any:
    """A view of what belongs to some key/value heads in a tensor ``[*batch, H, ...]`` with key/value heads or query
    heads; the tensor itself where it has no such dimension, or one for all heads."""
    if tensor is None or tensor.dim() < 3 or tensor.shape[-3] == 1:
        return tensor
    groups = tensor.shape[-3] // num_kv_heads
    return tensor.narrow(-3, heads.start * groups, len(heads) * groups)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device with the same order of dimensions; what repeats along one (stride 0) does so there too."""
    once = distinct(tensor)
    return torch.empty_like(once, device=device).copy_(once, non_blocking=True).expand(tensor.shape)


def _possible(plan: Any) -> Any:
    """A route's plan; RouteUnavailable where it is a list of reasons."""
    if isinstance(plan, list):
        raise RouteUnavailable(*plan)
    return plan


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
