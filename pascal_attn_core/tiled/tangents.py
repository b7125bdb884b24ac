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

from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Results, Wanted, empty_output
from .gradients import GradientProducts, Rows, Sums, gradients_of, sink_shares, sinks_gradient
from .masks import Rule
from .plan import Walk


@torch.no_grad()
def tiled_along(
    call: AttentionCall, walk: Walk, saved: Results, along: AttentionCall, wanted: Wanted | None, *, trim_masks: bool
) -> tuple[Tensor | None, ...]:
    """Derivatives along a direction: of the gradients ``wanted`` of the five inputs, with those of out and lse fixed,
    each None without ``wanted``; then of out and of lse.

    Args:
        walk: planned with ``backward=True``, with ``wanted`` for half of the budget: there are two buffers for each.
        saved: from any forward pass.
        along: the call with a direction in place of its tensors, each None where it is zero.
    """
    assert saved.lse is not None
    rates = out_dot, lse_dot = empty_output(call).zero_(), torch.zeros_like(saved.lse)
    if along.sinks is not None:
        heads = (-1, 1) if call.query.dim() > 2 else (-1,)
        shares = sink_shares(call.sinks.view(heads), saved.lse)  # type: ignore[union-attr]
        lse_dot.copy_(shares.mul_(along.sinks.view(heads)))
    rows, keys = call.out_shape[:-1], (*call.batch, call.num_kv_heads, call.seq_len_kv)
    places = (rows, call.head_dim, along.query), (keys, call.head_dim, along.key), (keys, call.head_dim_v, along.value)
    dots = [None if t is None else t.expand((*tokens, width)).contiguous() for tokens, width, t in places]
    mask: Any = along.attn_mask
    mask = None if mask is None else mask.expand((*rows, call.seq_len_kv))
    per_query: dict[str, Any] = {"out_dot": out_dot, "lse_dot": lse_dot, "query_dot": dots[0], "mask_dot": mask}
    per_key = {name: t for name, t in zip(("key_dot", "value_dot"), dots[1:]) if t is not None}
    given: tuple[Any, ...] = call, walk, saved.seed, []
    if not walk.is_empty:
        RateProducts(*given).visit(saved, per_query, per_key, trim_masks)
    if wanted is None:
        return *[None] * 5, *rates
    sums = Sums(call, walk.dtype, wanted.mask)
    if not walk.is_empty:
        per_query |= {**gradients_of(saved, wanted), **sums.per_query}
        SecondProducts(*given).visit(saved, per_query, {**per_key, **sums.per_key}, trim_masks)
    return *sums.result(sinks_gradient(call, saved, wanted, rates, along.sinks) if wanted.sinks else None)[:5], *rates


class RateProducts(GradientProducts):
    """lse' and O' in the buffers of the gradients."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.query_dot_buffer, self.key_dot_buffer = self.query_sum, self.kv_buffer
        self.slope: Tensor | None = None

    def block(self, query: Tensor, code: Tensor | None, at: dict[str, Any]) -> Rows:
        rows, out = self._with_dots(Rows(query, *self._shift(at), code), at), at["out_dot"]
        shape = (*query.shape[:2], out.shape[-1])
        acc = self.grad_rows[: out.numel()].view(shape) if self.copies_out else self.block_acc(out)
        return rows._replace(acc=acc.zero_())

    def _with_dots(self, rows: Rows, at: dict[str, Any]) -> Rows:
        dot = None if at["query_dot"] is None else self.rows(at["query_dot"], self.query_dot_buffer)
        return rows._replace(query_dot=dot, lse_dot=self.by_row(at["lse_dot"]).clone())

    def finish(self, rows: Rows, at: dict[str, Any]) -> None:
        rows.acc.sub_(self.row_products(rows.lse_dot, at["out"]))
        if self.copies_out:
            at["out_dot"].copy_(self.by_head(rows.acc))
        at["lse_dot"].copy_(self.by_head(rows.lse_dot)[..., 0])

    def add(self, rows: Rows, at: dict[str, Any], rule: Rule, j0: int) -> None:
        key = self.converted(at["key"])
        probs = self._probs(rows, key, rule)
        dots = self._score_dots(rows, at, key, self.grad_probs[: probs.numel()].view(probs.shape))
        coins = None if rows.code is None else self.coins(probs.shape, rows.code, j0)
        if dots is not None:
            rows.lse_dot.add_(dots.mul_(probs).sum(dim=-1, keepdim=True))
            value = self.taken(at["value"], self.value_tile)
            torch.baddbmm(rows.acc, self._kept(dots, coins), value, out=rows.acc)
        if "value_dot" in at:
            value_dot = self.taken(at["value_dot"], self.value_tile)
            torch.baddbmm(rows.acc, self._kept(probs, coins), value_dot, out=rows.acc)

    def _score_dots(self, rows: Rows, at: dict[str, Any], key: Tensor, dots: Tensor) -> Tensor | None:
        """S', from here on in ``dots``; None where it is zero. With a softcap its derivative is in ``slope`` then, if
        there is one, and the buffer of tanh holds what dS is multiplied by in dS'."""
        found = None
        if rows.query_dot is not None:
            found = self.product_into(dots, rows.query_dot, key, self.scale, None)
        if "key_dot" in at:
            key_dot = self.taken(at["key_dot"], self.key_dot_buffer)
            found = self.product_into(dots, rows.query, key_dot, self.scale, found)
        if self.softcap is not None:
            tanh = self.tanh_buffer[: dots.numel()].view(dots.shape)
            slope = tanh if self.slope is None else self.slope[: dots.numel()].view(dots.shape).copy_(tanh)
            slope.square_().neg_().add_(1.0)
            found = None if found is None else found.mul_(slope)
            if self.slope is not None:
                tanh.zero_() if found is None else tanh.mul_(found).mul_(-2.0 / self.softcap)
        if at["mask_dot"] is not None:
            found = dots.zero_() if found is None else found
            self.by_head(found).add_(at["mask_dot"])
        return found


