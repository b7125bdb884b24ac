"""Attention and its gradients written out in float64, each number with how far from it an answer may lie.

The bounds follow from the call (running error analysis): a product over D numbers is summed with an error of some units
in the last place of sum |a||b|, a score's error becomes a relative error of its probability, and so on.

Shapes: ``*B`` leading dimensions, H query heads, L query tokens, S key tokens, D head_dim, V head_dim of value. Every
argument is float64 and expanded to ``[*B, H, ...]``.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_STEEP = 600.0  # e^600 is finite in float64, and far beyond any probability


class Precision(NamedTuple):
    """This class says in which numbers the answer was worked out."""

    sums: torch.dtype
    outputs: torch.dtype
    products: torch.dtype  # of probabilities and their gradients, before they are multiplied
    whole_lse: float = 0.0  # up to here lse is one number beside a float mask, as torch's kernels keep it

    @property
    def unit(self) -> float:
        return torch.finfo(self.sums).eps

    def of_sum(self, terms: int) -> float:
        """Relative to the sum of absolute values, whatever the order."""
        return self.unit * (4 + terms / 2)

    def stored(self, value: Tensor) -> Tensor:
        """The rounding of a result."""
        return value.abs() * torch.finfo(self.outputs).eps + smallest(self.outputs)


def smallest(dtype: torch.dtype) -> float:
    """Below this a number may be lost. Processors may flush what is below the smallest normal one, but not float16."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


class Bounded(NamedTuple):
    """A float64 value and how far from it an answer may lie."""

    value: Tensor
    error: Tensor


@dataclass
class Forward:
    """out ``[*B, H, L, V]``, lse ``[*B, H, L]``, and what the gradients need."""

    out: Bounded
    lse: Bounded
    probs: Tensor
    log_error: Tensor
    slope: Bounded  # of the softcap
    sink_probs: Bounded | None


def _scores(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    precision: Precision,
    rounded: bool,
) -> tuple[Tensor, Tensor, Bounded]:
    """cap(query @ key^T * scale) + bias, how far from it a score may lie, and the slope of the cap."""
    unit = precision.unit
    scores = query @ key.mT * scale
    error = (query.abs() @ key.abs().mT) * (abs(scale) * precision.of_sum(query.shape[-1]))
    slope = Bounded(torch.ones_like(scores), torch.zeros_like(scores))
    if softcap is not None:
        tanh, up, down = (torch.tanh((scores + by) / softcap) for by in (0.0, error, -error))
        wander = torch.maximum(up - tanh, tanh - down) + 4 * unit * tanh.abs()
        slope = Bounded(1 - tanh.square(), 2 * tanh.abs() * wander + wander.square() + 4 * unit)
        scores, error = tanh * softcap, wander * softcap + 4 * unit * (tanh * softcap).abs()
    if bias is None:
        return scores, error, slope

    def biased(shift: Tensor | float) -> Tensor:
        total = scores + shift + bias
        return total.to(precision.sums).double() if rounded else total

    total, error = biased(0.0), error + 4 * unit * scores.abs()
    if precision.sums == torch.float64:  # which has no wider type to be exact in
        error = error + torch.minimum(unit * bias.abs(), 2 * scores.abs())
    error = torch.maximum((biased(error) - total).abs(), (biased(-error) - total).abs()) + unit * scores.abs()
    return total, error, slope


def _log_error(score: Tensor, error: Tensor, largest: Tensor, unit: float) -> Tensor:
    below = (score - largest).masked_fill(score == -math.inf, 0.0)
    return (error + 4 * unit * (1 + below.abs())).clamp(max=_STEEP).masked_fill(score == -math.inf, 0.0)


def _total(weights: Tensor, log_error: Tensor, sink: Bounded | None, empty: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each row's weights, and how far its logarithm may lie from it."""
    total = weights.sum(dim=-1, keepdim=True)
    down, up = (torch.sum(weights * torch.exp(sign * log_error), dim=-1, keepdim=True) for sign in (-1, 1))
    if sink is not None:
        total = total + sink.value
        down, up = down + sink.value * torch.exp(-sink.error), up + sink.value * torch.exp(sink.error)
    total = total.masked_fill(empty, 1.0)
    return total, torch.maximum(-(down / total).log(), (up / total).log()).masked_fill(empty, 0.0)


def _lse(largest: Tensor, total: Tensor, apart: Tensor, empty: Tensor, unit: float) -> Bounded:
    lse = (largest + total.log()).masked_fill(empty, -math.inf)[..., 0]
    error = apart + 4 * unit * (1 + largest.abs() + total.log().abs())
    return Bounded(lse, error[..., 0].masked_fill(empty[..., 0], 0.0))


def _sink_probs(sink: Bounded, total: Tensor, apart: Tensor, lse: Tensor, empty: Tensor, unit: float) -> Bounded:
    prob = (sink.value / total).masked_fill(empty, 0.0)
    relative = sink.error + apart + 4 * unit * (1 + lse.nan_to_num(neginf=0.0)[..., None].abs())
    return Bounded(prob, prob * torch.expm1(relative.clamp(max=_STEEP)))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    precision: Precision,
    *,
    rounded: bool = True,
) -> Forward:
    """softmax(cap(query @ key^T * scale) + bias, over the allowed keys and the sink) @ value.

    Args:
        allowed: bool ``[*B, H, L, S]``; bias: the same shape, finite where allowed; sinks: ``[H]``.
        rounded: a score and its bias are one number, as plain attention adds them: beside -1e9 a multiple of 64, beside
            finfo.min nothing of the score is left. Otherwise what all keys of a row share has been taken out before.
    """
    unit = precision.unit
    scores, error, slope = _scores(query, key, bias, scale, softcap, precision, rounded)
    scores = scores.masked_fill(~allowed, -math.inf)
    largest = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(dim=-1, keepdim=True)
    if sinks is not None:
        sink = sinks.view(-1, 1, 1).expand(largest.shape)
        largest = torch.maximum(largest, sink)
    empty = largest == -math.inf
    largest = largest.masked_fill(empty, 0.0)

    weights, log_error = torch.exp(scores - largest), _log_error(scores, error, largest, unit)
    sink_weight = None
    if sinks is not None:
        sink_error = _log_error(sink, 4 * unit * sink.abs().nan_to_num(posinf=0.0), largest, unit)
        sink_weight = Bounded(torch.exp(sink - largest), sink_error)
    total, apart = _total(weights, log_error, sink_weight, empty)
    probs = weights / total
    # A probability errs by its own score and by the sum, but does not pass one.
    log_error = (log_error + apart + precision.of_sum(scores.shape[-1])).clamp(max=_STEEP)
    prob_error = torch.minimum(probs * torch.expm1(log_error), torch.maximum(1 - probs, probs))
    prob_error = _as_factor(prob_error, probs, precision)
    out = probs @ value
    out_error = prob_error @ value.abs() + precision.of_sum(scores.shape[-1]) * (probs @ value.abs())
    lse = _lse(largest, total, apart + precision.of_sum(scores.shape[-1]), empty, unit)
    sink_probs = None if sink_weight is None else _sink_probs(sink_weight, total, apart, lse.value, empty, unit)
    stored = Bounded(out, out_error + precision.stored(out))
    return Forward(stored, lse, probs, log_error, slope, sink_probs)


