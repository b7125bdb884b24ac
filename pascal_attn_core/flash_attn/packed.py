"""Sequences of different lengths in one launch of the fused kernel, where that is the fastest exact way."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..call import PLAIN, Arguments, AttentionCall, check_call, prepared
from ..config import AttentionConfig, RouteUnavailable, config_of
from ..fused.launch.plan import Packed, Plan
from ..routes import fused, tensor
from ..routes.route import Choice, Request
from ..routes.run import by, note, route_named
from ..routes.torch_kernel import is_torchs_alone
from .options import FlashOptions

# Rows of a sequence and key/value head up to which a batch of few queries, its keys cut into ranges, is faster.
_FEW_ROWS = 32


def packed_attend(
    q: Tensor, k: Tensor, v: Tensor, q_ends: list[int], k_ends: list[int], options: FlashOptions, *, with_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """:func:`.varlen.varlen_attend` in one launch, or None where that cannot be or is not the fastest way; the ends of
    the sequences have been read and checked."""
    config = config_of(options.config)
    # asked before the call is checked, which costs time on every other device too
    if torch.compiler.is_compiling() or type(q) not in PLAIN or options.slopes is not None:
        return None
    if config.route not in ("auto", "fused", "fused-tensor") or not fused.takes_device(q.device):
        return None
    if options.alignment == "upper_left" and q_ends != k_ends and (options.is_causal or options.window):
        return None  # the kernel's bands are lower-right
    call = _checked(q, k, v, options, "upper_left")
    is_open = config.route == "auto" and not is_torchs_alone(call)  # one after the other, torch takes them best
    may_be_plain = config.route == "fused" or (is_open and fused.may_win(call, as_it_came=True))
    may_be_tensor = config.route == "fused-tensor" or (is_open and tensor.may_win(call))
    if not (may_be_plain or may_be_tensor):
        return None
    if call.groups * max(q1 - q0 for q0, q1 in itertools.pairwise(q_ends)) <= _FEW_ROWS:
        return None
    packed = Packed.of(q_ends, k_ends, q.device, lower_right=True)
    found = _on_tensor_cores(call, config, packed) if may_be_tensor else None
    route = "fused" if found is None else "fused-tensor"
    plan = found or (fused.find_plan(call, config, packed=packed) if may_be_plain else [])
    if isinstance(plan, list) or (config.route == "auto" and fused.why_untried(call, plan)):
        return None
    why = f"{packed.count} sequences of different lengths in one launch"
    choice = Choice(route_named(route), why, plan)
    try:
        out, lse, *_ = by(choice, call, config, with_lse=with_lse, stats=None)
    except RouteUnavailable:
        return None
    note(call, choice, None)
    # squeeze, not [0], whose gradient is a copy
    return out.squeeze(0).transpose(0, 1).contiguous(), lse.squeeze(0) if with_lse and lse is not None else None


def _on_tensor_cores(call: AttentionCall, config: AttentionConfig, packed: Packed) -> Plan | None:
    """How the kernel on tensor cores takes the sequences, where it is asked for or was timed as the fastest for a call
    of as many tokens."""
    plan = tensor.find_tensor_plan(call, config, 0, packed=packed)
    if isinstance(plan, list) or config.route == "fused-tensor":
        return None if isinstance(plan, list) else plan
    route = route_named("fused-tensor")
    assert isinstance(route, tensor.TensorRoute)
    if fused.why_untried(call, plan):
        return None
    times = route.times(Request(call, config))
    return plan if times is not None and times.are_longer() else None


def _checked(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, alignment: str) -> AttentionCall:
    """``[tokens, heads, head_dim]`` as a call ``[1, heads, tokens, head_dim]``."""
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    return check_call(prepared(Arguments(query, key, value, **options.rules() | {"alignment": alignment})))
