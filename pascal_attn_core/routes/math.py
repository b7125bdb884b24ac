"""The route ``math``: plain attention with the whole score matrix, for calls so small that nothing is faster, and for
derivatives beyond the second."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Results, without_autocast
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig, log_once
from ..machine.device import LARGEST_BUFFER, MIB
from ..machine.runtime import runtime_of
from ..reference import allowed_keys
from .route import Choice, Request, Route


class MathRoute(Route):
    name = "math"
    is_differentiable = True

    def plan(self, request: Request) -> list[str] | None:
        call, limit = request.call, request.config.math_limit_mib
        reasons = []
        score_mib = call.num_scores * max(4, call.query.element_size()) / MIB
        if score_mib > LARGEST_BUFFER / MIB:
            reasons.append(
                f"its score matrix of {score_mib:,.0f} MiB is above 4 GiB, the largest buffer that the device allows"
            )
        elif score_mib > limit and call.order < 3:
            reasons.append(f"its score matrix of {score_mib:.1f} MiB is above math_limit_mib {limit:g}")
        if call.seq_len_kv > runtime_of(call.query.device).info.longest_sum:
            reasons.append(f"the device may add up {call.seq_len_kv:,} products, one for each key, wrongly")
        redrawn = "a compiled graph recomputes it for its gradients, with a different dropout mask"
        checks = (
            (request.with_lse and call.order < 3, "torch's function does not return lse"),
            (call.score_rule is not None, "a score_mod runs in tiles only"),
            (call.is_empty, "the call is empty"),
            (request.in_graph and call.dropout_p, redrawn),
        )
        return reasons + [why for holds, why in checks if holds] or None

    def claim(self, request: Request) -> Choice | None:
        if request.plan(self):
            return None
        if request.call.order > 2:
            return Choice(self, _stored(request.call))
        return Choice(self, f"the score matrix is below {request.config.math_limit_mib:g} MiB")

    def forward(
        self, call: AttentionCall, config: AttentionConfig, plan: Any, *, with_lse: bool = False, **options: Any
    ) -> Results:
        """The output is differentiable any number of times; sums in float32 (float64 for float64). Heads of a group are
        query rows: K and V are not expanded for them."""
        probs, lse = _weights(call, with_lse=with_lse)
        value = call.value if call.value.dim() > 2 else call.value[None]
        if call.dropout_p:
            probs = torch.dropout(probs, call.dropout_p, train=True)
        out = torch.matmul(probs.flatten(-3, -2), value.to(probs.dtype)).unflatten(-2, (call.groups, call.seq_len_q))
        out = out.flatten(-4, -3).reshape(call.out_shape).to(call.query.dtype)
        return Results(out, None if lse is None else lse.reshape(call.out_shape[:-1]))

    def thirds(
        self, call: AttentionCall, along: Sequence[Any], outer: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients of the five inputs, of the direction ``along`` and of the gradients ``outer`` of out and
        lse, through the score matrix, from those of the results of :class:`.derivatives.DirectionFunction`."""
        if call.dropout_p:
            raise RuntimeError(
                "third derivatives must be taken without dropout, got one whose coins only the tiles know"
            )
        _stored(call)
        lse = outer[0].new_zeros(outer[0].shape[:-1], dtype=call.sums_dtype) if outer[1] is None else outer[1]
        given: Any = (call.query, call.key, call.value, call.attn_mask, call.sinks, *along, outer[0], lse)
        more = torch.is_grad_enabled()
        with torch.enable_grad(), without_autocast(call.query):
            # Each a tensor of its own, since two may be one tensor.
            own = [t.view_as(t).requires_grad_() if _is_float(t) else t for t in given]
            results = self.forward(call.with_tensors(*own[:5]), AttentionConfig(), None, with_lse=True)
            first = _pulled(results[:2], own[10:], own[:5])
            second = _pulled(first, own[5:10], own[:5] + own[10:])
            return _pulled(second, grads, own, create_graph=more)


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def _pulled(outputs: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Any], *, create_graph: bool = True) -> list:
    """The gradients of the inputs, each None where there is none, from those of the outputs, where there are such."""
    pairs = [(t, grad) for t, grad in zip(outputs, grads) if t is not None and grad is not None and t.requires_grad]
    sources = [t for t in inputs if _is_float(t)]
    outputs, grads = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, sources, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if _is_float(t) else None for t in inputs]


BEYOND_SECONDS = "third derivatives, and tangents of tangents, are taken by the route math"


def _stored(call: AttentionCall) -> str:
    size = call.num_scores * max(4, call.query.element_size()) / MIB
    sentence = f"{BEYOND_SECONDS}, which stores the score matrix of {size:,.1f} MiB several times"
    log_once(logging.WARNING, "%s", sentence)
    return sentence


def probabilities(call: AttentionCall) -> Tensor:
    """``[*batch, Hkv, G, L, S]`` in float32 (float64 for float64), without dropout."""
    return _weights(call, with_lse=False)[0]


def _weights(call: AttentionCall, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(probabilities, lse ``[*batch, Hkv, G, L]`` or None)."""
    dtype = call.sums_dtype
    query, key = (t if t.dim() > 2 else t[None] for t in (call.query, call.key))
    lead = (*call.batch, call.num_kv_heads)
    query = query.expand(*call.batch, call.num_heads, -1, -1).unflatten(-3, (call.num_kv_heads, call.groups))
    rows = query.flatten(-3, -2).to(dtype) * call.scale
    scores = torch.matmul(rows, key.to(dtype).transpose(-2, -1)).expand(*lead, -1, -1)
    scores = scores.unflatten(-2, (call.groups, call.seq_len_q))
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    return _softmax(scores, call, with_lse)


def _softmax(scores: Tensor, call: AttentionCall, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Probabilities of ``[*batch, Hkv, G, L, S]``; rows that may look at no key are zero."""
    mask, allowed = call.attn_mask, None
    if isinstance(mask, LazyMask):
        mask = mask.dense()
    if mask is not None:
        if mask.dtype != torch.bool:
            mask = mask.to(scores.dtype)  # before it is expanded: its gradient is summed in this dtype
        mask = mask.expand(*call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv)
        mask = mask.unflatten(-3, (call.num_kv_heads, call.groups))
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            scores = scores + mask
            allowed = mask.detach() != -math.inf
    if call.left is not None or call.right is not None:
        window = (-1 if call.left is None else call.left, -1 if call.right is None else call.right)
        alignment = "lower_right" if call.offset else "upper_left"
        band = allowed_keys(call.seq_len_q, call.seq_len_kv, alignment=alignment, window=window, device=scores.device)
        allowed = band if allowed is None else allowed & band
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    empty = None if allowed is None else ~allowed.any(dim=-1, keepdim=True)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(call.num_kv_heads, call.groups, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        empty = None if empty is None else empty & (sinks.detach() == -math.inf)
    scores = scores if empty is None else scores.masked_fill(empty, 0.0)
    probs, lse = scores.softmax(dim=-1), scores.logsumexp(dim=-1) if with_lse else None
    if empty is not None:
        probs, lse = probs.masked_fill(empty, 0.0), None if lse is None else lse.masked_fill(empty[..., 0], -math.inf)
    return probs if call.sinks is None else probs[..., :-1], lse
