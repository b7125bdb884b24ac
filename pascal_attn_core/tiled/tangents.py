"""Derivatives of tiled attention, and of its gradients, along one direction, in O(N) memory.

A dot marks the derivative along the direction (Q', K', V', mask', sinks'); P, Z, dO, dP, delta and dS are those of
:mod:`.gradients`. With the lse of the forward pass no running sums have to be rescaled:

    S'  = (Q' K^T + Q K'^T) * scale + mask'        lse' = rowsum(P * S')
    O'  = (P * S' * Z) V + (P * Z) V' - lse' * O

and of the gradients, for a fixed gradient dO of the output:

    P'  = P * (S' - lse')                          dV' = (P' * Z)^T dO
    dP' = (dO V'^T) * Z                            delta' = rowsum(dO * O')
    dS' = P * ((S' - lse') * (dP - delta) + dP' - delta')
    dQ' = (dS' K + dS K') * scale                  dK' = (dS'^T Q + dS^T Q') * scale,  dmask' = dS'

A softcap stands between S and the products: S' and dS are then multiplied by its derivative, and dS' has a further term
by its second. Both passes are symmetric in what they are for: the gradient of <dO, O'> is dQ', dK', dV'.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, Wanted, distinct, empty_output, may_read
from .forward import units_of
from .gradients import GradientProducts, Sums, shift_of
from .layout import Units, is_matrix, unit_spans, unit_views
from .mask_writer import rows_by_token
from .masks import FREE, Rule, Rules, block_schedule
from .plan import Walk


class Tangents(NamedTuple):
    """A direction, in the shapes of a call's inputs; None where it is zero."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None


class Rates(NamedTuple):
    """The derivatives of out and lse along a direction."""

    out: Tensor
    lse: Tensor


@torch.no_grad()
def tiled_tangent(
    call: AttentionCall, walk: Walk, saved: Results, along: Tangents, *, trim_masks: bool = True
) -> Rates:
    """Derivatives of out and lse. ``walk``: planned with ``backward=True``, ``saved``: from any forward pass."""
    assert saved.lse is not None
    rates = Rates(empty_output(call).zero_(), torch.zeros_like(saved.lse))
    if along.sinks is not None:
        rates.lse.copy_(_sink_shares(call, saved.lse) * _by_head(along.sinks, rates.lse))
    if not walk.is_empty:
        tile = TangentProducts(call, walk, saved.seed, None)
        _visit(call, walk, tile, along, trim_masks, out=saved.out, lse=saved.lse, log_sum=saved.log_sum, rates=rates)
    return rates


@torch.no_grad()
def tiled_second(
    call: AttentionCall,
    walk: Walk,
    saved: Results,
    along: Tangents,
    rates: Rates,
    wanted: Wanted,
    *,
    trim_masks: bool = True,
) -> Gradients:
    """Derivatives of the gradients ``wanted``, with the gradients of out and lse fixed; equally the gradients of
    <grad_out, out'> + <grad_lse, lse'>.

    Args:
        walk: planned with ``backward=True`` for half of the budget: there are two buffers for each of those there.
        rates: what :func:`tiled_tangent` returned.
    """
    sums = Sums(call, walk.dtype, wanted.mask)
    if not walk.is_empty:
        tile = TangentProducts(call, walk, saved.seed, sums)
        grad_out = wanted.grad_out.expand(saved.out.shape)
        given = {"out": saved.out, "lse": saved.lse, "log_sum": saved.log_sum, "grad_lse": wanted.grad_lse}
        _visit(call, walk, tile, along, trim_masks, **given, grad_out=grad_out, rates=rates, sums=sums)
    return sums.result(_sinks_second(call, saved, along, rates, wanted) if wanted.sinks else None)


def _visit(
    call: AttentionCall,
    walk: Walk,
    tile: TangentProducts,
    along: Tangents,
    trim_masks: bool,
    *,
    rates: Rates,
    sums: Sums | None = None,
    **given: Tensor | None,
) -> None:
    key_lead, mask = (*call.batch, call.num_kv_heads), along.mask
    per_query: dict[str, Any] = {
        "query_dot": _products_take(along.query, (*call.out_shape[:-1], call.head_dim)),
        **given,
    }
    per_query |= {"out_dot": rates.out, "lse_dot": rates.lse}
    per_query["mask_dot"] = None if mask is None else mask.expand((*call.out_shape[:-1], call.seq_len_kv))
    per_key: dict[str, Any] = {
        "key_dot": _products_take(along.key, (*key_lead, call.seq_len_kv, call.head_dim)),
        "value_dot": _products_take(along.value, (*key_lead, call.seq_len_kv, call.head_dim_v)),
    }
    if sums is not None:
        per_query |= {"query_sum": sums.query, "mask_sum": sums.mask_view}
        per_key |= {"key_sum": sums.key_view, "value_sum": sums.value_view}
    per_key = {name: t for name, t in per_key.items() if t is not None}
    views = unit_views(call, list(per_query.values()), list(per_key.values()))
    look = may_read(call) and trim_masks and walk.tiles.scans_mask
    spans = unit_spans(views.size, call, 1 if sums is not None and sums.units_share else walk.tiles.units)
    for units in units_of(call, views, list(per_query.values()), list(per_key.values())):
        rules = Rules.of(call, units, look=look) if walk.is_masked else None
        for span in spans:
            _UnitRange(units, span, (*per_query, *per_key), tile, call, walk).run(rules)


