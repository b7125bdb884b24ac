"""The exact result of a call in float64, a block of query rows at a time: no score matrix is ever stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, check_call
from ..capture import CapturedCall
from ..reference import reference_sdpa

_BLOCK_BYTES = 64 << 20


class Gradients(NamedTuple):
    """Float64 gradients in the shapes of the tensors they belong to."""

    query: Tensor
    key: Tensor
    value: Tensor


def spread_rows(seq_len_q: int, count: int | None) -> Tensor:
    """``count`` row numbers spread evenly over the query, including the first and the last; None = every row."""
    if count is None or count >= seq_len_q:
        return torch.arange(seq_len_q)
    return torch.linspace(0, seq_len_q - 1, count).round().long()


def reference_rows(captured: CapturedCall, rows: Tensor) -> Tensor:
    """The float64 output for these query rows.

    Args:
        rows: ``[R]`` numbers of query rows, ascending.
    Returns:
        ``[*batch, Hq, R, Dv]`` on the device of the reference (the CPU where a device has no float64).
    """
    call, mask = _checked(captured)
    lead = call.out_shape[:-2]
    rows = rows.to(call.query.device)
    out = torch.zeros(*lead, len(rows), call.head_dim_v, dtype=torch.float64, device=rows.device)
    for index in itertools.product(*map(range, lead)):
        query, key, value = (_head(t, index, lead).double() for t in (call.query, call.key, call.value))
        for start, block in _blocks(rows, call.seq_len_kv):
            rule = _rule(call, None if mask is None else _head(mask, index, lead), block)
            out[index][start : start + len(block)] = reference_sdpa(query[block], key, value, rule, scale=call.scale)[0]
    return out


def reference_gradients(captured: CapturedCall, rows: Tensor, grad_rows: Tensor) -> Gradients:
    """Float64 gradients for an output gradient that is zero except in these rows, where it is ``grad_rows``."""
    call, mask = _checked(captured)
    lead = call.out_shape[:-2]
    tensors = (call.query, call.key, call.value)
    grads = Gradients(*(torch.zeros_like(t, dtype=torch.float64) for t in tensors))
    rows, grad_rows = rows.to(call.query.device), grad_rows.to(call.query.device, torch.float64)
    for index in itertools.product(*map(range, lead)):
        query, key, value = (_head(t, index, lead).double() for t in tensors)
        grad_query, grad_key, grad_value = (_head(grad, index, lead) for grad in grads)
        for start, block in _blocks(rows, call.seq_len_kv):
            rule = _rule(call, None if mask is None else _head(mask, index, lead), block)
            q, k, v = (t.detach().clone().requires_grad_() for t in (query[block], key, value))
            with torch.enable_grad():
                out = reference_sdpa(q, k, v, rule, scale=call.scale)[0]
            found = torch.autograd.grad(out, (q, k, v), grad_rows[index][start : start + len(block)])
            grad_query.index_add_(0, block, found[0])
            grad_key += found[1]
            grad_value += found[2]
    return grads


def _checked(captured: CapturedCall) -> tuple[AttentionCall, Tensor | None]:
    """The call where float64 exists, and its mask with the last two dimensions of full size (a view)."""
    device = "cpu" if captured.query.device.type == "mps" else captured.query.device  # MPS has no float64
    query, key, value = (t.detach().to(device) for t in (captured.query, captured.key, captured.value))
    call = check_call(
        query,
        key,
        value,
        is_causal=captured.is_causal,
        scale=captured.scale,
        enable_gqa=captured.enable_gqa,
    )
    if captured.attn_mask is None:
        return call, None
    mask = captured.attn_mask.detach().to(device)
    return call, mask.expand(*mask.shape[:-2], call.seq_len_q, call.seq_len_kv)


def _head(tensor: Tensor, index: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """``[tokens, dim]`` of one head as a view: a size of 1 broadcasts, key/value heads serve their group."""
    sizes = tensor.shape[:-2]
    skipped = len(lead) - len(sizes)
    return tensor[tuple(i * size // full for i, size, full in zip(index[skipped:], sizes, lead[skipped:]))]


def _rule(call: AttentionCall, mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """Mask and causal rule of some rows as one mask."""
    mask = None if mask is None else mask[rows]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    if not call.is_causal:
        return mask
    allowed = torch.arange(call.seq_len_kv, device=rows.device)[None, :] <= rows[:, None]
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)


def _blocks(rows: Tensor, seq_len_kv: int) -> Iterator[tuple[int, Tensor]]:
    size = max(1, _BLOCK_BYTES // (8 * max(1, seq_len_kv)))
    for start in range(0, len(rows), size):
        yield start, rows[start : start + size]
