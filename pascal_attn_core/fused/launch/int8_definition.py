"""The definition of attention in 8-bit integers in PyTorch operators. It computes with the integers of the kernels,
and on a CPU rounds float32 as they do, in the same order. So every word, scale and output has the same bits with the
``exp2`` and ``log2`` of the emulator; those of a card differ in their last bits. ``fused/cuda/int8_pack.cuh`` says how
and why."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall
from ..geometry.amd import AmdGeometry
from ..geometry.plain import Geometry
from .fields import LOG2_E, View, band_of, view_of
from .gguf_definition import fma
from .plan import variant_of

MAGIC, LOWEST, LEAST_SCALE, SLACK, LARGEST, HANDED_ON = 12582912.0, -1e30, 1e-30, 8.0, 255.0, 0.5
exp2: Callable[[Tensor], Tensor] = torch.exp2
log2: Callable[[Tensor], Tensor] = torch.log2


class Words(NamedTuple):
    """Q, K and V as whole numbers in float32, and their scales, with the keys filled up to whole tiles.

    Attributes:
        q: ``[B, Hq, L, T]``, T the head_dim of the table; q_scales: ``[B, Hq, L]``, with softmax scale and log2(e).
        k, v: ``[B, Hkv, N, T]``; k_scales, v_inverses (1 / scale), v_logs (log2 of the scale): ``[B, Hkv, N]``. The
            lowest bit of v_inverses is 1 where the mean value has not been subtracted.
        mean_value: ``[B, Hkv, T]``, rotated; mean_scores: ``[B, Hq, L]``, of the mean key.
    """

    q: Tensor
    q_scales: Tensor
    k: Tensor
    k_scales: Tensor
    v: Tensor
    v_inverses: Tensor
    v_logs: Tensor
    mean_value: Tensor
    mean_scores: Tensor


def compute(call: AttentionCall, out: Tensor, lse: Tensor | None = None, arch: str = "") -> None:
    """Write out ``[*batch, Hq, L, Dv]`` and, where given, lse ``[*batch, Hq, L]``, of a call that the kernels take, in
    the tiles of NVIDIA's or of AMD's ``arch``.
    Memory: K and V in float32, and some copies of the scores of all rows with the keys of a tile."""
    variant = variant_of(call, "int8", arch)
    geometry = variant.geometry
    assert isinstance(geometry, Geometry | AmdGeometry)
    view = view_of(call, out, *(() if lse is None else (lse,)))
    words = pack(call, view, variant.head_dim, geometry.cols)
    for target, found in zip(view.rest, _attend(call, view, words, geometry)):
        target.copy_(found)


def pack(call: AttentionCall, view: View, table_dim: int, tile_keys: int) -> Words:
    """Q, K and V in 8 bits, with ``table_dim`` channels and the keys in tiles of ``tile_keys``."""
    query, keys, values = (t.float() for t in view[:3])
    mean_key, mean_value = shifts(call, view)
    count = call.seq_len_kv
    rotated = functools.partial(rotate, size=table_dim)
    filled = torch.arange(-(-count // tile_keys) * tile_keys, device=query.device)
    rows = filled.clamp_max(count - 1)
    apart = values - mean_value[..., None, :]
    is_small = 2 * values.abs().amax(dim=-1) < apart.abs().amax(dim=-1)
    query_, key_ = rotated(query), rotated((keys - mean_key[..., None, :])[..., rows, :])
    value_ = rotated(torch.where(is_small[..., None], values, apart)[..., rows, :])
    a, b, c = (_scales(t) for t in (query_, key_, value_))
    inverses = ((1 / c).view(torch.int32) & ~1 | is_small[..., rows]).view(torch.float32)
    b = (b.view(torch.int32) & ~3).view(torch.float32)  # of 22 bits
    live = filled < count
    return Words(
        _codes(query_, a),
        (a * _float32(call.scale * LOG2_E)).clamp_min(_float32(LEAST_SCALE)),
        _codes(key_, b),
        b,
        _diffused(value_, c, tile_keys // 4),
        torch.where(live, inverses, 0.0),
        torch.where(live, log2(c), -math.inf),
        rotated(mean_value),
        _mean_scores(query, mean_key.repeat_interleave(call.groups, dim=1)) * _float32(call.scale),
    )


def shifts(call: AttentionCall, view: View) -> tuple[Tensor, Tensor]:
    """Return what is subtracted from each key, ``[B, Hkv, D]``, and from most values, ``[B, Hkv, Dv]``, in float32: the
    means over the keys that some row may look at."""
    live = _live_keys(call, view)
    if live is None:
        mean_key, mean_value = (t.mean(dim=-2, dtype=torch.float32) for t in view[1:3])
    else:
        shares = live / live.sum(dim=-1, keepdim=True).clamp_min(1)
        mean_key, mean_value = ((shares[..., None, :] @ t.float()).squeeze(-2) for t in view[1:3])
    return mean_key, mean_value


def _live_keys(call: AttentionCall, view: View) -> Tensor | None:
    """Which keys some row of a group of heads may look at, bool ``[B or 1, Hkv or 1, S]``; None: all."""
    low, high = band_of(call)
    keys = torch.arange(call.seq_len_kv, device=view.key.device)
    live = ((keys >= low) & (keys < call.seq_len_q + high))[None, None]
    if view.mask is None:
        return live if low > 0 or call.seq_len_q + high < call.seq_len_kv else None
    once = view.mask[tuple(slice(1 if step == 0 else None) for step in view.mask.stride()[:3])].any(dim=-2)
    if once.shape[1] > 1:
        once = once.unflatten(1, (-1, call.groups)).any(dim=2)
    return live & once


def _attend(call: AttentionCall, view: View, words: Words, geometry: Geometry | AmdGeometry) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32."""
    cols, tx = geometry.cols, geometry.tx
    of_heads = functools.partial(torch.repeat_interleave, repeats=call.groups, dim=1)
    k, b, v, inverses, logs, mean = (of_heads(t) for t in words[2:8])
    of_small = torch.where(inverses.view(torch.int32) & 1 == 1, inverses, 0.0)
    sums = torch.zeros(*words.q.shape, device=k.device)
    top_run = torch.full_like(words.q_scales, _float32(LOWEST))
    parts = torch.zeros(*top_run.shape, tx, device=k.device)  # of the row sum, of each thread of a row
    for first in range(0, k.shape[-2], cols):
        tile = slice(first, first + cols)
        scores = words.q @ k[..., tile, :].mT + MAGIC  # exact, as the products below: whole numbers below 2**24
        scores = fma(scores, b[..., None, tile], -MAGIC * b[..., None, tile])
        scores = fma(scores, words.q_scales[..., None], logs[..., None, tile])
        allowed = _allowed(call, view, first, cols)
        reads = _of_blocks(allowed.any(dim=-1, keepdim=True), geometry.rows)
        scores = scores.masked_fill(~allowed, -math.inf)
        top = scores.nan_to_num(_float32(LOWEST), math.inf, -math.inf).amax(dim=-1).clamp_min(_float32(LOWEST))
        rises = top > top_run + SLACK
        fade = torch.where(rises, exp2(top_run - top), 1.0)
        top_run = torch.where(rises, top, top_run)
        parts, sums = parts * fade[..., None], sums * fade[..., None]
        weight = exp2(top - top_run)[..., None]
        probs = exp2(scores - top[..., None])
        parts = torch.where(reads, fma(_of_threads(probs, inverses[..., tile], tx), weight, parts), parts)
        if (small := of_small[..., tile]).any():
            taken = _of_row(_of_threads(probs, small, tx))[..., None] * (-LARGEST * weight)
            sums = torch.where(reads & small.any(dim=-1)[..., None, None], fma(taken, mean[..., None, :], sums), sums)
        codes = torch.round(probs.double() * LARGEST).float().nan_to_num(0.0)
        sums = torch.where(reads, fma(codes @ v[..., tile, :], weight, sums), sums)
    total = _of_row(parts)
    is_empty = total[..., None] == 0
    factor = torch.where(is_empty, 0.0, torch.div(_float32(1 / LARGEST), total[..., None]))
    out = rotate(fma(sums, factor, mean[..., None, :]))[..., : call.head_dim_v]
    lse = fma(top_run + log2(total), _float32(math.log(2)), words.mean_scores)
    return torch.where(is_empty, 0.0, out), torch.where(total == 0, -math.inf, lse)