class SecondProducts(RateProducts):
    """dQ', dK', dV' and dmask', in as many buffers again."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        buffers = (self.score_buffer, self.score_buffer, self.tanh_buffer, self.query_buffer)
        self.dots, self.grad_dots, self.slope, self.query_dot_buffer = map(torch.empty_like, buffers)
        self.key_dot_buffer, self.value_dot_buffer = map(torch.empty_like, (self.kv_buffer, self.value_tile))

    def block(self, query: Tensor, code: Tensor | None, at: dict[str, Any]) -> Rows:
        rows = self._with_dots(GradientProducts.block(self, query, code, at), at)
        return rows._replace(delta_dot=self.row_products(rows.grad_out, at["out_dot"]).sum(dim=-1, keepdim=True))

    def finish(self, rows: Rows, at: dict[str, Any]) -> None:
        GradientProducts.finish(self, rows, at)

    def add(self, rows: Rows, at: dict[str, Any], rule: Rule, j0: int) -> None:
        key, value = self.converted(at["key"]), self.taken(at["value"], self.value_tile)
        probs = self._probs(rows, key, rule)
        shape, size = probs.shape, probs.numel()
        dots, grad_probs, grad_dots = (b[:size].view(shape) for b in (self.dots, self.grad_probs, self.grad_dots))
        if self._score_dots(rows, at, key, dots) is None:
            dots.zero_()
        dots.sub_(rows.lse_dot)
        coins = None if rows.code is None else self.coins(shape, rows.code, j0)
        self._kept(torch.mul(probs, dots, out=grad_dots), coins)
        torch.baddbmm(at["value_sum"], grad_dots.transpose(1, 2), rows.grad_out, out=at["value_sum"])
        self._kept(torch.bmm(rows.grad_out, value.transpose(1, 2), out=grad_probs), coins).sub_(rows.delta)
        torch.mul(dots, grad_probs, out=grad_dots).sub_(rows.delta_dot)
        if "value_dot" in at:
            value_dot = self.taken(at["value_dot"], self.value_dot_buffer).transpose(1, 2)
            if coins is None:
                torch.baddbmm(grad_dots, rows.grad_out, value_dot, out=grad_dots)
            else:
                grad_dots.add_(self._kept(torch.bmm(rows.grad_out, value_dot, out=dots), coins))
        grad_dots.mul_(probs)
        grad_probs.mul_(probs)
        # From here on dS' and dS.
        self._add_to_mask(at["mask_sum"], grad_dots)
        if self.softcap is not None:
            bend, slope = (b[:size].view(shape) for b in (self.tanh_buffer, self.slope))  # type: ignore[index]
            grad_dots.mul_(slope).addcmul_(grad_probs, bend)
            grad_probs.mul_(slope)
        key_dot = at.get("key_dot")
        if key_dot is not None and self.copies_kv:
            key_dot = self.key_dot_buffer[: key_dot.numel()].view(key_dot.shape)  # since _score_dots
        self._add_products(grad_dots, key, rows.query, rows.query_sum, at["key_sum"])
        self._add_products(grad_probs, key_dot, rows.query_dot, rows.query_sum, at["key_sum"])