@dataclass
class Gradients:
    """This class holds gradients of query, key, value, bias and sinks."""

    query: Bounded
    key: Bounded
    value: Bounded
    bias: Bounded
    sinks: Bounded | None


def gradients(
    forward: Forward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    grad_out: Tensor,
    grad_lse: Tensor,
    has_bias: bool,
    precision: Precision,
    *,
    other: Forward | None = None,
) -> Gradients:
    """Return the gradients of sum(out * grad_out) + sum(lse * grad_lse).

    Args:
        other: the forward pass with ``rounded`` the other way. Each row, and each of the two passes, may go either way.
    """
    unit, probs, (out, out_error) = precision.unit, forward.probs, forward.out
    either = torch.zeros_like(probs) if other is None else (probs - other.probs).abs()
    out_error = out_error + either @ value.abs()
    prob_error = _as_factor(_error_made_again(forward, has_bias, precision), probs, precision) + either
    grad_probs = grad_out @ value.mT
    sizes = grad_out.abs() @ value.abs().mT
    delta = (grad_out * out).sum(-1, keepdim=True) - grad_lse[..., None]
    delta_error = (grad_out.abs() * (out_error + precision.of_sum(value.shape[-1]) * out.abs())).sum(-1, keepdim=True)
    delta_error = delta_error + 4 * unit * grad_lse[..., None].abs()
    difference = grad_probs - delta
    difference_error = precision.of_sum(value.shape[-1]) * sizes + delta_error + 4 * unit * (sizes + delta.abs())
    scores = probs * difference
    error = prob_error * difference.abs() + (probs + prob_error) * difference_error
    error = _as_factor(error, scores, precision)
    bias = Bounded(scores, error)
    slope, slope_error = forward.slope
    error = error * (slope.abs() + slope_error) + scores.abs() * slope_error
    scores = scores * slope
    factor, of_keys, of_rows = abs(scale), precision.of_sum(key.shape[-2]), precision.of_sum(query.shape[-2])
    sinks = _of_sinks(forward, other, Bounded(delta, delta_error), of_rows)
    return Gradients(
        Bounded(scores @ key * scale, factor * (error + of_keys * scores.abs()) @ key.abs()),
        Bounded(scores.mT @ query * scale, factor * (error + of_rows * scores.abs()).mT @ query.abs()),
        Bounded(probs.mT @ grad_out, (prob_error + of_rows * probs).mT @ grad_out.abs()),
        bias,
        sinks,
    )


def _error_made_again(forward: Forward, has_bias: bool, precision: Precision) -> Tensor:
    """Return the error of probabilities that are made again from lse, whose own last place counts."""
    lse_size = forward.lse.value.nan_to_num(neginf=0.0)[..., None].abs()
    if has_bias:
        lse_size = lse_size.clamp(max=precision.whole_lse)
    log_error = (forward.log_error + 4 * precision.unit * (1 + lse_size)).clamp(max=_STEEP)
    return forward.probs * torch.expm1(log_error)


def _of_sinks(forward: Forward, other: Forward | None, delta: Bounded, of_rows: float) -> Bounded | None:
    if forward.sink_probs is None:
        return None
    sink, error = forward.sink_probs
    if other is not None and other.sink_probs is not None:
        error = error + (sink - other.sink_probs.value).abs()
    lead = tuple(range(sink.dim() - 3))
    total = -(sink * delta.value).sum((*lead, -2, -1))
    size = error * delta.value.abs() + (sink + error) * delta.error + of_rows * sink * delta.value.abs()
    return Bounded(total, size.sum((*lead, -2, -1)))


def _as_factor(error: Tensor, value: Tensor, precision: Precision) -> Tensor:
    """The error of a number that may be lost below the smallest one, or rounded to the dtype of a product's factors."""
    error = error + smallest(precision.products)
    return error if precision.products == precision.sums else error + torch.finfo(precision.products).eps * value.abs()
