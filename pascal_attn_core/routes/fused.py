"""The routes ``fused`` and ``fused-int8``: reasons, forward, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, Wanted, empty_output
from ..call.flex_rules import BlockRule
from ..config import AttentionConfig, RouteUnavailable
from ..fused.code.source import Variant
from ..fused.geometry.amd import has_dots
from ..fused.launch import int8_definition
from ..fused.launch.backward import backward_launches, sums_bytes
from ..fused.launch.fields import rows_are_readable, steps
from ..fused.launch.forward import forward_launches
from ..fused.launch.int8 import int8_launches
from ..fused.launch.packed import packed_launches
from ..fused.launch.plan import FEW_QUERIES, Packed, Plan, plan_call, variant_of
from ..fused.launch.repeat import Loaded, Repeat, Repeats
from ..fused.launch.select import call_reasons
from ..fused.trust.kernels import Kernels, kernels_of
from ..fused.trust.trial import Trials
from ..machine.runtime import runtime_of
from .bands import bands, rows_at_once, sample
from .route import Choice, Request, Route
from .tiled import TiledRoute
from .timing import Timings
from .torch_kernel import TorchForm, TorchRoute, is_torchs_alone

_DP4A = (6, 1)
UNTIMED = "untimed, by its times on an H200"


class FusedRoute(Route):
    """Our kernel, on cards of NVIDIA's and AMD's; timed against that of ``torch_route`` where both take a call."""

    name = "fused"

    def __init__(self, torch_route: TorchRoute):
        self.torch_route = torch_route

    def plan(self, request: Request) -> Plan | list[str]:
        call, mask = request.call, request.call.attn_mask
        if not isinstance(mask, BlockRule) or call.is_empty:
            return self.plan_at_once(request)
        rows = rows_at_once(call, mask, request.budget_bytes)
        if isinstance(rows, list):
            return rows
        plan = self.plan_at_once(Request(sample(call, mask, rows), request.config, request.with_lse))
        return plan if isinstance(plan, list) else plan._replace(band_rows=rows)

    def plan_at_once(self, request: Request) -> Plan | list[str]:
        """:meth:`plan` for a mask that is a tensor."""
        return find_plan(request.call, request.config, budget_bytes=request.budget_bytes)

    def claim(self, request: Request) -> Choice | None:
        call = request.call
        if not takes_device(call.query.device):
            return None
        form = request.plan(self.torch_route)
        as_it_came = isinstance(form, TorchForm) and form.is_as_it_came
        if not may_win(call, as_it_came=as_it_came) or (as_it_came and is_torchs_alone(call)):
            return None
        plan = request.plan(self)
        if isinstance(plan, list):
            return None
        untried = why_untried(call, plan)
        if untried:
            request.remarks.append(f"the fused kernel is left off: {untried}")
            return None
        if not isinstance(form, TorchForm):
            return self.instead_of_plain(request, plan, form[0])
        ratio = request.runtime.part(Timings).fused_over_torch(self, call, request.budget_bytes)
        stores = form.torch_stores
        if ratio is None and not form.is_one_call:
            why = f"torch has no fused kernel that takes it as it is ({form.words()})"
            return Choice(self, why, plan, torch_stores=stores)
        if ratio is None and _wins_untimed(call):
            return Choice(self, UNTIMED, plan, torch_stores=stores)
        if ratio is not None and ratio < 1:
            why = f"timed on this card at {ratio:.2f} of the time of {form.kernel}"
            return Choice(self, why, plan, over_torch=form.over_torch(ratio), torch_stores=stores)
        if ratio is not None:
            request.remarks.append(f"ours was timed on this card at {ratio:.2f} of its time")
        return None

    def claims_gradients(self, request: Request) -> bool:
        call, plan = request.call, request.plan(self)
        return may_win(call, as_it_came=False) and isinstance(plan, Plan) and not why_untried(call, plan)

    def instead_of_plain(self, request: Request, plan: Plan, why: str) -> Choice | None:
        """Return the choice for a call that torch has no fused kernel for (on AMD cards up to RX 6000: any). On AMD
        cards None if our kernel is not faster than torch's math attention for the kind; tiles take the call then."""
        is_timed = request.runtime.info.kind == "hip" and not plan.band_rows
        ratio = request.runtime.part(Timings).fused_over_plain(self, request.call) if is_timed else None
        timed = "" if ratio is None else f"timed on this card at {ratio:.2f} of the time of torch's math attention"
        if ratio is None or ratio < 1:
            return Choice(self, "; ".join(filter(None, [why, timed])), plan, torch_stores=True)
        request.remarks.append(f"ours was {timed}")
        return None

    def for_parts(self, call: AttentionCall, config: AttentionConfig, plan: Plan) -> Plan | list[str]:
        """Plan the parts without listed blocks, since their cuts depend on the number of heads. The bits of the parts
        are then those of the whole call."""
        return ["the fused kernel cuts its keys to fill the device"] if plan.splits else plan.unlisted

    def plan_part(self, request: Request, shared: Plan) -> Plan | list[str]:
        plan = request.plan(self)
        if isinstance(plan, list):
            return plan
        untried = why_untried(request.call, shared)
        return [f"the fused kernel is left off: {untried}"] if untried else shared

    def forward(
        self, call: AttentionCall, config: AttentionConfig, plan: Plan, *, with_lse: bool, for_grad: bool, **_: Any
    ) -> Results:
        """log_sum is for the gradients of calls with a float mask, next to whose largest numbers it would be lost in
        lse."""
        if plan.band_rows:
            return self._forward_in_bands(call, config, plan, with_lse=with_lse or for_grad)
        kernels, packed = kernels_of(call), plan.packed
        inputs: tuple[Any, ...] = (call.query, call.key, call.value, call.attn_mask)
        with_lse |= for_grad
        found: Any = plan.repeats and plan.repeats.again((with_lse, for_grad), inputs, key_fields(call))
        if found:
            return Results(*found)
        out = empty_output(call)
        lse = out.new_empty(out.shape[:-1], dtype=torch.float32) if with_lse else None
        log_sum = None if lse is None or not (for_grad and call.has_bias) else torch.empty_like(lse)
        results = Results(out, lse, log_sum)
        kernels.ensure((plan.forward, *plan.gradients))
        plan = _with_last_rows_that_run(plan, kernels)
        launches = forward_launches(call, plan, out, lse, log_sum)
        if packed is not None:
            launches = packed_launches(launches, packed)
            out[..., packed.end_q :, :] = 0
            if lse is not None:
                lse[..., packed.end_q :] = -torch.inf
        loaded = kernels.run(launches)
        if plan.repeats is not None and call.sinks is None:
            plan.repeats[with_lse, for_grad] = Repeat.of(kernels.queue, loaded, inputs, results[:3])
        return results

    def backward(
        self, call: AttentionCall, config: AttentionConfig, plan: Plan, saved: Results, wanted: Wanted
    ) -> Gradients:
        """Extra memory: three float32 numbers per query row, the gradients of inputs that broadcast in full, of each
        range where the plan has several, and a copy of grad_out if its rows cannot be read as they lie. If one kernel
        computes all gradients, a fourth number per query row, and the float32 sums of a gradient of query in 16 bits,
        come to that. If a kernel cannot be launched any more, the route ``tiled`` goes back from the same results,
        unless the call holds several sequences."""
        if plan.band_rows:
            return self._backward_in_bands(call, config, plan, saved, wanted)
        try:
            return self._launch_backward(call, plan, saved, wanted)
        except RouteUnavailable:
            if plan.packed is not None:
                raise
        return TiledRoute(self.torch_route).backward(call, config, None, saved, wanted)

    def again(self, plan: Plan, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        if not plan.repeats:
            return None
        if len(tensors) == 4:
            return plan.repeats.again((True, True), tensors)
        grad_out: Any = tensors[7]
        if grad_out.is_neg() or grad_out.data_ptr() % 16:
            return None
        return plan.repeats.again(Repeats.strides(tensors), tensors)

    def _forward_in_bands(self, call: AttentionCall, config: AttentionConfig, plan: Plan, *, with_lse: bool) -> Results:
        """A band whose kernel cannot run is computed in tiles."""
        assert isinstance(call.attn_mask, BlockRule)
        out = empty_output(call).zero_()
        lse = out.new_full(out.shape[:-1], -torch.inf, dtype=torch.float32) if with_lse else None
        for part, rows, _ in bands(call, call.attn_mask, plan.band_rows):
            own = self.plan_at_once(Request(part, config, with_lse))
            try:
                if isinstance(own, list):
                    raise RouteUnavailable(own[0])
                found = self.forward(part, config, own, with_lse=with_lse, for_grad=part.needs_grad)
            except RouteUnavailable:
                found = TiledRoute(self.torch_route).forward(part, config, with_lse=with_lse)
            out[..., rows, :] = found.out
            if lse is not None and found.lse is not None:
                lse[..., rows] = found.lse
        return Results(out, lse)

    def _backward_in_bands(
        self, call: AttentionCall, config: AttentionConfig, plan: Plan, saved: Results, wanted: Wanted
    ) -> Gradients:
        """Gradients by bands of rows; the sums of the bands' gradients of key and value are kept in float32."""
        assert isinstance(call.attn_mask, BlockRule)
        assert saved.lse is not None
        grad_out, tiles = wanted.grad_out.expand(saved.out.shape), TiledRoute(self.torch_route)
        of_query = torch.zeros_like(call.query)
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in (call.key, call.value)]
        for part, rows, keys in bands(call, call.attn_mask, plan.band_rows):
            of_lse = None if wanted.grad_lse is None else wanted.grad_lse[..., rows]
            given = Results(saved.out[..., rows, :], saved.lse[..., rows]), Wanted(grad_out[..., rows, :], of_lse)
            own = self.plan_at_once(Request(part, config, with_lse=True))
            if isinstance(own, list):
                found = tiles.backward(part, config, None, *given)
            else:
                found = self.backward(part, config, own, *given)
            of_query[..., rows, :] = found.query
            for total, more in zip(sums, (found.key, found.value)):
                total[..., keys, :] += more
        return Gradients(of_query, *(total.to(call.key.dtype) for total in sums))

    def _launch_backward(self, call: AttentionCall, plan: Plan, saved: Results, wanted: Wanted) -> Gradients:
        grad_out, grad_lse, out, lse, log_sum = *wanted[:2], *saved[:3]
        grad_out = _readable(grad_out.expand(out.shape) if grad_out.shape != out.shape else grad_out, plan.gradients[0])
        if len(call.batch) > 1:
            grad_out, out = grad_out.contiguous(), out.contiguous()
        assert lse is not None
        lse = lse.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.float().expand(lse.shape).contiguous()
        inputs = call.query, call.key, call.value
        given: tuple[Any, ...] = (*inputs, call.attn_mask, out, lse, log_sum, grad_out, grad_lse)
        asked = Repeats.strides(given)
        grads: Any = plan.repeats and plan.repeats.again(asked, given)
        if not grads:
            grads, loaded = _first_backward(call, plan, given)
            if plan.repeats is not None:
                plan.repeats[asked] = Repeat.of(kernels_of(call).queue, loaded, given, grads)
        return Gradients(*_summed(grads, inputs))


