"""The launches of attention in 8-bit integers: Q, K and V to words of four codes, then both products of them. What they
compute is written down in :mod:`.int8_definition`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.params import Int8Attention, Pack
from ..code.source import Variant
from . import Launch
from .fields import LOG2_E, View, band_of, common_fields, mask_bits, mask_tiles, result_fields, steps, view_of
from .int8_definition import rotate, shifts
from .plan import Plan

_SLICE_BYTES = 64 << 20  # of words and scales
_MOST_BATCHES = 65535  # a grid's third dimension


def int8_launches(call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor | None = None) -> list[Launch]:
    """The launches that write out ``[*batch, Hq, L, Dv]`` and, where given, lse ``[*batch, Hq, L]``.

    Extra memory: the bits of a mask, and for each row of Q, K and V its head_dim in the table and 4 to 8 bytes. The
    heads are computed in slices that fit 64 MiB, of at least one head of K and V with its heads of Q. The K or
    V of a slice is copied to float32 for a moment.
    """
    view = view_of(call, out, *(() if lse is None else (lse,)))
    mask = _MaskTiles.of(call, plan.forward, view)
    launches = [] if mask is None else [mask.launch]
    words: _Words | None = None
    for batches, heads in _slices(call, plan.forward, view):
        of_query = slice(heads.start * call.groups, heads.stop * call.groups)
        tensors = view.query[batches, of_query], view.key[batches, heads], view.value[batches, heads]
        of_rows = None if view.mask is None else view.mask[batches, of_query]
        part = View(*tensors, of_rows, tuple(t[batches, of_query] for t in view.rest))
        words = words or _Words.of(plan.forward, part)
        means = tuple(t.contiguous() for t in shifts(call, part))
        rotated = rotate(means[1], plan.forward.head_dim)
        launches += _pack_launches(call, plan.forward, part, words, means)
        of_mask = {} if mask is None else mask.fields(batches.start, of_query.start)
        keep = (*view.tensors, *words, *means, rotated, *(() if mask is None else (mask.bits, mask.flags)))
        launches.append(_attention_launch(call, plan.forward, part, words, rotated, of_mask)._replace(keep=keep))
    return launches


class _Words(NamedTuple):
    """The tensors that the packing kernels write: see ``Pack`` of ``cuda/int8_pack.cuh``."""

    q: Tensor
    q_scales: Tensor
    mean_scores: Tensor
    k: Tensor
    k_scales: Tensor
    v: Tensor
    v_scales: Tensor
    v_logs: Tensor

    @staticmethod
    def of(variant: Variant, view: View) -> _Words:
        rows = view.query.shape[:-1].numel()
        tiles = view.key.shape[:2].numel() * _key_tiles(variant, view)
        keys = tiles * variant.geometry.cols
        sizes = {"q": rows, "q_scales": rows, "mean_scores": rows if len(view.rest) > 1 else 0}
        if variant.arch:  # behind each tile of V a word for each channel
            sizes["v"] = keys + 4 * tiles
        new, each = view.query.new_empty, variant.head_dim // 4
        return _Words(
            *(
                new((sizes.get(name, keys), each) if len(name) == 1 else sizes.get(name, keys), dtype=dtype)
                for name, dtype in ((n, torch.int32 if len(n) == 1 else torch.float32) for n in _Words._fields)
            )
        )


def _key_tiles(variant: Variant, view: View) -> int:
    return -(-view.key.shape[-2] // variant.geometry.cols)


def _slices(call: AttentionCall, variant: Variant, view: View) -> Iterator[tuple[slice, slice]]:
    """Batch elements, and heads of key and value, whose words are in memory at a time."""
    tokens = call.groups * call.seq_len_q + 2 * call.seq_len_kv
    most = max(1, _SLICE_BYTES // (tokens * (variant.head_dim + 8)))
    heads = min(call.num_kv_heads, most)
    for batch in range(0, view.query.shape[0], batches := max(1, min(most // call.num_kv_heads, _MOST_BATCHES))):
        for head in range(0, call.num_kv_heads, heads):
            yield slice(batch, batch + batches), slice(head, min(head + heads, call.num_kv_heads))


def _pack_launches(
    call: AttentionCall, variant: Variant, view: View, words: _Words, means: tuple[Tensor, ...]
) -> list[Launch]:
    launches = []
    mean_key, mean_value = means
    scores = {"mean": mean_key, "mean_scores": words.mean_scores} if words.mean_scores.numel() else {}
    of_values = {"words": words.v, "scales": words.v_scales, "logs": words.v_logs, "mean": mean_value}
    for function, tensor, own in (
        ("pa_pack_queries", view.query, {"words": words.q, "scales": words.q_scales, **scores}),
        ("pa_pack_keys", view.key, {"words": words.k, "scales": words.k_scales, "mean": mean_key}),
        ("pa_pack_values", view.value, of_values),
    ):
        batches, heads, rows, dim = tensor.shape
        batch, head, token, _ = steps(tensor)
        tiles = -(-rows // variant.geometry.cols)
        numbers: dict[str, float] = {
            "xb": batch, "xh": head, "xs": token, "rows": rows, "heads": heads, "group": 1, "tiles": tiles, "dim": dim,
        }  # fmt: skip
        if tensor is view.query:
            numbers |= {"group": call.groups, "scale": call.scale, "scale_log2": call.scale * LOG2_E}
        grid = -(-tiles // 4), heads, batches
        launches.append(Launch.over(variant, function, grid, 128, Pack, {"x": tensor, **own}, numbers))
    return launches


def _attention_launch(
    call: AttentionCall, variant: Variant, view: View, words: _Words, mean: Tensor, of_mask: dict[str, int]
) -> Launch:
    geometry, (batches, heads, rows, _) = variant.geometry, view.query.shape
    low, high = band_of(call)
    results = result_fields(view.rest[0], "o", "o")
    for lse in view.rest[1:]:
        results |= result_fields(lse, "lse", "l")
    numbers = {
        "lq": rows, "lk": call.seq_len_kv, "heads": heads, "group": call.groups, "tiles": _key_tiles(variant, view),
        "dim_v": call.head_dim_v, "low": low, "high": high,
    }  # fmt: skip
    how = variant, "pa_int8_attention", (-(-rows // geometry.rows), heads, batches), geometry.threads, Int8Attention
    work = batches * heads * rows * call.seq_len_kv * (call.head_dim + call.head_dim_v)
    tensors = {**words._asdict(), "mean": mean}
    return Launch.over(*how, tensors, {**numbers, **results, **of_mask}, work)


class _MaskTiles(NamedTuple):
    """A mask by bits, and what is to be looked at in each tile: the launch that writes both, and their tensors with as
    many batch elements and heads of Q as the call has."""

    launch: Launch
    bits: Tensor
    flags: Tensor
    strides: dict[str, int]

    @staticmethod
    def of(call: AttentionCall, variant: Variant, view: View) -> _MaskTiles | None:
        if view.mask is None:
            return None
        key_tiles = _key_tiles(variant, view)
        bits = mask_bits(call, view, key_tiles * (variant.geometry.cols // 32))
        row_tiles = -(-bits.shape[2] // variant.geometry.rows)
        flags, fields, grid = mask_tiles(bits, bits.shape[1], row_tiles, key_tiles)
        names = ("mask", "mb", "mh", "mq", "mk", "lk")
        of_call = {name: value for name, value in common_fields(call, view).items() if name in names}
        params = Int8Attention(**{**of_call, **fields})
        launch = Launch(variant, variant.functions[-1], grid, 128, params, (*view.tensors, bits, flags))
        wide = (view.query.shape[0], call.num_heads, -1, -1)
        return _MaskTiles(launch, bits.expand(wide), flags.expand(wide), fields)

    def fields(self, batch: int, head: int) -> dict[str, int]:
        """The addresses and strides that a launch needs for the heads from this one on."""
        own = self.bits[batch, head].data_ptr(), self.flags[batch, head].data_ptr()
        return {**self.strides, "mask_bits": own[0], "flags": own[1]}
