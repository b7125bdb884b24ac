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
    sums = Sums(call, walk.dtype, wanted.mask)
    if not walk.is_empty:
        per_query = {**gradients_of(saved, wanted), **sums.per_query}
        GradientProducts(call, walk, saved.seed, sums.captured).visit(saved, per_query, sums.per_key, trim_masks)
    return sums.result(sinks_gradient(call, saved, wanted) if wanted.sinks else None)


def gradients_of(saved: Results, wanted: Wanted) -> dict[str, Any]:
    """Return the gradients of out and lse as a pass reads them, by name."""
    return {"grad_out": wanted.grad_out.expand(saved.out.shape), "grad_lse": wanted.grad_lse}


class Sums:
    """The gradients while they are being made."""

    def __init__(self, call: AttentionCall, acc_dtype: torch.dtype, wants_mask: bool):
        self.call = call
        # Every element of the query's gradient is written once; where queries broadcast, copies are summed at the end.
        self.query = call.query.new_empty((*call.out_shape[:-1], call.head_dim))
        lead = (*call.batch, call.num_kv_heads)
        self.key, key_view = _sum_like(call.key, lead, acc_dtype)
        self.value, value_view = _sum_like(call.value, lead, acc_dtype)
        self.mask = mask_view = None
        if wants_mask and isinstance(call.attn_mask, Tensor):
            self.mask = torch.zeros(call.attn_mask.shape, dtype=acc_dtype, device=call.query.device)
            mask_view = self.mask.expand((*call.out_shape[:-1], call.seq_len_kv))
        self.per_query = {"query_sum": self.query, "mask_sum": mask_view}
        self.per_key = {"key_sum": key_view, "value_sum": value_view}
        captured = () if call.score_rule is None else call.score_rule.captured
        self.captured = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, acc_dtype)) for t in captured]

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


class Rows(NamedTuple):
    """Rows of one query block, views ``[u, rows, ...]``; None where a pass has no use for them.

    shift, log_sum_bits: what is added to scores to give bits of probabilities; taken off them, apart from it.
    query_sum, acc: sums of these rows, of the gradient of the query and of O'.
    query_dot, lse_dot, delta_dot: derivatives along a direction, see :mod:`.tangents`.
    """

    query: Tensor
    shift: Tensor
    log_sum_bits: Tensor | None
    code: Tensor | None
    grad_out: Any = None
    delta: Any = None
    query_sum: Any = None
    query_dot: Tensor | None = None
    lse_dot: Any = None
    delta_dot: Any = None
    acc: Any = None

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(None if t is None else t[:, first:last] for t in self))  # type: ignore[arg-type]