def _products_take(tangent: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A tangent as the products read it: rows contiguous, leading dimensions expanded."""
    if tangent is None:
        return None
    return (tangent if is_matrix(tangent) else tangent.contiguous()).expand(shape)


class _Rows(NamedTuple):
    """Rows of one query block, views ``[u, rows, ...]``. ``acc``: O' while it is summed; what follows is for the second
    derivatives only."""

    query: Tensor
    query_dot: Tensor | None
    shift: Tensor
    log_sum_bits: Tensor | None
    code: Tensor | None
    lse_dot: Tensor
    acc: Any = None
    grad_out: Any = None
    delta: Any = None
    delta_dot: Any = None
    query_sum: Any = None

    def part(self, first: int, last: int) -> _Rows:
        return _Rows(*(None if t is None else t[:, first:last] for t in self))  # type: ignore[arg-type]


class TangentProducts(GradientProducts):
    """The buffers of one pass, those of the gradients and, for second derivatives (``sums``), as many again."""

    def __init__(self, call: AttentionCall, walk: Walk, seed: Tensor | None, sums: Sums | None):
        super().__init__(call, walk, seed, [])
        self.is_second = sums is not None
        self.query_dot_buffer, self.key_dot_buffer, self.value_dot_buffer = (
            self.query_sum, self.kv_buffer, self.value_tile
        )  # fmt: skip
        if self.is_second:
            buffers = (self.score_buffer, self.score_buffer, self.tanh_buffer, self.query_buffer)
            self.dots, self.grad_dots, self.slope, self.query_dot_buffer = map(torch.empty_like, buffers)
            self.key_dot_buffer, self.value_dot_buffer = map(torch.empty_like, (self.kv_buffer, self.value_tile))

    def taken(self, part: Tensor, buffer: Tensor) -> Tensor:
        return buffer[: part.numel()].view(part.shape).copy_(part) if self.copies_kv else part

    def _kept(self, scores: Tensor, coins: Tensor | None) -> Tensor:
        """The scores times Z, in place."""
        return scores if coins is None else scores.mul_(coins).mul_(1.0 / self.kept_share)

    def _score_dots(self, rows: _Rows, at: dict[str, Any], key: Tensor, probs: Tensor, dots: Tensor) -> Tensor | None:
        """S', from here on in ``dots``; None where it is zero. With a softcap the buffer of tanh then holds for second
        derivatives what dS is multiplied by in dS', and ``slope`` the first derivative."""
        pairs, found = [(rows.query_dot, key), (rows.query, at.get("key_dot"))], None
        for left, right in pairs:
            if left is not None and right is not None:
                right = right if right is key else self.taken(right, self.key_dot_buffer)
                sum_ = self.zero if found is None else dots
                beta = 0 if found is None else 1
                found = torch.baddbmm(sum_, left, right.transpose(1, 2), beta=beta, alpha=self.scale, out=dots)
        if self.softcap is not None:
            tanh = self.tanh_buffer[: probs.numel()].view(probs.shape)
            slope = self.slope[: probs.numel()].view(probs.shape).copy_(tanh) if self.is_second else tanh
            slope.square_().neg_().add_(1.0)
            if found is not None:
                found.mul_(slope)
            if self.is_second:
                tanh.zero_() if found is None else tanh.mul_(found).mul_(-2.0 / self.softcap)
        if at["mask_dot"] is not None:
            found = dots.zero_() if found is None else found
            self.by_head(found).add_(at["mask_dot"])
        return found

    def add_rates(self, rows: _Rows, at: dict[str, Any], rule: Rule, j0: int) -> None:
        """Add one tile to lse' and O'."""
        key = self.converted(at["key"])
        probs = self._probs(rows, key, rule)  # type: ignore[arg-type]
        dots = self._score_dots(rows, at, key, probs, self.grad_probs[: probs.numel()].view(probs.shape))
        coins = None if rows.code is None else self.coins(probs.shape, rows.code, j0)
        if dots is not None:
            rows.lse_dot.add_(dots.mul_(probs).sum(dim=-1, keepdim=True))
            value = self.taken(at["value"], self.value_tile)
            torch.baddbmm(rows.acc, self._kept(dots, coins), value, out=rows.acc)
        if "value_dot" in at:
            value_dot = self.taken(at["value_dot"], self.value_tile)
            torch.baddbmm(rows.acc, self._kept(probs, coins), value_dot, out=rows.acc)

    def add_second(self, rows: _Rows, at: dict[str, Any], rule: Rule, j0: int) -> None:
        """Add one tile to dQ', dK', dV' and dmask'."""
        key, value = self.converted(at["key"]), self.taken(at["value"], self.value_tile)
        probs = self._probs(rows, key, rule)  # type: ignore[arg-type]
        dots, grad_probs, grad_dots = (
            b[: probs.numel()].view(probs.shape) for b in (self.dots, self.grad_probs, self.grad_dots)
        )
        if self._score_dots(rows, at, key, probs, dots) is None:
            dots.zero_()
        dots.sub_(rows.lse_dot)
        coins = None if rows.code is None else self.coins(probs.shape, rows.code, j0)
        self._kept(torch.mul(probs, dots, out=grad_dots), coins)
        torch.baddbmm(at["value_sum"], grad_dots.transpose(1, 2), rows.grad_out, out=at["value_sum"])
        self._kept(torch.bmm(rows.grad_out, value.transpose(1, 2), out=grad_probs), coins).sub_(rows.delta)
        torch.mul(dots, grad_probs, out=grad_dots).sub_(rows.delta_dot)
        if "value_dot" in at:
            value_dot = self.taken(at["value_dot"], self.value_dot_buffer)
            grad_dots.add_(self._kept(torch.bmm(rows.grad_out, value_dot.transpose(1, 2), out=dots), coins))
        grad_dots.mul_(probs)
        grad_probs.mul_(probs)
        # From here on dS' and dS.
        if at["mask_sum"] is not None:
            own, grad = distinct(at["mask_sum"]), self.by_head(grad_dots)
            repeated = [d for d in range(4) if own.shape[d] == 1 and grad.shape[d] > 1]
            own.add_(grad.sum(dim=repeated, keepdim=True) if repeated else grad)
        if self.softcap is not None:
            bend, slope = (b[: probs.numel()].view(probs.shape) for b in (self.tanh_buffer, self.slope))
            grad_dots.mul_(slope).addcmul_(grad_probs, bend)
            grad_probs.mul_(slope)
        key_dot = at.get("key_dot")
        if key_dot is not None and self.copies_kv:
            key_dot = self.key_dot_buffer[: key_dot.numel()].view(key_dot.shape)  # since _score_dots
        query_sum, key_sum = rows.query_sum, at["key_sum"]
        for grad, right, left in ((grad_dots, key, rows.query), (grad_probs, key_dot, rows.query_dot)):
            if right is not None:
                torch.baddbmm(query_sum, grad, right, alpha=self.scale, out=query_sum)
            if left is not None:
                torch.baddbmm(key_sum, grad.transpose(1, 2), left, alpha=self.scale, out=key_sum)


class _UnitRange:
    """Some units that share every step: all of their query blocks against all of their keys."""

    def __init__(
        self, units: Units, span: tuple[int, int], names: Any, tile: TangentProducts, call: AttentionCall, walk: Walk
    ):
        u0, u1 = span
        self.span, self.first_unit = span, units.first + u0
        self.tile, self.call, self.walk = tile, call, walk
        self.query = units.query[u0:u1]
        self.given: dict[str, Any] = {n: None if t is None else t[u0:u1] for n, t in zip(names, units.extra)}
        self.per_key: dict[str, Any] = {"key": units.key[u0:u1], "value": units.value[u0:u1]}
        self.per_key |= {name: self.given[name] for name in _PER_KEY if name in self.given}

    def run(self, rules: Rules | None) -> None:
        # 16-bit gradients are summed in float32, for the units at hand.
        dtype, per_key = self.tile.dtype, self.per_key
        narrow = {n: t for n, t in per_key.items() if n in ("key_sum", "value_sum") and t.dtype != dtype}
        per_key |= {n: torch.zeros_like(t, dtype=dtype) for n, t in narrow.items()}
        add = self.tile.add_second if self.tile.is_second else self.tile.add_rates
        groups, masks = self.walk.groups, {name: self.given.get(name) for name in ("mask_dot", "mask_sum")}
        for q0, q1 in self.walk.q_ranges:
            rows = self._rows(q0, q1)
            for t0, t1, ranges in block_schedule(rules, self.span, q0, q1, self.call, self.walk):
                part = rows if t1 - t0 == q1 - q0 else rows.part(t0 * groups, t1 * groups)
                for j0, j1 in ranges:
                    rule = FREE if rules is None else rules.rule(*self.span, q0 + t0, q0 + t1, j0, j1)
                    if rule is None:
                        continue
                    at: dict[str, Any] = {name: t[:, j0:j1] for name, t in per_key.items()}
                    for name, mask in masks.items():
                        at[name] = None if mask is None else mask[:, :, q0 + t0 : q0 + t1, j0:j1]
                    add(part, at, rule, j0)
            self._finish(rows, q0, q1)
        for name, total in narrow.items():
            total.copy_(per_key[name])

    def _rows(self, q0: int, q1: int) -> _Rows:
        tile = self.tile
        given: dict[str, Any] = {
            n: None if t is None else t[:, :, q0:q1] for n, t in self.given.items() if n not in _PER_KEY
        }
        query = tile.rows(self.query[:, :, q0:q1], tile.query_buffer)
        dot = given["query_dot"]
        query_dot = None if dot is None else tile.rows(dot, tile.query_dot_buffer)
        stat = (*query.shape[:2], 1)
        shift, log_sum_bits = shift_of(given["lse"], given["log_sum"], stat)
        code = tile.row_codes(self.first_unit, query, self.call.seq_len_q, q0)
        lse_dot = given["lse_dot"].transpose(1, 2).reshape(stat).clone()
        rows = _Rows(query, query_dot, shift, log_sum_bits, code, lse_dot)
        if not tile.is_second:
            acc, out = tile.grad_rows, given["out_dot"]
            acc = acc[: out.numel()].view(*query.shape[:2], -1) if tile.copies_out else tile.block_acc(out)
            return rows._replace(acc=acc.zero_())
        grad_out = tile.rows(given["grad_out"], tile.grad_rows)
        delta, delta_dot = (self._products(grad_out, given[n]).sum(dim=-1, keepdim=True) for n in ("out", "out_dot"))
        if given["grad_lse"] is not None:
            delta.sub_(given["grad_lse"].transpose(1, 2).reshape(stat))
        query_sum = tile.query_sum[: query.numel()].view(query.shape).zero_()
        return rows._replace(grad_out=grad_out, delta=delta, delta_dot=delta_dot, query_sum=query_sum)

    def _products(self, rows: Tensor, block: Tensor) -> Tensor:
        """rows * block, ``[u, rows, Dv]``, of a block ``[u, G, tokens, Dv]``."""
        products, groups = self.tile.products[: block.numel()].view(*rows.shape[:2], -1), self.walk.groups
        rows_by_token(products, groups).copy_(block.transpose(1, 2))
        return products.mul_(rows)

    def _finish(self, rows: _Rows, q0: int, q1: int) -> None:
        tile = self.tile
        if tile.is_second:
            self.given["query_sum"][:, :, q0:q1].copy_(tile.by_head(rows.query_sum))
            return
        rows.acc.sub_(self._products(rows.lse_dot, self.given["out"][:, :, q0:q1]))
        if tile.copies_out:
            self.given["out_dot"][:, :, q0:q1].copy_(tile.by_head(rows.acc))
        self.given["lse_dot"][:, :, q0:q1].copy_(tile.by_head(rows.lse_dot)[..., 0])


_PER_KEY = ("key_dot", "value_dot", "key_sum", "value_sum")


def _by_head(sinks: Tensor, rows: Tensor) -> Tensor:
    return sinks.to(rows.dtype)[:, None] if rows.dim() > 1 else sinks.to(rows.dtype)


def _sink_shares(call: AttentionCall, lse: Tensor) -> Tensor:
    """The probability of each row's sink, ``[*batch, Hq, L]``."""
    assert call.sinks is not None
    return (_by_head(call.sinks.detach(), lse) - lse.masked_fill(lse == -math.inf, math.inf)).exp_()


def _sinks_second(call: AttentionCall, saved: Results, along: Tangents, rates: Rates, wanted: Wanted) -> Tensor:
    """``[Hq]``: the derivative of :func:`.gradients.sinks_gradient`."""
    assert call.sinks is not None
    assert saved.lse is not None
    grad_out, dtype = wanted.grad_out.expand(saved.out.shape), saved.lse.dtype
    delta, delta_dot = ((grad_out.to(dtype) * t).sum(dim=-1) for t in (saved.out, rates.out))
    delta = delta if wanted.grad_lse is None else delta - wanted.grad_lse
    dot = -rates.lse if along.sinks is None else _by_head(along.sinks, rates.lse) - rates.lse
    found = _sink_shares(call, saved.lse) * (dot * delta + delta_dot)
    return -found.reshape(-1, call.num_heads, call.seq_len_q).sum(dim=(0, 2)).to(call.sinks.dtype)
