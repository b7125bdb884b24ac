"""Gradients of tiled attention in O(N) memory: every tile's probabilities are computed again from the saved lse.

With P the probabilities of a tile, Z the dropout mask divided by 1 - dropout_p, and dO the gradient of the output:

    P  = exp(scores - lse)                     dV += (P * Z)^T dO
    dP = (dO V^T) * Z                          delta = rowsum(dO * O) - dlse
    dS = P * (dP - delta)                      dQ += dS K * scale,  dK += dS^T Q * scale,  dmask += dS

(Dao et al., "FlashAttention", 2022, appendix B; delta holds with dropout, since O already contains it.) The heads of a
group are rows of one product, so their contributions to dK and dV are summed inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import LOG2_E, TileMath
from .call import AttentionCall
from .device import CPU_LIKE
from .dropout import block_row_codes, drop_, key_codes
from .layout import Units, distinct, unit_views
from .masks import Band, Rule, Rules, diagonal_schedule
from .tiles import TilePlan, even_ranges

_DIAGONAL_TOKENS = 128


@dataclass(slots=True)
class Gradients:
    """Gradients in the shapes of the inputs; None where none was wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    attn_mask: Tensor | None


@torch.no_grad()
def tiled_backward(
    call: AttentionCall,
    plan: TilePlan,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    seed: Tensor | None = None,
    wants_mask: bool = False,
    trim_masks: bool = True,
    readable: bool = True,
) -> Gradients:
    """Gradients of :func:`pascal_attn_core.attention.tiled_forward`.

    Args:
        plan: planned with ``backward=True``.
        grad_out, out: ``[*batch, Hq, L, Dv]``; lse, grad_lse: ``[*batch, Hq, L]``.
        seed: that of the forward pass, if the call has dropout.
        wants_mask: also return the gradient of a float mask, in the mask's shape.
    """
    work = _Gradients(call, plan, wants_mask, seed)
    if not call.is_empty:
        per_query = (work.grad_query, grad_out.expand(out.shape), out, lse, grad_lse, work.mask_view)
        for units in unit_views(call, per_query=per_query, per_key=(work.key_view, work.value_view)):
            rules = Rules(Band.of(call), units.mask, work.math.dtype, look=readable and trim_masks)
            for u0 in range(0, len(units), work.units_per_step):
                work.unit_range(units, u0, min(u0 + work.units_per_step, len(units)), rules)
    return work.result()


@dataclass(slots=True)
class _Block:
    """Rows of one query block, views ``[u, rows, ...]``; part of them along a causal diagonal."""

    query: Tensor
    grad_out: Tensor
    lse_bits: Tensor
    delta: Tensor
    grad_query: Tensor
    code: Tensor | None

    def part(self, first: int, last: int) -> _Block:
        fields = (self.query, self.grad_out, self.lse_bits, self.delta, self.grad_query)
        code = None if self.code is None else self.code[:, first:last]
        return _Block(*(t[:, first:last] for t in fields), code)