class Int8Route(Route):
    """Attention in 8-bit integers, not exact: only where it is asked for by name. On a CPU by the operators that define
    it, which is slow and for checks."""

    name = "fused-int8"
    is_opt_in = True

    def plan(self, request: Request) -> Plan | list[str]:
        if request.call.query.device.type == "cpu" and not takes_device(request.call.query.device):
            return call_reasons(request.call, int8=True) or Plan(variant_of(request.call, "int8"))
        return find_plan(request.call, request.config, int8=True)

    def claim(self, request: Request) -> None:
        return None

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: Plan, *, with_lse: bool, **_: Any) -> Results:
        out = empty_output(call)
        lse = out.new_empty(out.shape[:-1], dtype=torch.float32) if with_lse else None
        if takes_device(call.query.device):
            kernels = kernels_of(call)
            kernels.ensure((plan.forward,))
            kernels.run(int8_launches(call, plan, out, lse))
        else:
            int8_definition.compute(call, out, lse)
        return Results(out, lse)


def find_plan(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    int8: bool = False,
    packed: Packed | None = None,
    budget_bytes: int | None = None,
) -> Plan | list[str]:
    """How the kernels take a call, or the reasons why they cannot. For its gradients too where it needs them, while
    another route could still take the call.

    Args:
        packed: the call's tokens are those of these sequences.
        budget_bytes: that the parts of a call's last rows may take; None = any.
    """
    device = call.query.device
    info = runtime_of(device).info
    if not takes_device(device):
        return [f"the fused kernel needs a CUDA or ROCm device, got {device.type}"]
    if not config.fused:
        return ["switched off by the configuration (fused)"]
    kernels = kernels_of(call)
    reasons = call_reasons(call, int8=int8) or list(kernels.machine_reasons)
    if int8 and not reasons and info.kind == "hip" and not has_dots(kernels.variant_arch):
        reasons.append(f"the int8 mode needs dot products of 8-bit integers, which {kernels.arch} has not")
    if reasons:
        return reasons
    asked: dict[str, Any] = {"int8": int8, "for_grad": call.needs_grad, "packed": packed, "arch": kernels.variant_arch}
    plan = plan_call(call, info.num_sms, info.capability, **asked)
    if plan.tail is not None:
        exceeds = budget_bytes is not None and plan.tail.part_bytes(call) > budget_bytes
        if exceeds or kernels.reasons((plan.tail.variant,)):
            plan = plan._replace(tail=None)
    most = Request(call, config).budget_bytes if budget_bytes is None else budget_bytes
    if plan.is_all_at_once and (sums_bytes(call) > most or kernels.reasons(plan.gradients)):
        plan = plan_call(call, info.num_sms, info.capability, **asked, all_at_once=False)
    reasons = kernels.reasons(plan.variants)
    if int8 and not reasons and info.capability is not None and info.capability < _DP4A:
        reasons = [f"the int8 mode needs compute capability 6.1, got {info.capability[0]}.{info.capability[1]}"]
    return reasons or plan


