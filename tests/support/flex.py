"""FlexAttention by its definition: functions of single elements, applied to all."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def applied(mod: Callable, *scores: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return what a score_mod or mask_mod says of every element."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mod = torch.vmap(mod, in_dims=(*(0 for _ in scores), *dims))
    return mod(*scores, *(torch.arange(n) for n in lengths))


def scores_of(
    q: Tensor, k: Tensor, score_mod: Callable | None, mask_mod: Callable | None, scale: float | None = None
) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
    if score_mod is not None:
        scores = applied(score_mod, scores, lengths=scores.shape).to(scores.dtype)
    if mask_mod is not None:
        scores = scores.masked_fill(~applied(mask_mod, lengths=scores.shape), -math.inf)
    return scores


def definition(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable | None, mask_mod: Callable | None, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, which rows see a key)."""
    scores = scores_of(q, k, score_mod, mask_mod, scale)
    rows = (scores > -math.inf).any(-1)
    safe = scores.masked_fill(~rows[..., None], 0.0)
    probs = safe.softmax(-1).masked_fill(~rows[..., None], 0.0)
    return probs @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), safe.logsumexp(-1), rows
