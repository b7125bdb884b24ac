"""The route ``fused-tensor``: float16 on the tensor cores of Volta and Turing, float16 and bfloat16 on the matrix
units of AMD's gfx11 and gfx12."""

from __future__ import annotations

from typing import Any

import torch

from ..call import AttentionCall, Gradients, Results, Wanted
from ..config import AttentionConfig
from ..fused.geometry.gradient import generation_of
from ..fused.launch.fields import mask_bits_bytes, work_of
from ..fused.launch.forward import parts_bytes
from ..fused.launch.plan import Packed, Plan, tensor_plan
from ..fused.launch.select import tensor_reasons
from ..fused.trust.kernels import Kernels, kernels_of
from ..machine.device import MIB
from ..machine.runtime import runtime_of
from ..tiled.gradients import sinks_gradient
from .fused import UNTIMED, FusedRoute, takes_device, why_untried
from .route import Choice, Request
from .timing import Times, Timings
from .torch_kernel import TorchForm, TorchRoute, is_torchs_alone


class TensorRoute(FusedRoute):
    """Our kernel on tensor cores, its gradients up to head_dim 128, above, and on AMD's cards, by those on plain cores.
    It is timed against ``plain``, our route on plain cores, and torch's."""

    name = "fused-tensor"

    def __init__(self, torch_route: TorchRoute, plain: FusedRoute):
        super().__init__(torch_route)
        self.plain = plain

    def plan_at_once(self, request: Request) -> Plan | list[str]:
        return find_tensor_plan(request.call, request.config, request.budget_bytes)

    def claim(self, request: Request) -> Choice | None:
        """Claim only by a timing: a GTX 16xx reports compute capability 7.5, as a T4 does, but has no tensor cores."""
        call, form = request.call, request.plan(self.torch_route)
        if not may_win(call) or (isinstance(form, TorchForm) and form.is_as_it_came and is_torchs_alone(call)):
            return None
        plan = request.plan(self)
        if isinstance(plan, list):
            return None
        untried = why_untried(call, plan)
        if untried and plan.pieces is not None:
            plan = plan.unlisted
            untried = why_untried(call, plan)
        if untried:
            request.remarks.append(f"the kernel on tensor cores is left off: {untried}")
            return None
        times = self.times(request)
        if times is None and isinstance(form, TorchForm) and _wins_untimed(call):
            return Choice(self, UNTIMED, plan, torch_stores=form.torch_stores)
        if times is None:
            return None
        torch_takes_it, plain_takes_it = isinstance(form, TorchForm), isinstance(request.plan(self.plain), Plan)
        stores: bool | None = True
        words, over_torch = times.words(), None
        if isinstance(form, TorchForm):
            stores, words, over_torch = form.torch_stores, times.words(form.kernel), form.over_torch(times.over_torch)
        if times.are_longer(with_torch=torch_takes_it, with_plain=plain_takes_it):
            why = f"timed on this card at {words}"
            if not torch_takes_it and runtime_of(call.query.device).info.kind == "hip" and not plan.band_rows:
                return self.instead_of_plain(request, plan, why)
            return Choice(self, why, plan, over_torch=over_torch, torch_stores=stores)
        request.remarks.append(f"ours on tensor cores was timed on this card at {words}")
        return None

    def claims_gradients(self, request: Request) -> bool:
        """Where both passes together were timed as faster than those on plain cores."""
        call, plan = request.call, request.plan(self)
        if not may_win(call) or isinstance(plan, list) or why_untried(call, plan):
            return False
        if not all(variant.on_tensor_cores for variant in plan.gradients):
            return False
        times, plain_takes_it = self.times(request), isinstance(request.plan(self.plain), Plan)
        return times is not None and times.are_longer(with_torch=False, with_plain=plain_takes_it)

    def times(self, request: Request) -> Times | None:
        """Return the times of other kernels for such calls, divided by this route's: :meth:`.Timings.over_tensor`."""
        timings = request.runtime.part(Timings)
        return timings.over_tensor(self, self.plain, request.call, request.budget_bytes)

    def backward(
        self, call: AttentionCall, config: AttentionConfig, plan: Plan, saved: Results, wanted: Wanted
    ) -> Gradients:
        """Gradients as on plain cores; the gradient of the sinks is made of what the forward pass saved."""
        found = super().backward(call, config, plan, saved, wanted)
        return found._replace(sinks=sinks_gradient(call, saved, wanted)) if wanted.sinks else found


def _wins_untimed(call: AttentionCall) -> bool:
    """Whether the kernel is taken to be faster than torch's where timing is switched off. It took 0.61 to 0.93 of the
    time of torch's kernel for a T4, both built for an H200, and 1.24 to 1.40 in causal calls. Other cards of compute
    capability 7.5 have no tensor cores, or may have none."""
    runtime = runtime_of(call.query.device)
    has_cores = runtime.info.capability == (7, 5) and any(word in runtime.info.name for word in ("T4", "RTX"))
    is_measured = call.query.dtype == torch.float16 and call.head_dim <= 128 and not call.has_band
    return has_cores and is_measured and not runtime.part(Timings).is_on


def may_win(call: AttentionCall) -> bool:
    """Whether the kernel can be the fastest route on the call's device, by what the card says of itself."""
    if not takes_device(call.query.device) or call.query.element_size() != 2 or call.query.is_complex():
        return False
    info = runtime_of(call.query.device).info
    if info.kind == "hip":
        return generation_of(None, runtime_of(call.query.device).part(Kernels).variant_arch) is not None
    return info.capability is not None and info.capability >= (7, 0)


def find_tensor_plan(
    call: AttentionCall, config: AttentionConfig, budget_bytes: int, *, packed: Packed | None = None
) -> Plan | list[str]:
    """As :func:`.fused.find_plan`, on tensor cores. The bits of a mask and the parts of cut tiles keep the budget."""
    device = call.query.device
    info = runtime_of(device).info
    if not takes_device(device):
        return [f"the fused kernel needs a CUDA or ROCm device, got {device.type}"]
    if not config.fused:
        return ["switched off by the configuration (fused)"]
    kernels = kernels_of(call)
    reasons = list(kernels.machine_reasons) or tensor_reasons(call, info.capability, kernels.variant_arch)
    if not reasons and mask_bits_bytes(call) > budget_bytes:
        found = mask_bits_bytes(call) // MIB
        reasons = [f"the bits of attn_mask take {found} MiB, more than the budget of {budget_bytes // MIB} MiB"]
    if reasons:
        return reasons
    asked: dict[str, Any] = {"for_grad": call.needs_grad, "packed": packed, "arch": kernels.variant_arch}
    plan = tensor_plan(call, info.num_sms, info.capability, **asked)
    if plan.pieces is not None:
        memory = mask_bits_bytes(call) + parts_bytes(plan)
        # A launch with listed blocks is not cut into several.
        if memory > budget_bytes or work_of(call) > kernels.work_per_launch or not kernels.is_to_be_had(plan.forward):
            plan = plan.unlisted
    return kernels.reasons((plan.forward, *plan.gradients)) or plan
