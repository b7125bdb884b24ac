"""Gradients of tiled attention in O(N) memory: every tile's probabilities are computed again from the saved lse.

With P the probabilities of a tile, Z the dropout mask divided by 1 - dropout_p, and dO the gradient of the output:

    P  = exp(scores - lse)                     dV += (P * Z)^T dO
    dP = (dO V^T) * Z                          delta = rowsum(dO * O) - dlse
    dS = P * (dP - delta)                      dQ += dS K * scale,  dK += dS^T Q * scale,  dmask += dS

(Dao et al., "FlashAttention", 2022, appendix B; delta holds with dropout, since O already contains it.) The heads of a
group are rows of one product, so their contributions to dK and dV are summed inside it. Under a score rule dS is then
what autograd makes of it on its way back through the rule, which runs once more for that.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, Wanted, distinct, may_read
from ..call.flex_rules import ScoreTile
from .forward import units_of
from .layout import Units, unit_spans, unit_views
from .mask_writer import rows_by_token
from .masks import FREE, Rule, Rules, block_schedule
from .plan import Walk
from .products import LOG2_E, TileProducts


@torch.no_grad()
def tiled_backward(
    call: AttentionCall, walk: Walk, saved: Results, wanted: Wanted, *, trim_masks: bool = True
) -> Gradients:
    """Gradients of :func:`pascal_attn_core.tiled.forward.tiled_forward`.

    Args:
        walk: planned with ``backward=True``.
        saved: what ``tiled_forward(for_grad=True)`` returned.
    """
    out, lse, log_sum, seed = saved
    sums = _Sums(call, walk.dtype, wanted.mask)
    if not walk.is_empty:
        tile = GradientProducts(call, walk, seed, sums.captured)
        grad_out = wanted.grad_out.expand(out.shape)
        per_query = (sums.query, sums.mask_view, grad_out, out, lse, log_sum, wanted.grad_lse)
        per_key = (sums.key_view, sums.value_view)
        views, look = unit_views(call, per_query, per_key), may_read(call) and trim_masks and walk.tiles.scans_mask
        spans = unit_spans(views.size, call, 1 if sums.units_share else walk.tiles.units)
        for units in units_of(call, views, per_query, per_key):
            rules = Rules.of(call, units, look=look) if walk.is_masked else None
            for span in spans:
                _UnitRange(units, span, tile, call, walk).run(rules)
    return sums.result(sinks_gradient(call, saved, wanted) if wanted.sinks else None)


class _Sums:
    """The gradients while they are being made."""

    def __init__(self, call: AttentionCall, acc_dtype: torch.dtype, wants_mask: bool):
        self.call = call
        # Every element of the query's gradient is written once; where queries broadcast, copies are summed at the end.
        self.query = call.query.new_empty((*call.out_shape[:-1], call.head_dim))
        lead = (*call.batch, call.num_kv_heads)
        self.key, self.key_view = _sum_like(call.key, lead, acc_dtype)
        self.value, self.value_view = _sum_like(call.value, lead, acc_dtype)
        self.mask = self.mask_view = None
        if wants_mask and isinstance(call.attn_mask, Tensor):
            self.mask = torch.zeros(call.attn_mask.shape, dtype=acc_dtype, device=call.query.device)
            self.mask_view = self.mask.expand((*call.out_shape[:-1], call.seq_len_kv))
        captured = () if call.score_rule is None else call.score_rule.captured
        self.captured = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, acc_dtype)) for t in captured]
        # Units that share an element of a sum must not be added to it in one step.
        self.units_share = any(
            stride == 0 and size > 1
            for view in (self.key_view, self.value_view)
            for stride, size in zip(view.stride()[:-2], view.shape[:-2])
        )

    def result(self, sinks: Tensor | None) -> Gradients:
        call = self.call
        if call.num_scores == 0:
            self.query.zero_()
        query = self.query if self.query.shape == call.query.shape else self.query.sum_to_size(call.query.shape)
        mask = None
        if self.mask is not None and call.attn_mask is not None:
            mask = self.mask.to(call.attn_mask.dtype)
        key, value = self.key.to(call.key.dtype), self.value.to(call.value.dtype)
        captured = () if call.score_rule is None else call.score_rule.captured
        return Gradients(
            query, key, value, mask, sinks, [total.to(t.dtype) for total, t in zip(self.captured, captured)]
        )


class _Block(NamedTuple):
    """Rows of one query block, views ``[u, rows, ...]``; part of them along a causal diagonal."""

    query: Tensor
    grad_out: Tensor
    shift: Tensor
    log_sum_bits: Tensor | None
    delta: Tensor
    grad_query: Tensor
    code: Tensor | None

    def part(self, first: int, last: int) -> _Block:
        return _Block(*(None if t is None else t[:, first:last] for t in self))  # type: ignore[arg-type]


class GradientProducts(TileProducts):
    """The buffers of one backward pass, and what is done to one tile."""

    def __init__(self, call: AttentionCall, walk: Walk, seed: Tensor | None, captured: list[Tensor]):
        super().__init__(call, walk, seed, for_backward=True)
        self.captured = captured  # sums of the gradients of what the call's score rule reads
        tiles = walk.tiles
        rows = tiles.units * tiles.q_block * walk.groups
        self.grad_probs = torch.empty_like(self.score_buffer)
        self.tanh_buffer = self.buffer(self.score_buffer.numel() if call.softcap is not None else 0)
        self.query_sum = self.buffer(rows * call.head_dim)
        self.grad_rows = self.buffer(rows * call.head_dim_v if self.copies_query else 0)
        self.products = self.buffer(rows * call.head_dim_v)
        self.value_tile = self.buffer(tiles.units * tiles.kv_block * call.head_dim_v if self.copies_kv else 0)

    def add_tile(
        self, block: _Block, key: Tensor, value: Tensor, rule: Rule, j0: int, sums: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """Add one tile to the sums of key, value and mask, that of the mask a view ``[u, G, tokens, keys]``."""
        key, (key_sum, value_sum, mask_sum) = self.converted(key), sums
        if self.copies_kv:
            value = self.value_tile[: value.numel()].view(value.shape).copy_(value)
        probs = self._probs(block, key, rule)
        grad_probs = self.grad_probs[: probs.numel()].view(probs.shape)
        torch.bmm(block.grad_out, value.transpose(1, 2), out=grad_probs)
        coins = None if block.code is None else self.coins(probs.shape, block.code, j0)
        if coins is not None:
            grad_probs.mul_(coins).mul_(1.0 / self.kept_share)
        grad_probs.sub_(block.delta).mul_(probs)
        if coins is not None:
            probs.mul_(coins).mul_(1.0 / self.kept_share)
        torch.baddbmm(value_sum, probs.transpose(1, 2), block.grad_out, out=value_sum)
        # From here on the gradient of the scores.
        if mask_sum is not None:
            own, grad = distinct(mask_sum), self.by_head(grad_probs)  # summed over what the mask broadcasts
            repeated = [d for d in range(4) if own.shape[d] == 1 and grad.shape[d] > 1]
            own.add_(grad.sum(dim=repeated, keepdim=True) if repeated else grad)
        if rule.score is not None:
            self._go_back_through(rule.score, block.query, key, grad_probs)
        if self.softcap is not None:  # the derivative of softcap * tanh(s / softcap) is 1 - tanh^2
            tanh = self.tanh_buffer[: probs.numel()].view(probs.shape)
            grad_probs.mul_(tanh.square_().neg_().add_(1.0))
        torch.baddbmm(block.grad_query, grad_probs, key, alpha=self.scale, out=block.grad_query)
        torch.baddbmm(key_sum, grad_probs.transpose(1, 2), block.query, alpha=self.scale, out=key_sum)

    def _probs(self, block: _Block, key: Tensor, rule: Rule) -> Tensor:
        """exp(scores - lse), ``[u, rows, keys]``."""
        if self.softcap is None:
            scores = self.product(block.query, key, self.scale * self.unit)
        else:
            scores = self.tanh(block.query, key)
            self.tanh_buffer[: scores.numel()].view(scores.shape).copy_(scores)
            scores.mul_(self.softcap * self.unit)
        self.change(scores, rule)
        scores.sub_(block.shift)
        if block.log_sum_bits is None:
            scores.exp2_()
        else:
            self.exp2_(scores.mul_(LOG2_E).sub_(block.log_sum_bits))
        self.forbid(scores, rule, 0.0)
        return scores

    def _go_back_through(self, rule: ScoreTile, query: Tensor, key: Tensor, grad: Tensor) -> None:
        """Turn the gradient of what a score rule returns into that of its scores, in place; add those of what it
        reads."""
        scores = rows_by_token(self.product(query, key, self.scale), self.groups)
        of_scores = rule.add_gradients(scores, self.by_head(grad), self.captured)
        if of_scores is None:
            grad.zero_()
        else:
            rows_by_token(grad, self.groups).copy_(of_scores)


class _UnitRange:
    """Some units that share every step: all of their query blocks against all of their keys."""

    def __init__(self, units: Units, span: tuple[int, int], tile: GradientProducts, call: AttentionCall, walk: Walk):
        u0, u1 = span
        self.span, self.first_unit = span, units.first + u0
        self.tile, self.call, self.walk = tile, call, walk
        self.query, self.key, self.value = units.query[u0:u1], units.key[u0:u1], units.value[u0:u1]
        extra: list[Any] = [None if t is None else t[u0:u1] for t in units.extra]
        self.grad_query, self.mask_sum, self.grad_out, self.out, self.lse, self.log_sum, self.grad_lse = extra[:7]
        self.results = extra[7:]

    def run(self, rules: Rules | None) -> None:
        """Add these units to all gradients."""
        # 16-bit gradients are summed in float32, for the units at hand.
        dtype = self.tile.dtype
        sums = [t if t.dtype == dtype else torch.zeros_like(t, dtype=dtype) for t in self.results]
        for q0, q1 in self.walk.q_ranges:
            block = self._block(q0, q1)
            self._visit_tiles(block, q0, q1, rules, sums)
            self.grad_query[:, :, q0:q1].copy_(self.tile.by_head(block.grad_query))
        for result, total in zip(self.results, sums):
            if total is not result:
                result.copy_(total)

    def _visit_tiles(self, block: _Block, q0: int, q1: int, rules: Rules | None, sums: list[Tensor]) -> None:
        groups, (key_sum, value_sum) = self.walk.groups, sums
        for t0, t1, ranges in block_schedule(rules, self.span, q0, q1, self.call, self.walk):
            part = block if t1 - t0 == q1 - q0 else block.part(t0 * groups, t1 * groups)
            for j0, j1 in ranges:
                rule = FREE if rules is None else rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                if rule is None:
                    continue
                key, value = self.key[:, j0:j1], self.value[:, j0:j1]
                mask_sum = None if self.mask_sum is None else self.mask_sum[:, :, q0 + t0 : q0 + t1, j0:j1]
                self.tile.add_tile(part, key, value, rule, j0, (key_sum[:, j0:j1], value_sum[:, j0:j1], mask_sum))

    def _block(self, q0: int, q1: int) -> _Block:
        grad_out, out, lse = (t[:, :, q0:q1] for t in (self.grad_out, self.out, self.lse))
        query = self.tile.rows(self.query[:, :, q0:q1], self.tile.query_buffer)
        stat = (query.shape[0], query.shape[1], 1)
        grad_rows = self.tile.rows(grad_out, self.tile.grad_rows)
        products = self.tile.products[: out.numel()].view(grad_rows.shape)
        by_token = rows_by_token(products, self.walk.groups)
        by_token.copy_(out.transpose(1, 2)).mul_(rows_by_token(grad_rows, self.walk.groups))
        delta = products.sum(dim=-1, keepdim=True)
        if self.grad_lse is not None:
            delta.sub_(self.grad_lse[:, :, q0:q1].transpose(1, 2).reshape(stat))
        shift = lse.transpose(1, 2).reshape(stat) * (1.0 if self.log_sum is not None else LOG2_E)
        log_sum_bits = None
        if self.log_sum is not None:
            log_sum = self.log_sum[:, :, q0:q1].transpose(1, 2).reshape(stat)
            shift, log_sum_bits = shift.sub_(log_sum), log_sum * LOG2_E
            log_sum_bits.masked_fill_(log_sum_bits == -math.inf, math.inf)
        shift.masked_fill_(~(shift > -math.inf), math.inf)  # a row without keys: every probability is zero
        grad_query = self.tile.query_sum[: query.numel()].view(query.shape).zero_()
        code = self.tile.row_codes(self.first_unit, query, self.call.seq_len_q, q0)
        return _Block(query, grad_rows, shift, log_sum_bits, delta, grad_query, code)


def sinks_gradient(call: AttentionCall, saved: Results, wanted: Wanted) -> Tensor:
    """``[Hq]``: a sink's probability exp(sink - lse) takes from every row what :math:`delta` says, summed over rows."""
    (out, lse, *_), grad_lse, grad_out = saved, wanted.grad_lse, wanted.grad_out.expand(saved.out.shape)
    assert call.sinks is not None
    assert lse is not None
    if call.query.dim() == 2:  # no dimension of heads
        grad_out, out, lse = grad_out[None], out[None], lse[None]
        grad_lse = None if grad_lse is None else grad_lse[None]
    sinks, grads = call.sinks.detach().to(lse.dtype), []
    for head in range(call.num_heads):
        rows = (..., head, slice(None), slice(None)), (..., head, slice(None))
        delta = (grad_out[rows[0]].to(lse.dtype) * out[rows[0]]).sum(dim=-1)
        delta = delta if grad_lse is None else delta - grad_lse[rows[1]]
        # Below every score and in a row without keys a sink at -inf has the probability 0.
        shift = torch.where(lse[rows[1]] == -math.inf, math.inf, lse[rows[1]])
        grads.append(-(torch.exp(sinks[head] - shift) * delta).sum())
    return torch.stack(grads).to(call.sinks.dtype) if grads else torch.zeros_like(call.sinks)


def _sum_like(tensor: Tensor, lead: tuple[int, ...], acc_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(zeros in the shape of an input, the same as ``[*lead, S, X]``): units that share an input share its sum."""
    shape = (*lead, *tensor.shape[-2:])
    repeats = math.prod(shape) != tensor.numel()
    total = torch.zeros(tensor.shape, dtype=acc_dtype if repeats else tensor.dtype, device=tensor.device)
    return total, total.expand(shape)
