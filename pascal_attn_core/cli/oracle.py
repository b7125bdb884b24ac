"""The exact result of a call in float64, a block of query rows of a head at a time: no score matrix is ever stored."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ..call import Arguments, check_call
from ..reference import reference_sdpa
from ..reference.checks import WITHOUT_FLOAT64

_BLOCK_BYTES = 64 << 20


def spread_rows(seq_len_q: int, count: int) -> Tensor:
    """``count`` row numbers spread evenly over the query, including the first and the last."""
    return torch.linspace(0, seq_len_q - 1, min(count, seq_len_q), dtype=torch.float64).round().long()


def reference(given: Arguments, rows: Tensor, grad_rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output ``([*batch, Hq, R, Dv],)`` for ``[R]`` query rows, by ascending numbers, or the gradients of query,
    key and value where only these rows of the output have one, ``grad_rows``: in float64 on the device of the call (the
    CPU where a device may have no float64)."""
    device = torch.device("cpu") if given.query.device.type in WITHOUT_FLOAT64 else given.query.device
    query, key, value = (t.detach().to(device) for t in (given.query, given.key, given.value))
    options = {name: getattr(given, name) for name in ("is_causal", "scale", "enable_gqa")}
    call = check_call(query, key, value, **options)
    mask = given.attn_mask
    if mask is not None:
        mask = mask.detach().to(device).expand(*mask.shape[:-2], call.seq_len_q, call.seq_len_kv)
    lead, rows = call.out_shape[:-2], rows.to(device)
    size = max(1, _BLOCK_BYTES // (8 * max(1, call.seq_len_kv)))
    wants_grad = grad_rows is not None
    results = [torch.zeros(*lead, len(rows), call.head_dim_v, dtype=torch.float64, device=device)]
    if grad_rows is not None:
        results = [torch.zeros_like(t, dtype=torch.float64) for t in (query, key, value)]
        grad_rows = grad_rows.to(device, torch.float64)
    for index in itertools.product(*map(range, lead)):
        q, k, v = (_head(t, index, lead).double().detach().requires_grad_(wants_grad) for t in (query, key, value))
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            masked = None if mask is None else _head(mask, index, lead)[block]
            rule = _rule(masked, block, call.seq_len_kv, is_causal=call.is_causal)
            with torch.set_grad_enabled(wants_grad):
                out = reference_sdpa(q[block], k, v, rule, scale=call.scale)[0]
            if grad_rows is None:
                results[0][index][start : start + size] = out
            else:
                out.backward(grad_rows[index][start : start + size])
        for sums, leaf in zip(results, (q, k, v)):
            if leaf.grad is not None:
                _head(sums, index, lead).add_(leaf.grad)
    return tuple(results)


def _head(tensor: Tensor, index: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """``[tokens, dim]`` of one head as a view: a size of 1 broadcasts, key/value heads serve their group."""
    sizes = tensor.shape[:-2]
    skipped = len(lead) - len(sizes)
    return tensor[tuple(i * size // full for i, size, full in zip(index[skipped:], sizes, lead[skipped:]))]


def _rule(mask: Tensor | None, rows: Tensor, seq_len_kv: int, *, is_causal: bool) -> Tensor | None:
    """Mask and causal rule of some rows as one mask."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    if not is_causal:
        return mask
    allowed = torch.arange(seq_len_kv, device=rows.device) <= rows[:, None]
    return allowed if mask is None else mask.masked_fill(~allowed, False if mask.dtype == torch.bool else -math.inf)
