"""The routes ``fused`` and ``fused-int8``: reasons, forward, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, empty_output
from ..config import AttentionConfig
from ..device import DeviceInfo, device_info
from ..fused import kernels
from ..fused.launches import forward_launches, num_splits, variant_of
from ..fused.launches_backward import backward_launches
from ..fused.launches_int8 import int8_launches
from ..fused.launches_packed import Packed, packed_launches
from ..fused.select import call_reasons, rows_are_readable
from ..fused.source import Variant
from ..fused.verify import ensure
from .route import Choice, Request, Route
from .timing import fused_over_torch
from .torch_kernel import TorchForm, TorchRoute

_DP4A = (6, 1)


class FusedRoute(Route):
    """Our CUDA kernel.

    Args:
        torch_route: whose kernel this one is timed against where both take a call.
    """

    name = "fused"

    def __init__(self, torch_route: TorchRoute):
        self.torch_route = torch_route

    def plan(self, request: Request) -> list[str] | None:
        return why_not(request.call, request.config, with_lse=request.with_lse) or None

    def claim(self, request: Request) -> Choice | None:
        call = request.call
        if not takes_device(call.query.device):
            return None
        form = request.plan(self.torch_route)
        has_form = isinstance(form, TorchForm)
        if not may_win(call, torch_has_a_kernel=has_form) or request.plan(self):
            return None
        if not isinstance(form, TorchForm):
            return Choice(self, form[0], torch_stores=True)
        ratio, stores = fused_over_torch(self, call, request.budget_bytes), form.torch_stores
        if ratio is None and not form.is_one_call:
            why = f"torch has no fused kernel that takes it as it is ({form.words()})"
            return Choice(self, why, torch_stores=stores)
        if ratio is not None and ratio < 1:
            why = f"timed on this card at {ratio:.2f} of the time of torch's kernel"
            return Choice(self, why, over_torch=ratio, torch_stores=stores)
        if ratio is not None:
            request.remarks.append(f"ours was timed on this card at {ratio:.2f} of its time")
        return None

    def forward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Packed | None,
        *,
        with_lse: bool,
        for_grad: bool,
        **_: Any,
    ) -> Results:
        return forward(call, with_lse=with_lse, for_grad=for_grad, packed=plan)

    def backward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Packed | None,
        grad_out: Tensor,
        saved: Results,
        *,
        grad_lse: Tensor | None,
        **_: Any,
    ) -> Gradients:
        assert saved.lse is not None
        return Gradients(*backward(call, grad_out, saved.out, saved.lse, saved.log_sum, grad_lse, packed=plan))


class Int8Route(Route):
    """The same kernel with Q and K in 8 bits: only where it is asked for by name."""

    name = "fused-int8"

    def plan(self, request: Request) -> list[str] | None:
        return why_not(request.call, request.config, int8=True, with_lse=request.with_lse) or None

    def claim(self, request: Request) -> None:
        return None

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: Any, **options: Any) -> Results:
        ensure([variant_of(call, "int8")], _index(call))
        out = empty_output(call)
        kernels.run(int8_launches(call, out), _index(call))
        return Results(out)


def why_not(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    int8: bool = False,
    with_lse: bool = False,
    packed: Packed | None = None,
) -> list[str]:
    """Why the fused route cannot take a call; empty = it can."""
    if not takes_device(call.query.device):
        return [f"the fused kernel needs a CUDA device, got {call.query.device.type}"]
    if not config.fused:
        return ["switched off by the configuration (fused)"]
    reasons = call_reasons(call, int8=int8, with_lse=with_lse)
    if reasons:
        return reasons
    index = _index(call)
    reasons = list(kernels.machine_reasons(index))
    info = device_info(call.query.device)
    if int8 and not reasons and info.capability is not None and info.capability < _DP4A:
        reasons.append(f"the int8 mode needs compute capability 6.1, got {info.capability[0]}.{info.capability[1]}")
    if not reasons:
        variants = _variants(call, info, int8, packed, for_grad=call.needs_grad)
        failures = (kernels.failure(index, variant) for variant in variants)
        reasons += [reason for reason in failures if reason]
    return reasons


def takes_device(device: torch.device) -> bool:
    """Whether the kernels run on devices of this type."""
    return device.type == "cuda"


def may_win(call: AttentionCall, *, torch_has_a_kernel: bool) -> bool:
    """Whether the kernel can be the fastest route on the call's device: up to Turing, but not where torch multiplies on
    tensor cores, as it does float16 on Volta and Turing, and everything on newer cards."""
    capability = device_info(call.query.device).capability
    if capability is None or capability >= (8, 0):
        return False
    return capability < (7, 0) or call.query.dtype != torch.float16 or not torch_has_a_kernel


def forward(call: AttentionCall, *, with_lse: bool, for_grad: bool = False, packed: Packed | None = None) -> Results:
    """(out, lse, log_sum), the last two only where they are wanted: log_sum for the gradients of calls with a float
    mask, next to whose largest numbers it would be lost in lse. No graph for gradients."""
    info = device_info(call.query.device)
    ensure(_variants(call, info, False, packed, for_grad=for_grad), _index(call))
    out = empty_output(call)
    wanted = with_lse or for_grad
    lse = out.new_empty(out.shape[:-1], dtype=torch.float32) if wanted else None
    has_bias = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    log_sum = torch.empty_like(lse) if lse is not None and for_grad and has_bias else None
    launches = forward_launches(call, out, lse, log_sum, info, may_split=packed is None)
    if packed is not None:
        launches = packed_launches(launches, packed)
        out[..., packed.end_q :, :] = 0
        if lse is not None:
            lse[..., packed.end_q :] = -torch.inf
    kernels.run(launches, _index(call))
    return Results(out, lse, log_sum)


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor | None,
    grad_lse: Tensor | None,
    *,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their shapes. Extra memory: three float32 numbers per query row, the
    gradients of inputs that broadcast in full, and a copy of grad_out where its rows cannot be read as they lie."""
    grad_out = grad_out.expand(out.shape)
    if not rows_are_readable(grad_out):
        grad_out = grad_out.contiguous()
    heads = () if call.query.dim() == 2 else (call.num_heads,)
    kv_lead = call.batch if call.query.dim() == 2 else (*call.batch, call.num_kv_heads)
    grads = (
        call.query.new_empty((*call.batch, *heads, call.seq_len_q, call.head_dim)),
        call.key.new_empty((*kv_lead, call.seq_len_kv, call.head_dim)),
        call.value.new_empty((*kv_lead, call.seq_len_kv, call.head_dim_v)),
    )
    contiguous_grad_lse = None if grad_lse is None else grad_lse.float().expand(lse.shape).contiguous()
    launches = backward_launches(call, grad_out, out, lse.contiguous(), log_sum, contiguous_grad_lse, grads)
    if packed is not None:
        launches = packed_launches(launches, packed)
        for grad, end in zip(grads, (packed.end_q, packed.end_k, packed.end_k)):
            grad[..., end:, :] = 0
    kernels.run(launches, _index(call))
    query, key, value = (
        grad if grad.shape == t.shape else grad.sum_to_size(t.shape)
        for grad, t in zip(grads, (call.query, call.key, call.value))
    )
    return query, key, value


def _variants(
    call: AttentionCall, info: DeviceInfo, int8: bool, packed: Packed | None, *, for_grad: bool
) -> list[Variant]:
    """What a call needs; for its gradients too, while another route could still take the call."""
    if int8:
        kinds = ["int8"]
    else:
        kinds = ["split" if packed is None and num_splits(call, info) else "forward"]
        kinds += ["grad_query", "grad_key_value"] if for_grad else []
    return [variant_of(call, kind) for kind in kinds]


def _index(call: AttentionCall) -> int:
    index = call.query.device.index
    return torch.cuda.current_device() if index is None else index
