"""What a second device is worth, timed on the user's own machine: a small call of the same kind on each, and the copies
between them, once per kind and pair of devices.

Cards of one name differ in what they hold (a desktop, a hot case), and a link may be PCIe 3.0 x16 or a riser with one
lane: neither is known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, check_call
from ..config import AttentionConfig
from ..device import MIB, device_info
from ..several.errand import Errand, Piece, bring, take_back
from ..several.helpers import Helper, is_out_of_memory
from ..several.lanes import Lane
from ..several.pace import Load, Pace
from .route import Request, Route
from .timing_table import Attempt, TimingTable, log, power_of_two

_TOKENS = 1024
_ROWS, _ROWS_ON_A_CPU = 1 << 16, 1 << 12
_CONFIG = AttentionConfig()


class ShareKind(NamedTuple):
    """Calls that are taken to be alike. Counts are powers of two, at most those of the timed call.

    Attributes:
        device: the other one, ``"cuda:1 Tesla P40"``.
        route: that computes the parts.
        q_tokens, kv_tokens: of a sequence; groups: query heads per key/value head.
        mask: "" none, or its dtype, and "keys" for one row for all queries, "queries" for a row each.
        is_causal, gradients: whether the call is causal, and has gradients.
    """

    device: str
    route: str
    dtype: str
    head_dim: int
    head_dim_v: int
    q_tokens: int
    kv_tokens: int
    groups: int
    mask: str
    is_causal: bool
    gradients: bool

    @staticmethod
    def of(call: AttentionCall, route: str, device: torch.device) -> ShareKind:
        mask = call.attn_mask
        rows = "keys" if mask is not None and (mask.dim() < 2 or mask.shape[-2] == 1) else "queries"
        return ShareKind(
            f"{device} {device_info(device).name}",
            route,
            str(call.query.dtype).removeprefix("torch."),
            call.head_dim,
            call.head_dim_v,
            min(_TOKENS, power_of_two(call.seq_len_q)),
            min(_TOKENS, power_of_two(call.seq_len_kv)),
            call.groups,
            "" if mask is None else f"{str(mask.dtype).removeprefix('torch.')} {rows}",
            call.right is not None,
            call.needs_grad,
        )


@dataclass(frozen=True)
class ShareTiming:
    """Milliseconds of a timed call.

    Attributes:
        home_ms, away_ms: per 2^20 scores, as parts are computed.
        alone_ms: the same at home, as the call is computed without other devices.
        in_ms, back_ms: per MiB copied to the other device, and back.
        start_ms: of a part without any work.
    """

    home_ms: float
    away_ms: float
    alone_ms: float
    in_ms: float
    back_ms: float
    start_ms: float

    def paces(self, scores: int, load: Load) -> tuple[float, float, Pace]:
        """(milliseconds of a unit with so many scores alone at home, as a part at home, its pace away)."""
        per = scores / MIB
        copies = (size / MIB for size in (load.in_bytes, load.back_bytes, load.common_bytes))
        in_mib, back_mib, common_mib = copies
        pace = Pace(
            per * self.away_ms, in_mib * self.in_ms, back_mib * self.back_ms, common_mib * self.in_ms, self.start_ms
        )
        return per * self.alone_ms, per * self.home_ms, pace


class ShareTimings(TimingTable[ShareKind, ShareTiming]):
    """Made by ``runtime.part(ShareTimings)`` of the first device."""

    section, file_kind = "several_devices", "shares"

    def of(self, call: AttentionCall, route: Route, helper: Helper, *, may_time: bool) -> ShareTiming | None:
        """What is known of calls of this kind on this pair of devices; None where it was not timed, nor can be now."""
        kind = ShareKind.of(call, route.name, helper.device)
        if not may_time:
            return self.known.get(kind)
        return self.find(kind, lambda: self._timed(kind, call, route, helper))

    def _timed(self, kind: ShareKind, call: AttentionCall, route: Route, helper: Helper) -> ShareTiming | None:
        if helper.take():
            return None
        try:
            return self._clocked(kind, call, route, helper)
        except Exception as error:
            if is_out_of_memory(error):
                raise torch.cuda.OutOfMemoryError(str(error)) from error  # asked again after a while
            helper.failed(error)
            return None
        finally:
            helper.give_back()

    def _clocked(self, kind: ShareKind, call: AttentionCall, route: Route, helper: Helper) -> ShareTiming | None:
        lanes = helper.lanes()
        with lanes.open(), torch.no_grad():
            at_home, away = (_sample(call, kind, device) for device in (self.device, helper.device))
            plans = [route.plan(Request(sample, _CONFIG, with_lse=kind.gradients)) for sample in (at_home, away)]
            if any(isinstance(plan, list) for plan in plans):
                return None
            inputs = [at_home.query, at_home.key, at_home.value]
            result, target = torch.empty_like(away.query), torch.empty_like(at_home.query)
            lanes.settle()

            def run_away() -> None:
                lanes.follow_caller()
                with lanes.on(Lane.RUN):
                    _compute(away, route, plans[1])
                lanes.wait(lanes.mark(Lane.RUN))

            def copy_there() -> None:
                lanes.wait(bring(lanes, inputs).mark)

            def copy_back() -> None:
                lanes.wait(take_back(lanes, [result], [target]).mark)

            attempts: list[Attempt] = [lambda: _compute(at_home, route, plans[0]), run_away, copy_there, copy_back]
            attempts.append(lambda: _without_work(lanes, self.device))
            if kind.gradients and route.is_differentiable:
                attempts.append(lambda: _by_autograd(at_home, route))
            times = self.clock(attempts, self.device)
            lanes.drain()
            lanes.spent()
        per_scores, alone = MIB / at_home.num_scores, times[5] if len(times) > 5 else times[0]
        in_mib = sum(t.numel() * t.element_size() for t in inputs) / MIB
        back_mib = target.numel() * target.element_size() / MIB
        found = ShareTiming(
            times[0] * per_scores,
            times[1] * per_scores,
            alone * per_scores,
            times[2] / in_mib,
            times[3] / back_mib,
            times[4],
        )
        log.info("timed once on %s and %s: %s for %s", self.device, helper.device, found, kind)
        return found

    def conditions(self) -> dict[str, str]:
        info = self.info
        threads = str(torch.get_num_threads()) if self.device.type == "cpu" else ""
        return {"card": info.name, "device": str(self.device), "torch": torch.__version__, "threads": threads}

    def kind_of(self, fields: Mapping[str, Any]) -> ShareKind:
        return ShareKind(**fields)

    def row(self, found: ShareTiming) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in vars(found).items()}

    def found_in(self, row: Mapping[str, Any]) -> ShareTiming:
        return ShareTiming(**{name: float(row[name]) for name in ShareTiming.__dataclass_fields__})


def _sample(call: AttentionCall, kind: ShareKind, device: torch.device) -> AttentionCall:
    """A call of this kind on a device, of random numbers."""
    most = _ROWS_ON_A_CPU if device.type == "cpu" else _ROWS
    kv_heads = max(1, min(most // (kind.q_tokens * kind.groups), call.batch_size * call.num_kv_heads))
    generator = torch.Generator(device).manual_seed(0)

    def numbers(heads: int, tokens: int, head_dim: int) -> Tensor:
        shape = (1, heads, tokens, head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(call.query.dtype)

    mask = None
    if isinstance(call.attn_mask, Tensor):
        rows = kind.q_tokens if kind.mask.endswith("queries") else 1
        mask = torch.zeros((1, 1, rows, kind.kv_tokens), dtype=call.attn_mask.dtype, device=device)
        mask = ~mask if mask.dtype == torch.bool else mask
    sample = check_call(
        numbers(kv_heads * kind.groups, kind.q_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim),
        numbers(kv_heads, kind.kv_tokens, call.head_dim_v),
        mask,
        is_causal=kind.is_causal,
        scale=call.scale,
        enable_gqa=kind.groups > 1,
        softcap=call.softcap,
    )
    sample.needs_grad = kind.gradients
    return sample


def _compute(call: AttentionCall, route: Route, plan: Any) -> None:
    """As a part is computed, with its gradients where the call needs them."""
    results = route.forward(call, _CONFIG, plan, with_lse=call.needs_grad, for_grad=call.needs_grad, stats=None)
    if call.needs_grad:
        _backward(call, route, plan, results)


def _backward(call: AttentionCall, route: Route, plan: Any, results: Results) -> None:
    wants = {"grad_lse": None, "wants_mask": False, "wants_sinks": False}
    route.backward(call, _CONFIG, plan, results.out, results, **wants)  # type: ignore[arg-type]


def _by_autograd(call: AttentionCall, route: Route) -> None:
    """As it is computed without other devices, by a route that autograd goes back through."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
        own = call.with_tensors(leaves[0], leaves[1], leaves[2], call.attn_mask)
        plan = route.plan(Request(own, _CONFIG))
        if not isinstance(plan, list):
            out = route.forward(own, _CONFIG, plan, with_lse=False, for_grad=False, stats=None).out
            torch.autograd.grad(out, leaves, torch.ones_like(out))


def _without_work(lanes: Any, home: torch.device) -> None:
    source, target = torch.zeros(1, device=home), torch.zeros(1, device=home)

    def same(common: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
        return own

    errand = Errand(lanes, [], [Piece([source], [target], same)])
    errand.start()
    errand.join()
    if errand.error is not None:
        raise errand.error
