"""One call on several devices: each computes some of the key/value heads, and the results meet on the first.

It is asked before the routes of :data:`.run.ROUTES` where a configuration names several devices, and leaves the
computation to them: the route that the whole call would take on the first device takes each part, on whichever device,
with the tiles of the whole, so that the result has the same bits. Whatever goes wrong on another device, its part is
computed at home.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, DeviceShare, Gradients, Results, TiledStats, distinct, empty_output
from ..config import AttentionConfig, RouteUnavailable
from ..device import device_info
from ..lazy_mask import LazyMask
from ..observe.progress import this_thread
from ..runtime import runtime_of
from ..several.cut import HEADS, Part, Seam, seam_of
from ..several.errand import Errand, Piece
from ..several.helpers import Helper, Helpers, is_out_of_memory
from ..several.pace import PIECES, WORTH, Load, best_counts, cut_pieces, modelled, shared_ms
from .math import MathRoute
from .route import Choice, Request, Route
from .share_timing import ShareTimings
from .short import AsItIs
from .tiled import WholeTiles

ON_ONE_DEVICE = "; on one device: "  # between why a route was taken and why the call was not shared
MOST_PIECE_BYTES = 256 << 20  # of a piece's inputs: as much pinned memory is taken, a few times over
_process = os.getpid()  # one that was forked later has no CUDA, nor our threads


@dataclass(frozen=True, eq=False)
class Shared:
    """How a call is shared out. It holds no tensor.

    Attributes:
        route: that computes the parts; shared: what it must know for that.
        config: of the parts: that of the call, without other devices.
        counts: units of each of ``devices``.
        why: one sentence.
    """

    route: Route
    shared: Any
    config: AttentionConfig
    seam: Seam
    devices: tuple[torch.device, ...]
    counts: tuple[int, ...]
    piece_bytes: int
    why: str

    @property
    def names(self) -> list[str]:
        """Of the devices; one that is there twice has a number."""
        return names_of(self.devices)

    def parts(self) -> list[Part]:
        """One per device; home has the first units."""
        parts, first = [], 0
        for count in self.counts:
            parts.append(Part(self.seam, first, first + count))
            first += count
        return parts

    def pieces_of(self, part: Part) -> list[Part]:
        most = max(1, MOST_PIECE_BYTES // max(1, self.piece_bytes))
        pieces, first = [], part.first
        for count in cut_pieces(part.size, max(PIECES, -(-part.size // most))):
            pieces.append(Part(self.seam, first, first + count))
            first += count
        return pieces


class SeveralRoute(Route):
    """
    Args:
        choose: which route takes a call on one device, as :func:`.run.choose`.
    """

    name = "several"

    def __init__(self, choose: Callable[..., Choice]):
        self.choose = choose

    def claim(self, request: Request) -> Choice:
        """The call on several devices, or else on the first alone, with the reason."""
        alone = self._alone(request)
        found = self._shared(request, alone)
        if isinstance(found, str):
            return replace(alone, why=f"{alone.why}{ON_ONE_DEVICE}{found}")
        return Choice(self, found.why, found, torch_stores=alone.torch_stores)

    def plan(self, request: Request) -> Shared | list[str]:
        found = self._shared(request, self._alone(request))
        return [found] if isinstance(found, str) else found

    def _alone(self, request: Request) -> Choice:
        flags = {"with_lse": request.with_lse, "in_graph": request.in_graph, "may_time": request.may_time}
        return self.choose(request.call, _alone(request.config), **flags)

    def _shared(self, request: Request, alone: Choice) -> Shared | str:
        """How the call is shared out, or why it is not."""
        call, config = request.call, _alone(request.config)
        devices = tuple(device_named(name) for name in request.config.devices)
        why = _why_alone(call, request, devices)
        if why:
            return why
        if isinstance(alone.by, (AsItIs, MathRoute)):
            return "its score matrix is small"
        shared = alone.by.for_parts(call, config, alone.plan)
        if isinstance(shared, list):
            return shared[0]
        seam = seam_of(call, shared.forward.q_block if isinstance(shared, WholeTiles) else None)
        if seam.count < 2:
            return f"there is nothing to split: one key/value head, and at most {seam.step} queries"
        if call.needs_grad:
            probe = Part(seam, 0, 1)
            if seam.kind != HEADS or any(probe.inputs(call)[i] is given for i, given in enumerate(_inputs(call)[:3])):
                return "gradients of inputs that all parts share would have to be summed across devices"
            if alone.by.is_differentiable and call.query.is_cuda and call.query.device in devices[1:]:
                return "autograd runs one thread per device"
        found = _counts(call, alone.by, request, devices, seam)
        if isinstance(found, str):
            return found
        counts, why = found
        own = Part(seam, 0, counts[0]).of_call(call)
        how = alone.by.plan_part(Request(own, config, request.with_lse), shared)
        if isinstance(how, list):
            return how[0]
        places = ", ".join(f"{count} on {name}" for name, count in zip(names_of(devices), counts) if count)
        words = f"of {seam.words} {places} ({why}); each part by {alone.route}: {alone.why}"
        return Shared(alone.by, shared, config, seam, devices, counts, _load(call, seam).in_bytes, words)

    # ---- forward and backward ----------------------------------------------------------------------------------------

    def forward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Shared,
        *,
        with_lse: bool,
        for_grad: bool,
        stats: TiledStats | None,
    ) -> Results:
        """
        Raises:
            RouteUnavailable: the route of the parts cannot take the whole call on the first device either.
        """
        stats = TiledStats() if stats is None else stats
        route, lse, log_sum = plan.route, None, None
        has_rows = (with_lse or for_grad) and not route.is_differentiable

        def alone() -> Results:
            own = route.plan(Request(call, plan.config, has_rows))
            if isinstance(own, list):
                raise RouteUnavailable("; ".join(own))
            return route.forward(call, plan.config, own, with_lse=with_lse, for_grad=for_grad, stats=stats)

        def compute(part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
            own = part.of_call(call, _with_mask(call, tensors))
            how = _plan_part(route, Request(own, plan.config, has_rows), plan.shared)
            counted = TiledStats()
            results = route.forward(own, plan.config, how, with_lse=with_lse, for_grad=for_grad, stats=counted)
            _add(stats, counted)
            return [t for t in results[:3] if t is not None]

        def make_targets() -> list[Tensor]:
            nonlocal lse, log_sum
            out = empty_output(call)
            if has_rows:
                lse = out.new_empty(out.shape[:-1], dtype=call.sums_dtype)
                log_sum = torch.empty_like(lse) if for_grad and call.has_bias else None
            return [t for t in (out, lse, log_sum) if t is not None]

        def views(part: Part, targets: Sequence[Tensor]) -> list[Tensor]:
            return [part.per_query(call, t, -3 if i == 0 else -2) for i, t in enumerate(targets)]

        errand = _Work(call, plan, _inputs(call), lambda part: _given(part.inputs(call)), make_targets, views, compute)
        targets = errand.run(stats)
        return alone() if targets is None else Results(targets[0], lse, log_sum)

    def backward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Shared,
        grad_out: Tensor,
        saved: Results,
        *,
        grad_lse: Tensor | None,
        wants_mask: bool,
        wants_sinks: bool,
    ) -> Gradients:
        route = plan.route
        whole = Results(saved.out, saved.lse, saved.log_sum)
        grad_out = grad_out.expand(saved.out.shape)
        grad_lse = None if grad_lse is None else grad_lse.expand(saved.out.shape[:-1])
        rows = [grad_out, whole.out, *(t for t in (whole.lse, whole.log_sum, grad_lse) if t is not None)]
        num_inputs = len(_inputs(call))
        with_lse = whole.lse is not None

        def sources(part: Part) -> list[Tensor]:
            per_row = [part.per_query(call, t, -3 if i < 2 else -2) for i, t in enumerate(rows)]
            return [*_given(part.inputs(call)), *per_row]

        def go_back(own: AttentionCall, how: Any, tensors: Sequence[Tensor]) -> Gradients:
            left = iter(tensors)
            grad, out = next(left), next(left)
            lse, log_sum, of_lse = (
                None if t is None else next(left).contiguous() for t in (whole.lse, whole.log_sum, grad_lse)
            )
            kept = Results(out, lse, log_sum)
            return route.backward(
                own, plan.config, how, grad, kept, grad_lse=of_lse, wants_mask=False, wants_sinks=False
            )

        def compute(part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
            own = part.of_call(call, _with_mask(call, tensors[:num_inputs]))
            how = _plan_part(route, Request(own, plan.config, with_lse), plan.shared)
            return list(go_back(own, how, tensors[num_inputs:])[:3])

        def make_targets() -> list[Tensor]:
            return [torch.empty_like(t) for t in (call.query, call.key, call.value)]

        def views(part: Part, targets: Sequence[Tensor]) -> list[Tensor]:
            return [part.per_query(call, targets[0]), *(part.per_key(call, t) for t in targets[1:])]

        errand = _Work(call, plan, [*_inputs(call), *rows], sources, make_targets, views, compute)
        targets = errand.run(TiledStats())
        if targets is not None:
            return Gradients(*targets)
        how = route.plan_part(Request(call, plan.config, with_lse), plan.shared)
        return go_back(call, plan.shared if isinstance(how, list) else how, rows)  # a route may have a way out itself


@dataclass(eq=False)
class _Work:
    """One pass over a call, shared out.

    Attributes:
        given: the tensors of the whole; ``sources(part)``: the same for a part, in this order.
        make_targets: allocates the results of the whole; ``views(part, targets)``: a part's places in them.
        compute: from a part and its tensors, on whichever device, what goes into its views.
    """

    call: AttentionCall
    plan: Shared
    given: Sequence[Tensor]
    sources: Callable[[Part], list[Tensor]]
    make_targets: Callable[[], list[Tensor]]
    views: Callable[[Part, Sequence[Tensor]], list[Tensor]]
    compute: Callable[[Part, Sequence[Tensor]], list[Tensor]]

    def run(self, stats: TiledStats) -> list[Tensor] | None:
        """The results of the whole; None where no other device can work now, or memory at home does not suffice for
        this way of computing it."""
        home, *others = self.plan.parts()
        taken: list[tuple[int, Helper, Part]] = []
        left: list[Part] = []
        for number, (device, part) in enumerate(zip(self.plan.devices[1:], others)):
            if part.size:
                helper = runtime_of(self.plan.devices[0]).part(Helpers).of(device, number)
                why = helper.take()
                if why:
                    stats.remarks.append(why)
                    left.append(part)
                else:
                    taken.append((number + 1, helper, part))
        try:
            return self._run(home, taken, left, stats) if taken else None
        except RouteUnavailable as error:
            stats.remarks.append(f"{error}: computed undivided")
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            stats.remarks.append(f"{self.plan.devices[0]} has too little memory for the parts: computed undivided")
        finally:
            for _, helper, _ in taken:
                helper.give_back()
        return None

    def _run(
        self, home: Part, taken: Sequence[tuple[int, Helper, Part]], left: list[Part], stats: TiledStats
    ) -> list[Tensor]:
        targets = self.make_targets()
        errands: list[tuple[int, Helper, Errand, list[Part]]] = []
        try:
            for number, helper, part in taken:
                pieces = self.plan.pieces_of(part)
                try:
                    errand = self._errand(helper, pieces, targets)
                    errand.start()
                except Exception as error:  # no streams, no thread
                    stats.remarks.append(helper.failed(error))
                    left += pieces
                else:
                    errands.append((number, helper, errand, pieces))
            self._at_home(home, targets)
            checkpoint = this_thread.checkpoint
            for _, _, errand, _ in errands:
                errand.join(None if checkpoint is None else functools.partial(checkpoint, 1, 1))
        finally:
            for _, _, errand, _ in errands:
                errand.cancel()
        names, count = self.plan.names, self.plan.seam.count
        at_home = stats.devices.setdefault(names[0], DeviceShare())
        at_home.add(DeviceShare(count, count))
        for number, helper, errand, pieces in errands:
            share = self._share(helper, errand, pieces, stats)
            stats.devices.setdefault(names[number], DeviceShare()).add(share)
            at_home.units -= share.units
            left += pieces[errand.finished :]
        for part in left:
            self._at_home(part, targets)
        return targets

    def _errand(self, helper: Helper, pieces: Sequence[Part], targets: Sequence[Tensor]) -> Errand:
        """What is the same for all pieces crosses once."""
        first = self.sources(pieces[0])
        is_common = [part is whole for part, whole in zip(first, self.given)]

        def piece(part: Part) -> Piece:
            def compute(common: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
                shared, others = iter(common), iter(own)
                return self.compute(part, [next(shared if whole else others) for whole in is_common])

            own = [t for t, whole in zip(self.sources(part), is_common) if not whole]
            return Piece(own, self.views(part, targets), compute)

        common = [t for t, whole in zip(self.given, is_common) if whole]
        return Errand(helper.lanes(), [t.detach() for t in common], [piece(part) for part in pieces])

    def _at_home(self, part: Part, targets: Sequence[Tensor]) -> None:
        results = self.compute(part, self.sources(part))
        for view, result in zip(self.views(part, targets), results, strict=True):
            view.copy_(result)

    def _share(self, helper: Helper, errand: Errand, pieces: Sequence[Part], stats: TiledStats) -> DeviceShare:
        """What a device has done; what went wrong there is remembered."""
        error = errand.error
        if error is not None and not isinstance(error, Exception):
            raise error
        if isinstance(error, RouteUnavailable):
            sentence = f"{helper.device} cannot take its part: {error}"
            helper.lost = sentence
            helper.tell(sentence)
            stats.remarks.append(sentence)
        elif error is not None:
            stats.remarks.append(helper.failed(error))
        done = sum(part.size for part in pieces[: errand.finished])
        return DeviceShare(done, self.plan.seam.count, errand.copy_ms, errand.run_ms)


# ---- whether, and how much ------------------------------------------------------------------------------------------


def device_named(name: str) -> torch.device:
    """``"cuda"`` is the first CUDA device, whichever is current."""
    device = torch.device(name)
    return torch.device(device.type, 0) if device.index is None and device.type != "cpu" else device


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """``["cuda:0", "cuda:1"]``, ``["cpu", "cpu #2"]``."""
    counts: dict[torch.device, int] = {}
    names = []
    for device in devices:
        counts[device] = counts.get(device, 0) + 1
        names.append(str(device) if counts[device] == 1 else f"{device} #{counts[device]}")
    return names


@functools.lru_cache(maxsize=64)
def _alone(config: AttentionConfig) -> AttentionConfig:
    return replace(config, devices=())


def _missing(devices: Sequence[torch.device]) -> list[torch.device]:
    """CUDA devices that this machine does not have."""
    return [device for device in devices if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()]


def seen_on(device: torch.device, devices: Sequence[torch.device]) -> None:
    """A call runs whose tensors are on ``device``: if that is one of the others, it is busy for a while."""
    if device != devices[0] and device in devices and device.type == devices[0].type and not _missing(devices[:1]):
        runtime_of(devices[0]).part(Helpers).of(device, list(devices).index(device) - 1).is_busy()


def _why_alone(call: AttentionCall, request: Request, devices: tuple[torch.device, ...]) -> str:
    """Why a call is not shared out, as far as its arguments tell; "" if nothing speaks against it."""
    device, least = call.query.device, request.config.share_from_tokens
    if device != devices[0]:
        seen_on(device, devices)
        return f"its tensors are on {device}, and only calls on {devices[0]} are shared"
    if min(call.seq_len_q, call.seq_len_kv) < least:
        return f"it has fewer than {least} queries or keys"
    checks = (
        (call.is_empty, "it is empty"),
        (bool(call.dropout_p), "it has dropout"),
        (isinstance(call.attn_mask, LazyMask), "its mask is a rule, not a tensor"),
        (call.sinks is not None, "it has attention sinks"),
        (call.needs_mask_grad, "it needs the gradient of its mask"),
        (request.in_graph, "it is part of a compiled graph with gradients"),
        (torch._C._are_functorch_transforms_active(), "transforms of torch.func are active"),
        (torch._C._get_tracing_state() is not None, "it is being traced"),
        (os.getpid() != _process, "this process was forked"),
        (
            len({other.type for other in devices}) > 1 or device.type not in ("cpu", "cuda"),
            "devices of these kinds cannot share a call",
        ),
    )
    for holds, why in checks:
        if holds:
            return why
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        missing = _missing(devices)
        if missing:
            return f"there is no device {missing[0]}"
    helpers = runtime_of(devices[0]).part(Helpers)
    lost = [helpers.of(other, number).lost for number, other in enumerate(devices[1:])]
    return lost[0] if all(lost) else ""


def _load(call: AttentionCall, seam: Seam) -> Load:
    """What a unit is made of. A mask counts as cut where it is."""
    part, size = Part(seam, 0, 1), call.query.element_size()
    own, common = 0, 0
    for mine, whole in zip(_given(part.inputs(call)), _inputs(call)):
        num_bytes = distinct(mine).numel() * mine.element_size()
        own, common = (own, common + num_bytes) if mine is whole else (own + num_bytes, common)
    rows = call.batch_size * call.num_heads * call.seq_len_q // seam.count
    flops = 2.0 * call.num_scores / seam.count * (call.head_dim + call.head_dim_v)
    back = rows * call.head_dim_v * size
    if call.needs_grad:
        kv_rows = call.batch_size * call.num_kv_heads * call.seq_len_kv // seam.count
        own += own + 2 * back
        back += rows * call.head_dim * size + kv_rows * (call.head_dim + call.head_dim_v) * size
        flops *= 3.5
    return Load(flops, own, back, common)


def _counts(
    call: AttentionCall, route: Route, request: Request, devices: tuple[torch.device, ...], seam: Seam
) -> tuple[tuple[int, ...], str] | str:
    """(units of each device, on what grounds), or why one device is as good."""
    runtime, load = runtime_of(devices[0]), _load(call, seam)
    table, helpers = runtime.part(ShareTimings), runtime.part(Helpers)
    others = [helpers.of(device, number) for number, device in enumerate(devices[1:])]
    able = [helper for helper in others if not helper.lost]
    if not table.is_on:
        home_ms, paces = modelled(load, runtime.info, [device_info(helper.device) for helper in able])
        alone_ms, grounds = home_ms, "from the cards' specifications, nothing was timed"
    else:
        timed = [table.of(call, route, helper, may_time=request.may_time) for helper in able]
        known = [each.paces(call.num_scores // seam.count, load) for each in timed if each is not None]
        if len(known) < len(timed):
            return "the devices were not timed, and cannot be now"
        alone_ms, home_ms, paces = known[0][0], known[0][1], tuple(pace for _, _, pace in known)
        grounds = ""
    found = best_counts(seam.count, home_ms, paces)
    ratio = shared_ms(home_ms, paces, found) / max(1e-9, alone_ms * seam.count)
    if found[0] == seam.count or (table.is_on and ratio > WORTH):
        return f"timed or estimated at {ratio:.2f} of the time of {devices[0]} alone"
    given = iter(found[1:])
    counts = (found[0], *(0 if helper.lost else next(given) for helper in others))
    return counts, grounds or f"timed: {ratio:.2f} of the time of {devices[0]} alone"


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _inputs(call: AttentionCall) -> list[Tensor]:
    """Query, key, value, and the mask if there is one."""
    assert not isinstance(call.attn_mask, LazyMask)
    return _given([call.query, call.key, call.value, call.attn_mask])


def _with_mask(call: AttentionCall, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [*tensors, *[None] * (4 - len(tensors))]


def _plan_part(route: Route, request: Request, shared: Any) -> Any:
    plan = route.plan_part(request, shared)
    if isinstance(plan, list):
        raise RouteUnavailable("; ".join(plan))
    return plan


def _add(stats: TiledStats, counted: TiledStats) -> None:
    stats.blocks += counted.blocks
    stats.bounded_blocks += counted.bounded_blocks
    stats.budget_halvings += counted.budget_halvings