def _allowed(call: AttentionCall, view: View, first: int, cols: int) -> Tensor:
    """bool, broadcastable to ``[B, Hq, L, cols]``: which of the keys from ``first`` on each row may look at."""
    low, high = band_of(call)
    device = view.query.device
    distance = torch.arange(first, first + cols, device=device) - torch.arange(call.seq_len_q, device=device)[:, None]
    allowed = (distance >= low) & (distance <= high)
    if view.mask is None:
        return allowed
    mask = view.mask[..., first : first + cols]
    return allowed & torch.nn.functional.pad(mask, (0, cols - mask.shape[-1]))


def _of_blocks(seen: Tensor, rows: int) -> Tensor:
    """Whether a block reads a tile: where one of its ``rows`` sees a key of it, bool as ``seen`` ``[..., L, 1]``."""
    blocks = torch.nn.functional.pad(seen, (0, 0, 0, -seen.shape[-2] % rows)).unflatten(-2, (-1, rows))
    return blocks.any(dim=-2, keepdim=True).expand_as(blocks).flatten(-3, -2)[..., : seen.shape[-2], :]


def _of_threads(probs: Tensor, inverses: Tensor, tx: int) -> Tensor:
    """The sums of probabilities / c ``[..., L, tx]`` that each thread of a row has of its columns of a tile."""
    of_thread = probs.unflatten(-1, (-1, tx, 4))
    inverse = inverses[..., None, :].unflatten(-1, (-1, tx, 4))
    found = torch.zeros(*probs.shape[:-1], tx, device=probs.device)
    for group in range(of_thread.shape[-3]):
        for i in range(4):
            found = fma(of_thread[..., group, :, i], inverse[..., group, :, i], found)
    return found