class _Gradients:
    """Buffers, sums and the arithmetic of one backward pass."""

    def __init__(self, call: AttentionCall, plan: TilePlan, wants_mask: bool, seed: Tensor | None):
        self.call, self.plan, self.seed = call, plan, seed
        self.math = math_ = TileMath(call, plan, seed, for_backward=True)
        query, key, value = call.query, call.key, call.value
        heads = () if query.dim() == 2 else (call.num_heads,)
        # Every element of the query's gradient is written once; where inputs broadcast it is summed at the end.
        self.grad_query = query.new_empty((*call.batch, *heads, call.seq_len_q, call.head_dim))
        lead = (*call.batch, call.num_kv_heads)
        self.grad_key, self.key_view = _sum_like(key, lead, math_.dtype)
        self.grad_value, self.value_view = _sum_like(value, lead, math_.dtype)
        self.grad_mask = self.mask_view = None
        if wants_mask and call.attn_mask is not None:
            self.grad_mask = torch.zeros_like(call.attn_mask, dtype=math_.dtype, memory_format=torch.contiguous_format)
            self.mask_view = self.grad_mask.expand((*call.batch, *heads, call.seq_len_q, call.seq_len_kv))
        # Units that share an element of a sum must not be added to it in one step.
        shared = any(t.stride(-3) == 0 and t.shape[-3] > 1 for t in (self.key_view, self.value_view))
        self.units_per_step = 1 if shared else plan.units
        self.grad_probs = torch.empty_like(math_.scores)
        rows = plan.units * plan.q_block * call.groups
        self.query_sum = math_.buffer(rows * call.head_dim)
        self.grad_rows = math_.buffer(rows * call.head_dim_v if math_.copies_query else 0)
        self.products = math_.buffer(rows * call.head_dim_v)
        self.value_tile = math_.buffer(plan.units * plan.kv_block * call.head_dim_v if math_.copies_kv else 0)
        self.split = _DIAGONAL_TOKENS if query.device.type in CPU_LIKE else 0

    def result(self) -> Gradients:
        call = self.call
        if call.is_empty:
            self.grad_query.zero_()
        query = self.grad_query if self.grad_query.shape == call.query.shape else self.grad_query.sum_to_size(call.query.shape)
        key, value = self.grad_key.to(call.key.dtype), self.grad_value.to(call.value.dtype)
        mask = None
        if self.grad_mask is not None and call.attn_mask is not None:
            mask = self.grad_mask.to(call.attn_mask.dtype)
        return Gradients(query, key, value, mask)

    def unit_range(self, units: Units, u0: int, u1: int, rules: Rules) -> None:
        """All query blocks of some units."""
        results = [t[u0:u1] for t in units.extra[6:8] if t is not None]
        # 16-bit gradients are summed in float32, for the units at hand.
        sums = [t if t.dtype == self.math.dtype else torch.zeros_like(t, dtype=self.math.dtype) for t in results]
        for q0, q1 in even_ranges(0, self.call.seq_len_q, self.plan.q_block):
            self._query_block(units, u0, u1, q0, q1, rules, sums[0], sums[1])
        for result, total in zip(results, sums):
            if total is not result:
                result.copy_(total)

    def _query_block(
        self, units: Units, u0: int, u1: int, q0: int, q1: int, rules: Rules, key_sum: Tensor, value_sum: Tensor
    ) -> None:
        groups, plan = self.call.groups, self.plan
        block = self._block(units, u0, u1, q0, q1)
        first, last = rules.key_range(u0, u1, q0, q1, self.call.seq_len_kv)
        sub_keys = plan.kv_block if self.math.copies_kv else max(1, plan.q_block * plan.kv_block // _DIAGONAL_TOKENS)
        for t0, t1, ranges in diagonal_schedule(rules.band, q0, q1, first, last, plan.kv_block, self.split, sub_keys):
            part = block if t1 - t0 == q1 - q0 else block.part(t0 * groups, t1 * groups)
            for j0, j1 in ranges:
                rule = rules.rule(u0, u1, q0 + t0, q0 + t1, j0, j1)
                if rule is None:
                    continue
                key, value = units.key[u0:u1, j0:j1], units.value[u0:u1, j0:j1]
                grad_scores = self._tile(part, key, value, rule, j0, key_sum[:, j0:j1], value_sum[:, j0:j1])
                if self.mask_view is not None:
                    self._add_to_mask(units.extra[5][u0:u1, :, q0 + t0 : q0 + t1, j0:j1], grad_scores)  # type: ignore[index]
        grad_query = units.extra[0][u0:u1, :, q0:q1]  # type: ignore[index]
        grad_query.copy_(self.math.by_head(block.grad_query))

    def _tile(
        self, block: _Block, key: Tensor, value: Tensor, rule: Rule, j0: int, key_sum: Tensor, value_sum: Tensor
    ) -> Tensor:
        """Add one tile to all sums; returns the gradient of its scores."""
        key = self.math.converted(key)
        if self.math.copies_kv:
            value = self.value_tile[: value.numel()].view(value.shape).copy_(value)
        probs = self._probs(block, key, rule)
        grad_probs = self.grad_probs[: probs.numel()].view(probs.shape)
        torch.bmm(block.grad_out, value.transpose(1, 2), out=grad_probs)
        if block.code is None:
            torch.baddbmm(value_sum, probs.transpose(1, 2), block.grad_out, out=value_sum)
            grad_probs.sub_(block.delta)
            grad_scores = probs.mul_(grad_probs)
        else:
            grad_scores = self._with_dropout(block, probs, grad_probs, value_sum, j0)
        scale = self.call.scale
        torch.baddbmm(block.grad_query, grad_scores, key, alpha=scale, out=block.grad_query)
        torch.baddbmm(key_sum, grad_scores.transpose(1, 2), block.query, alpha=scale, out=key_sum)
        return grad_scores

    def _probs(self, block: _Block, key: Tensor, rule: Rule) -> Tensor:
        scores = self.math.product(block.query, key, self.call.scale * LOG2_E, converted=True)
        if rule.mask is not None and rule.mask.dtype != torch.bool:
            by_token = self.math.masks.by_token(scores)
            torch.add(by_token, rule.mask.transpose(1, 2), alpha=LOG2_E, out=by_token)
        scores.sub_(block.lse_bits).exp2_()
        self.math.masks.forbid(scores, rule, 0.0)
        return scores

    def _with_dropout(
        self, block: _Block, probs: Tensor, grad_probs: Tensor, value_sum: Tensor, j0: int
    ) -> Tensor:
        """dS = P * (Z * dO V^T - delta) = (P * Z) * dO V^T - P * delta, with the coins drawn once."""
        assert block.code is not None and self.seed is not None
        kept = 1.0 - self.call.dropout_p
        dropped_share = probs * block.delta
        codes = key_codes(self.seed, j0, j0 + probs.shape[2])
        drop_(probs, block.code, codes, self.call.dropout_p, self.math.coins)
        probs.div_(kept)
        torch.baddbmm(value_sum, probs.transpose(1, 2), block.grad_out, out=value_sum)
        return probs.mul_(grad_probs).sub_(dropped_share)

    def _add_to_mask(self, target: Tensor, grad_scores: Tensor) -> None:
        by_head = self.math.by_head(grad_scores)
        own = distinct(target)
        repeated = [d for d in range(4) if own.shape[d] == 1 and by_head.shape[d] > 1]
        own.add_(by_head.sum(dim=repeated, keepdim=True) if repeated else by_head)

    def _block(self, units: Units, u0: int, u1: int, q0: int, q1: int) -> _Block:
        grad_out, out, lse, grad_lse = (None if t is None else t[u0:u1, :, q0:q1] for t in units.extra[1:5])
        assert grad_out is not None and out is not None and lse is not None
        query = self.math.block_query(units.query[u0:u1, :, q0:q1])
        rows = query.shape[1]
        if self.math.copies_query:
            tokens_first = grad_out.transpose(1, 2)
            grad_rows = self.grad_rows[: grad_out.numel()].view(tokens_first.shape).copy_(tokens_first)
            grad_rows = grad_rows.view(u1 - u0, rows, -1)
        else:
            grad_rows = grad_out[:, 0] if self.call.groups == 1 else grad_out[:, :, 0]
        products = self.products[: out.numel()].view(u1 - u0, q1 - q0, self.call.groups, -1)
        products.copy_(out.transpose(1, 2)).mul_(self.math.masks.by_token(grad_rows))
        delta = products.view(u1 - u0, rows, -1).sum(dim=-1, keepdim=True)
        if grad_lse is not None:
            delta.sub_(grad_lse.transpose(1, 2).reshape(u1 - u0, rows, 1))
        lse_bits = lse.transpose(1, 2).reshape(u1 - u0, rows, 1).mul(LOG2_E)
        lse_bits.masked_fill_(lse_bits == -math.inf, math.inf)  # a row without keys: every probability is zero
        grad_query = self.query_sum[: query.numel()].view(query.shape).zero_()
        code = None
        if self.math.coins.numel():
            assert self.seed is not None
            first_unit = units.index + u0
            code = block_row_codes(self.seed, first_unit, query.shape, self.call.groups, self.call.seq_len_q, q0)
        return _Block(query, grad_rows, lse_bits, delta, grad_query, code)


def _sum_like(tensor: Tensor, lead: tuple[int, ...], acc_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(zeros in the shape of an input, the same as ``[*lead, S, X]``): units that share an input share its sum."""
    shape = (*lead, *tensor.shape[-2:])
    repeats = math.prod(shape) != tensor.numel()
    total = torch.zeros(tensor.shape, dtype=acc_dtype if repeats else tensor.dtype, device=tensor.device)
    return total, total.expand(shape)