def _summed(grads: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Gradients in the shapes of the inputs, from those in full even where inputs broadcast, and in ranges."""
    return [g if g.shape == t.shape else g.sum_to_size(t.shape) for g, t in zip(grads, inputs)]


def _readable(grad_out: Tensor, variant: Variant) -> Tensor:
    """The gradient of the output as a kernel reads it, a copy where it cannot as it lies."""
    if grad_out.is_contiguous():
        return grad_out.clone() if grad_out.data_ptr() % 16 else grad_out
    elements = 8 if variant.on_tensor_cores and not variant.padded else 4
    is_so = not grad_out.data_ptr() % 16 and rows_are_readable(grad_out, elements)
    return grad_out if is_so else grad_out.contiguous()


def _first_backward(
    call: AttentionCall, plan: Plan, given: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Sequence[Loaded]]:
    """The gradients of query, key and value, in full even where inputs broadcast and in the ranges of the plan, and the
    launches that were queued."""
    out, lse, log_sum, grad_out, grad_lse = given[4:]
    kernels, packed = kernels_of(call), plan.packed
    kv_lead = call.batch if call.query.dim() == 2 else (*call.batch, call.num_kv_heads)
    of_query, of_key = ((ranges,) if ranges > 1 else () for ranges in plan.ranges)
    grads = (
        call.query.new_empty((*of_query, *call.out_shape[:-1], call.head_dim)),
        call.key.new_empty((*of_key, *kv_lead, call.seq_len_kv, call.head_dim)),
        call.value.new_empty((*of_key, *kv_lead, call.seq_len_kv, call.head_dim_v)),
    )
    kernels.ensure(plan.gradients)  # the forward pass may have been another route's
    launches = backward_launches(call, plan, grad_out, out, lse, log_sum, grad_lse, grads)
    if packed is not None:
        launches = packed_launches(launches, packed)
        for grad, end in zip(grads, (packed.end_q, packed.end_k, packed.end_k)):
            grad[..., end:, :] = 0
    return grads, kernels.run(launches)


def why_untried(call: AttentionCall, plan: Plan) -> str:
    """Why the kernels of a plan should not run unasked on the device of a call: see :meth:`.trial.Trials.reason`."""
    return runtime_of(call.query.device).part(Trials).reason(plan.variants)


def try_early(device: torch.device, make_room: Callable[[int], object]) -> str:
    """Check the kernels on a device before the first call, where ``auto`` may take them: see
    :meth:`.trial.Trials.ask_early`."""
    runtime = runtime_of(device)
    if not takes_device(device) or runtime.part(Kernels).machine_reasons:
        return ""
    return runtime.part(Trials).ask_early(make_room)


def _with_last_rows_that_run(plan: Plan, kernels: Kernels) -> Plan:
    """The plan, without a kernel for the last rows that cannot be had here or gives wrong answers: that of the other
    rows computes them as well."""
    if plan.tail is None:
        return plan
    try:
        kernels.ensure((plan.tail.variant,))
    except RouteUnavailable:
        return plan._replace(tail=None)
    return plan


def key_fields(call: AttentionCall) -> dict[str, int]:
    """The parameters that differ among calls of one kind with few queries: how many keys there are."""
    if call.seq_len_q > FEW_QUERIES or call.attn_mask is not None or call.key.dim() != 4 or call.value.dim() != 4:
        return {}
    kb, kh, ks, _ = steps(call.key)
    vb, vh, vs, _ = steps(call.value)
    return {"lk": call.seq_len_kv, "kb": kb, "kh": kh, "ks": ks, "vb": vb, "vh": vh, "vs": vs}


def takes_device(device: torch.device) -> bool:
    return runtime_of(device).info.kind in ("cuda", "hip")


def may_win(call: AttentionCall, *, as_it_came: bool) -> bool:
    """Whether the kernel can be the fastest route on the call's device. It cannot where torch multiplies 16 bits on
    tensor cores; in all other cases the two are timed. ``as_it_came``: torch's kernel takes the call as it is."""
    info = runtime_of(call.query.device).info
    if info.kind == "hip":
        return True
    if info.capability is None:
        return False
    return info.capability < (7, 0) or call.query.dtype == torch.float32 or not as_it_came


def _wins_untimed(call: AttentionCall) -> bool:
    """Whether the kernel is taken to be faster than torch's where nothing may be timed, by times on an H200.

    From compute capability 8.0 on it took 0.60 to 0.88 of the time of torch's kernel with a mask or a short head_dim.
    In float32 it took 0.79 to 0.94 of the time of torch's kernel for older cards, built for the H200; gradients of
    head_dim 64 and causal calls were slower. Before 7.0 torch's kernel of gradients has one block for each head."""
    capability = runtime_of(call.query.device).info.capability
    if capability is None or call.has_band:
        return False
    if capability >= (8, 0):
        return not call.needs_grad and (call.attn_mask is not None or call.head_dim < 64)
    is_measured = call.query.dtype == torch.float32 and call.head_dim <= 128
    return is_measured and not (call.needs_grad and 64 <= call.head_dim < 128 and capability >= (7, 0))