class GradientProducts(TileProducts):
    """The buffers of one backward pass, and what is done to one tile."""

    def __init__(self, call: AttentionCall, walk: Walk, seed: Tensor | None, captured: list[Tensor]):
        super().__init__(call, walk, seed, for_backward=True)
        self.call, self.walk = call, walk
        self.captured = captured  # sums of the gradients of what the call's score rule reads
        tiles = walk.tiles
        rows = tiles.units * tiles.q_block * walk.groups
        self.grad_probs = torch.empty_like(self.score_buffer)
        self.tanh_buffer = self.buffer(self.score_buffer.numel() if call.softcap is not None else 0)
        self.query_sum = self.buffer(rows * call.head_dim)
        self.grad_rows = self.buffer(rows * call.head_dim_v if self.copies_query else 0)
        self.products = self.buffer(rows * call.head_dim_v)
        self.value_tile = self.buffer(tiles.units * tiles.kv_block * call.head_dim_v if self.copies_kv else 0)

    def visit(self, saved: Results, per_query: dict[str, Any], per_key: dict[str, Any], trim_masks: bool) -> None:
        """Walk over all tiles with the results of the forward pass.

        Args:
            per_query, per_key: further tensors by name, ``[*batch, Hq, L, ...]`` or None, and ``[*batch, Hkv, S, X]``.
                Those of ``per_key`` whose names end in ``_sum`` are added to.
        """
        call, walk = self.call, self.walk
        per_query = {"out": saved.out, "lse": saved.lse, "log_sum": saved.log_sum, **per_query}
        extra = list(per_query.values()), list(per_key.values())
        # What is contiguous can be viewed in any way that the inputs can.
        is_plain = all(t is None or t.is_contiguous() for each in extra for t in each)
        views = walk.views if is_plain else unit_views(call, *extra)
        look = may_read(call) and trim_masks and walk.tiles.scans_mask
        sums = [t for name, t in per_key.items() if name.endswith("_sum")]
        # Units that share an element of a sum must not be added to it in one step.
        shared = any(stride == 0 and size > 1 for t in sums for stride, size in zip(t.stride()[:-2], t.shape[:-2]))
        for units in units_of(call, views, *extra):
            rules = Rules.of(call, units, look=look) if walk.is_masked else None
            for span in unit_spans(views.size, call, 1 if shared else walk.tiles.units):
                _UnitRange(self, units, span, (*per_query, *per_key), len(per_query)).run(rules)

    def block(self, query: Tensor, code: Tensor | None, at: dict[str, Any]) -> Rows:
        """The rows of a query block; ``at``: the tensors of the pass there, ``[u, G, tokens, ...]``."""
        grad_out = self.rows(at["grad_out"], self.grad_rows)
        delta = self.row_products(grad_out, at["out"]).sum(dim=-1, keepdim=True)
        if at["grad_lse"] is not None:
            delta.sub_(self.by_row(at["grad_lse"]))
        query_sum = self.query_sum[: query.numel()].view(query.shape).zero_()
        return Rows(query, *self._shift(at), code, grad_out, delta, query_sum)

    def finish(self, rows: Rows, at: dict[str, Any]) -> None:
        """Store what has been summed for a query block."""
        at["query_sum"].copy_(self.by_head(rows.query_sum))

    def add(self, rows: Rows, at: dict[str, Any], rule: Rule, j0: int) -> None:
        """Add one tile to the sums; ``at``: its keys, values and the sums of its keys ``[u, keys, ...]``, and what has
        the shape of its mask ``[u, G, tokens, keys]``."""
        key, value = self.converted(at["key"]), self.taken(at["value"], self.value_tile)
        probs = self._probs(rows, key, rule)
        grad_probs = self.grad_probs[: probs.numel()].view(probs.shape)
        torch.bmm(rows.grad_out, value.transpose(1, 2), out=grad_probs)
        coins = None if rows.code is None else self.coins(probs.shape, rows.code, j0)
        self._kept(grad_probs, coins).sub_(rows.delta).mul_(probs)
        torch.baddbmm(at["value_sum"], self._kept(probs, coins).transpose(1, 2), rows.grad_out, out=at["value_sum"])
        # From here on the gradient of the scores.
        self._add_to_mask(at["mask_sum"], grad_probs)
        if rule.score is not None:
            self._go_back_through(rule.score, rows.query, key, grad_probs)
        if self.softcap is not None:  # the derivative of softcap * tanh(s / softcap) is 1 - tanh^2
            tanh = self.tanh_buffer[: probs.numel()].view(probs.shape)
            grad_probs.mul_(tanh.square_().neg_().add_(1.0))
        self._add_products(grad_probs, key, rows.query, rows.query_sum, at["key_sum"])

    def _add_products(self, grad: Tensor, key: Any, query: Any, query_sum: Tensor, key_sum: Tensor) -> None:
        """Add the products of a gradient of the scores with keys and queries, where given, to their sums."""
        if key is not None:
            torch.baddbmm(query_sum, grad, key, alpha=self.scale, out=query_sum)
        if query is not None:
            torch.baddbmm(key_sum, grad.transpose(1, 2), query, alpha=self.scale, out=key_sum)

    def _add_to_mask(self, mask_sum: Tensor | None, grad: Tensor) -> None:
        """Add a gradient of the scores to that of the mask, summed over what the mask broadcasts."""
        if mask_sum is not None:
            own, grad = distinct(mask_sum), self.by_head(grad)
            repeated = [d for d in range(4) if own.shape[d] == 1 and grad.shape[d] > 1]
            own.add_(grad.sum(dim=repeated, keepdim=True) if repeated else grad)

    def _kept(self, scores: Tensor, coins: Tensor | None) -> Tensor:
        """The scores times Z, in place."""
        return scores if coins is None else scores.mul_(coins).mul_(1.0 / self.kept_share)

    def taken(self, part: Tensor, buffer: Tensor) -> Tensor:
        """:meth:`converted` in another buffer."""
        return buffer[: part.numel()].view(part.shape).copy_(part) if self.copies_kv else part

    def by_row(self, stat: Tensor) -> Tensor:
        """``[u, G, tokens]`` as ``[u, rows, 1]``."""
        return stat.transpose(1, 2).reshape(stat.shape[0], -1, 1)

    def row_products(self, rows: Tensor, block: Tensor) -> Tensor:
        """rows * block, ``[u, rows, Dv]``, of a block ``[u, G, tokens, Dv]``."""
        products = self.products[: block.numel()].view(*rows.shape[:-1], block.shape[-1])
        rows_by_token(products, self.groups).copy_(block.transpose(1, 2))
        return products.mul_(rows)

    def _shift(self, at: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        log_sum, bits = at["log_sum"], None
        shift = self.by_row(at["lse"]) * (1.0 if log_sum is not None else LOG2_E)
        if log_sum is not None:
            log_sum = self.by_row(log_sum)
            shift, bits = shift.sub_(log_sum), log_sum * LOG2_E
            bits.masked_fill_(bits == -math.inf, math.inf)
        return shift.masked_fill_(~(shift > -math.inf), math.inf).neg_(), bits  # a row without keys: no probability

    def _probs(self, rows: Rows, key: Tensor, rule: Rule) -> Tensor:
        """exp(scores - lse), ``[u, rows, keys]``."""
        if self.softcap is None and rows.log_sum_bits is None:
            scores = self.product(rows.query, key, self.scale * self.unit, rows.shift).exp2_()
            self.forbid(scores, rule, 0.0)
            return scores
        if self.softcap is None:
            scores = self.product(rows.query, key, self.scale * self.unit)
        else:
            scores = self.tanh(rows.query, key)
            self.tanh_buffer[: scores.numel()].view(scores.shape).copy_(scores)
            scores.mul_(self.softcap * self.unit)
        self.change(scores, rule)
        scores.add_(rows.shift)
        if rows.log_sum_bits is None:
            scores.exp2_()
        else:
            self.exp2_(scores.mul_(LOG2_E).sub_(rows.log_sum_bits))
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

    def __init__(
        self, tile: GradientProducts, units: Units, span: tuple[int, int], names: tuple[str, ...], num_per_query: int
    ):
        u0, u1 = self.span = span
        self.tile, self.first_unit, self.query = tile, units.first + u0, units.query[u0:u1]
        given: list[tuple[str, Any]] = [(n, None if t is None else t[u0:u1]) for n, t in zip(names, units.extra)]
        self.per_query = dict(given[:num_per_query])
        self.masks = {name: self.per_query.pop(name, None) for name in ("mask_sum", "mask_dot")}
        self.per_key = {"key": units.key[u0:u1], "value": units.value[u0:u1], **dict(given[num_per_query:])}

    def run(self, rules: Rules | None) -> None:
        """Add these units to all sums."""
        # 16-bit gradients are summed in float32, for the units at hand.
        tile, call, walk = self.tile, self.tile.call, self.tile.walk
        dtype, keys, groups = tile.dtype, self.per_key, walk.groups
        narrow = {n: t for n, t in keys.items() if n.endswith("_sum") and t.dtype != dtype}
        keys |= {n: torch.zeros_like(t, dtype=dtype) for n, t in narrow.items()}
        for q0, q1 in walk.q_ranges:
            at = {n: None if t is None else t[:, :, q0:q1] for n, t in self.per_query.items()}
            query = tile.rows(self.query[:, :, q0:q1], tile.query_buffer)
            rows = tile.block(query, tile.row_codes(self.first_unit, query, call.seq_len_q, q0), at)
            for t0, t1, ranges in block_schedule(rules, self.span, q0, q1, call, walk):
                part = rows if t1 - t0 == q1 - q0 else rows.part(t0 * groups, t1 * groups)
                for j0, j1 in ranges:
                    rule = FREE if rules is None else rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                    if rule is not None:
                        tile.add(part, self._tile(q0 + t0, q0 + t1, j0, j1), rule, j0)
            tile.finish(rows, at)
        for name, total in narrow.items():
            total.copy_(keys[name])

    def _tile(self, q0: int, q1: int, j0: int, j1: int) -> dict[str, Any]:
        at: dict[str, Any] = {name: t[:, j0:j1] for name, t in self.per_key.items()}
        for name, mask in self.masks.items():
            at[name] = None if mask is None else mask[:, :, q0:q1, j0:j1]
        return at


def sinks_gradient(
    call: AttentionCall, saved: Results, wanted: Wanted, rates: Any = None, along: Tensor | None = None
) -> Tensor:
    """``[Hq]``: a sink's probability exp(sink - lse) takes from every row what :math:`delta` says, summed over rows.
    With ``rates`` (O', lse') the derivative of that along a direction, whose part for the sinks is ``along``."""
    assert call.sinks is not None and saved.lse is not None  # noqa: PT018
    given: Any = (wanted.grad_out.expand(saved.out.shape), saved.out, saved.lse, wanted.grad_lse)
    given = (*given, *(rates or (None, None)))
    if call.query.dim() == 2:  # no dimension of heads
        given = tuple(None if t is None else t[None] for t in given)
    dtype, dim, grads = saved.lse.dtype, len(call.batch), []
    for head in range(call.num_heads):
        own: list[Any] = [None if t is None else t.select(dim, head) for t in given]
        grad_out, out, lse, grad_lse, out_dot, lse_dot = own
        delta = (grad_out.to(dtype) * out).sum(dim=-1)
        delta = delta if grad_lse is None else delta - grad_lse
        if lse_dot is not None:
            rate = -lse_dot if along is None else along[head] - lse_dot
            delta = delta * rate + (grad_out.to(dtype) * out_dot).sum(dim=-1)
        grads.append(-(sink_shares(call.sinks[head], lse) * delta).sum())
    return torch.stack(grads).to(call.sinks.dtype) if grads else torch.zeros_like(call.sinks)


def sink_shares(sinks: Tensor, lse: Tensor) -> Tensor:
    """The probabilities of sinks. One at -inf has the probability 0 below every score and in a row without keys."""
    return torch.exp(sinks.detach().to(lse.dtype) - lse.masked_fill(lse == -math.inf, math.inf))


def _sum_like(tensor: Tensor, lead: tuple[int, ...], acc_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(zeros in the shape of an input, the same as ``[*lead, S, X]``): units that share an input share its sum."""
    shape = (*lead, *tensor.shape[-2:])
    repeats = math.prod(shape) != tensor.numel()
    total = torch.zeros(tensor.shape, dtype=acc_dtype if repeats else tensor.dtype, device=tensor.device)
    return total, total.expand(shape)