def _of_row(parts: Tensor) -> Tensor:
    """The sum ``[..., L]`` of the parts ``[..., L, tx]`` that the threads of a row have."""
    while parts.shape[-1] > 1:
        parts = parts[..., 0::2] + parts[..., 1::2]
    return parts[..., 0]


def _mean_scores(query: Tensor, mean_key: Tensor) -> Tensor:
    """``[B, Hq, L]``: products with the mean key ``[B, Hq, D]``, summed as eight lanes do, each of four neighbours in
    every 32 channels."""
    filled = (torch.nn.functional.pad(t, (0, -query.shape[-1] % 32)) for t in (query, mean_key[..., None, :]))
    wide, mean = (t.unflatten(-1, (-1, 8, 4)).transpose(-2, -1).flatten(-3, -2) for t in filled)
    sums = torch.zeros_like(wide[..., 0, :])
    for c in range(wide.shape[-2]):
        sums = fma(wide[..., c, :], mean[..., c, :], sums)
    while sums.shape[-1] > 1:
        sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return sums[..., 0]


def rotate(x: Tensor, size: int = 0) -> Tensor:
    """x ``[..., D]``, filled up with zeros to ``size`` channels, a power of two, times the Hadamard matrix over the
    root of their number."""
    size, step = max(size, x.shape[-1]), 1
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while step < size:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        step *= 2
    return x * _float32(size**-0.5)


def _scales(x: Tensor) -> Tensor:
    """NaN of rows that are not finite."""
    largest = x.abs().amax(dim=-1)
    return fma(largest, _float32(1 / 127), largest - largest).clamp_min(_float32(LEAST_SCALE))


def _codes(x: Tensor, scales: Tensor) -> Tensor:
    return torch.round(x.double() * (1 / scales)[..., None]).float().nan_to_num(0.0)


def _diffused(x: Tensor, scales: Tensor, chain: int) -> Tensor:
    """Codes of keys ``[B, H, N, T]``, half of each rounding error, as far as it is half a step of theirs, handed to the
    next of ``chain`` neighbours."""
    chains, inverses = x.unflatten(-2, (-1, chain)), (1 / scales).unflatten(-1, (-1, chain))
    of_chain = scales.unflatten(-1, (-1, chain))
    carry, codes = torch.zeros_like(chains[..., 0, :]), []
    for j in range(chain):
        most = of_chain[..., j, None] / 2
        wanted = fma(torch.fmin(torch.fmax(carry, -most), most), HANDED_ON, chains[..., j, :])
        codes.append(torch.round(wanted.double() * inverses[..., j, None]).float().nan_to_num(0.0))
        carry = fma(-codes[-1], of_chain[..., j, None], wanted)
    return torch.stack(codes, dim=-2).flatten(-3, -2)


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
