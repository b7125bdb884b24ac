"""From a call and its plan to kernel launches: which grid, which parameters. Nothing is launched or compiled here, so
all of it can be tested, and emulated, on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall
from ...lazy_mask import LazyMask
from ..code.params import CappedForward, Forward, TensorEven, TensorForward
from ..code.source import Variant
from .launch import Launch
from .plan import Plan
from .stream_k import Pieces, part_floats

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a side of the band that cuts nothing


class View(NamedTuple):
    """A call whose leading dimensions are one: query ``[B, Hq, L, D]``, key ``[B, Hkv, S, D]``, value
    ``[B, Hkv, S, Dv]``, mask broadcastable ``[B, Hq, L, S]`` or None; ``rest``: further ``[B, H, ...]`` tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    rest: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them: a launch knows their addresses only."""
        mask = () if self.mask is None else (self.mask,)
        return self.query, self.key, self.value, *mask, *self.rest


def views(call: AttentionCall, *rest: Tensor) -> Iterator[View]:
    """The call as few :class:`View` as its strides allow; ``rest`` are ``[*batch, H, ...]`` tensors beside it."""
    mask = call.attn_mask
    assert not isinstance(mask, LazyMask)
    keys = (*call.batch, call.num_kv_heads, call.seq_len_kv)
    query = _expanded(call.query, (*call.batch, call.num_heads, call.seq_len_q, call.head_dim))
    key = _expanded(call.key, (*keys, call.head_dim))
    value = _expanded(call.value, (*keys, call.head_dim_v))
    if mask is not None:
        mask = _expanded(mask, (*call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv))
    if len(call.batch) == 1:
        yield View(query, key, value, mask, rest)
        return
    if call.query.dim() == 2:
        rest = tuple(t[None] for t in rest)
    for tensors in _one_batch([query, key, value, mask, *rest], len(call.batch)):
        query_, key_, value_, mask_, *rest_ = tensors
        assert query_ is not None
        assert key_ is not None
        assert value_ is not None
        yield View(query_, key_, value_, mask_, tuple(t for t in rest_ if t is not None))


def _expanded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.expand(shape)


def _one_batch(tensors: list[Tensor | None], num_lead: int) -> Iterator[list[Tensor | None]]:
    """The tensors with exactly one dimension before the heads, walked where they cannot be viewed so."""
    if num_lead == 0:
        yield [None if t is None else t[None] for t in tensors]
    elif num_lead == 1:
        yield tensors
    else:
        merged = [None if t is None else _merged(t, num_lead) for t in tensors]
        if all((m is None) == (t is None) for m, t in zip(merged, tensors)):
            yield merged
            return
        first = next(t for t in tensors if t is not None).shape[0]
        for i in range(first):
            yield from _one_batch([None if t is None else t[i] for t in tensors], num_lead - 1)


def _merged(tensor: Tensor, num_lead: int) -> Tensor | None:
    """The leading dimensions as one without a copy, or None."""
    strides, sizes = tensor.stride()[:num_lead], tensor.shape[:num_lead]
    steps = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    if any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(steps)):
        return None
    count, step = math.prod(sizes), steps[-1][1] if steps else 0
    return tensor.as_strided((count, *tensor.shape[num_lead:]), (step, *tensor.stride()[num_lead:]))


def band_of(call: AttentionCall) -> tuple[int, int]:
    """(low, high): query i sees keys i + low ... i + high."""
    low = -UNBOUNDED if call.left is None else call.offset - call.left
    high = UNBOUNDED if call.right is None else call.offset + call.right
    return max(-UNBOUNDED, min(UNBOUNDED, low)), max(-UNBOUNDED, min(UNBOUNDED, high))


def steps(tensor: Tensor) -> list[int]:
    """The strides in elements; 0 for a dimension of length 1."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride())]


def common_fields(call: AttentionCall, view: View) -> dict[str, int | float]:
    """What every kernel is given of a call, except for its results."""
    query, key, value, mask, _ = view
    qb, qh, qs, _ = steps(query)
    kb, kh, ks, _ = steps(key)
    vb, vh, vs, _ = steps(value)
    low, high = band_of(call)
    fields: dict[str, int | float] = {
        "q": query.data_ptr(), "qb": qb, "qh": qh, "qs": qs,
        "k": key.data_ptr(), "kb": kb, "kh": kh, "ks": ks,
        "v": value.data_ptr(), "vb": vb, "vh": vh, "vs": vs,
        "lq": call.seq_len_q, "lk": call.seq_len_kv,
        "heads": call.num_heads, "group": call.groups, "batches": query.shape[0],
        "dim": call.head_dim, "dim_v": call.head_dim_v,
        "low": low, "high": high,
        "scale": call.scale, "scale_log2": call.scale * LOG2_E,
    }  # fmt: skip
    if mask is not None:
        mb, mh, mq, mk = steps(mask)
        fields |= {"mask": mask.data_ptr(), "mb": mb, "mh": mh, "mq": mq, "mk": mk}
        fields["mask_is_float32"] = int(mask.dtype == torch.float32)
    return fields


def result_fields(tensor: Tensor, name: str, prefix: str) -> dict[str, int]:
    """The address of a ``[B, H, tokens, ...]`` tensor under ``name``, and its first strides under ``prefix`` with b
    (batch), h (head), and where its last dimension is not that of the tokens s (tokens)."""
    batch, head, tokens, *columns = steps(tensor)
    fields = {name: tensor.data_ptr(), f"{prefix}b": batch, f"{prefix}h": head}
    if columns:
        fields[f"{prefix}s"] = tokens
    return fields


def forward_launches(
    call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor | None = None, log_sum: Tensor | None = None
) -> list[Launch]:
    """The launches that write out ``[*batch, Hq, L, Dv]`` and, where given, lse and log_sum ``[*batch, Hq, L]``."""
    if plan.last is not None:
        first, plans = plan.last.first, (plan._replace(last=None), Plan(plan.last.variant, plan.last.ranges))
        return [
            launch
            for part, rows, of_part in zip(plan.last.calls(call), (slice(first), slice(first, None)), plans)
            for launch in forward_launches(
                part, of_part, out[..., rows, :], *(None if s is None else s[..., rows] for s in (lse, log_sum))
            )
        ]
    stats = [t for t in (lse, log_sum) if t is not None]
    launches = []
    for view in views(call, out, *stats):
        fields = common_fields(call, view) | result_fields(view.rest[0], "o", "o")
        for name, stat in zip(("lse", "log_sum"), view.rest[1:]):
            fields |= result_fields(stat, name, "l")
        if plan.forward.on_tensor_cores:
            launches += _tensor_launches(call, view, plan, fields)
        elif plan.splits:
            launches += _split_launches(call, view, plan, fields)
        else:
            launches += _plain_launches(call, view, plan, fields)
    return launches


def work_of(call: AttentionCall, view: View | None = None) -> int:
    """Multiplications of the two products, as if no mask left anything out; ``view``: of this one alone."""
    batches = call.batch_size if view is None else view.query.shape[0]
    scores = batches * call.num_heads * call.seq_len_q * call.seq_len_kv
    return scores * (call.head_dim + call.head_dim_v)


def _plain_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry = plan.forward, plan.forward.geometry
    grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, view.query.shape[0])
    params, keep = _forward_params(call, variant, fields)
    keep += view.tensors
    return [Launch(variant, variant.functions[0], grid, geometry.threads, params, keep, work_of(call, view))]


def _forward_params(call: AttentionCall, variant: Variant, fields: dict) -> tuple[Forward, tuple[Tensor, ...]]:
    """Of a kernel on plain cores, and what must live as long as they."""
    if not variant.kind.startswith("capped"):
        return Forward(**fields), ()
    fields = fields | softcap_fields(call)
    if call.sinks is None:
        return CappedForward(**fields), ()
    sinks = call.sinks.float().contiguous()
    return CappedForward(**fields, sinks=sinks.data_ptr()), (sinks,)


def part_fields(call: AttentionCall, view: View, splits: int) -> tuple[Tensor, dict[str, int]]:
    """Memory for the parts of a call whose keys are cut, and the fields that name it: out ``[splits, rows, Dv]``, then
    the maximum and the sum ``[splits, rows]`` of each row."""
    rows = view.query.shape[0] * call.num_heads * call.seq_len_q
    parts = view.query.new_empty(splits * rows * (call.head_dim_v + 2), dtype=torch.float32)
    address, row_bytes = parts.data_ptr(), 4 * splits * rows
    return parts, {
        "splits": splits,
        "part_out": address,
        "part_max": address + row_bytes * call.head_dim_v,
        "part_sums": address + row_bytes * (call.head_dim_v + 1),
    }


def _split_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry, batches, splits = plan.forward, plan.forward.geometry, view.query.shape[0], plan.splits
    rows = batches * call.num_heads * call.seq_len_q
    joined = splits + (call.sinks is not None)
    parts, of_parts = part_fields(call, view, joined)
    fields |= of_parts | {"splits": splits}
    if call.sinks is not None:
        _fill_sinks(call, parts, joined, "natural" if variant.mask == "float" else "log2", variant.lift)
    heads, rows_of_head = call.num_kv_heads, call.groups * call.seq_len_q
    if not variant.is_small:  # its tiles hold rows of one head
        heads, rows_of_head = call.num_heads, call.seq_len_q
    tiles = -(-rows_of_head // geometry.rows)
    params, of_sinks = _forward_params(call, variant, fields)
    to_join, _ = _forward_params(call, variant, fields | {"splits": joined})
    keep, work = (parts, *of_sinks, *view.tensors), work_of(call, view)
    grid = (tiles * splits, heads, batches)
    forward, combine = variant.functions
    return [
        Launch(variant, forward, grid, geometry.threads, params, keep, work),
        Launch(variant, combine, (-(-rows // 4), 1, 1), 128, to_join, keep),
    ]


# ---- on tensor cores -------------------------------------------------------------------------------------------------


def _tensor_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry, batches = plan.forward, plan.forward.geometry, view.query.shape[0]
    forward, *others = variant.functions
    keep, work, splits = list(view.tensors), work_of(call, view), max(1, plan.splits)
    fields |= {"splits": splits, **softcap_fields(call)}
    launches = []
    if view.mask is not None:
        bits, of_mask, grid = _mask_bits(call, view, variant)
        keep += bits
        fields |= of_mask
        launches.append(Launch(variant, variant.functions[-1], grid, 128, TensorForward(**fields), tuple(keep)))
    if call.sinks is not None:
        keep.append(call.sinks.float().contiguous())
        fields["sinks"] = keep[-1].data_ptr()
    if variant.is_even:
        fields, parts_and_counters, grid = _even_fields(call, plan, batches, fields)
        return [
            *(launch._replace(params=TensorEven(**fields)) for launch in launches),
            Launch(variant, forward, grid, geometry.threads, TensorEven(**fields), (*keep, *parts_and_counters), work),
        ]
    if not variant.is_small:
        grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, batches)
        params = TensorForward(**fields)
        return [*launches, Launch(variant, forward, grid, geometry.threads, params, tuple(keep), work)]
    joined = splits + (call.sinks is not None)
    if splits > 1:
        parts, of_parts = part_fields(call, view, joined)
        keep.append(parts)
        fields |= of_parts | {"splits": splits}
        if call.sinks is not None:
            _fill_sinks(call, parts, joined, "natural" if variant.mask == "float" else "log2", variant.lift)
    params, rows = TensorForward(**fields), batches * call.num_heads * call.seq_len_q
    grid = (-(-call.groups * call.seq_len_q // geometry.rows) * splits, call.num_kv_heads, batches)
    launches.append(Launch(variant, forward, grid, geometry.threads, params, tuple(keep), work))
    if splits > 1:
        params = TensorForward(**fields | {"splits": joined})
        launches.append(Launch(variant, others[0], (-(-rows // 4), 1, 1), 128, params, tuple(keep)))
    return launches


def _even_fields(
    call: AttentionCall, plan: Plan, batches: int, fields: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Tensor, ...], tuple[int, int, int]]:
    """The fields of a launch whose blocks are listed, memory for its parts, and its grid: of as many batch elements as
    a view of the call has."""
    geometry, pieces = plan.forward.geometry, plan.pieces
    row_tiles = -(-call.seq_len_q // geometry.rows)
    if pieces is None or batches != call.batch_size:
        pieces = Pieces(row_tiles * call.num_heads * batches)
    listed = {"row_tiles": row_tiles, "whole": pieces.whole, "pieces": pieces.words}
    if not pieces.slots:
        return fields | listed, (), (pieces.blocks, 1, 1)
    floats = pieces.slots * part_floats(geometry.rows, plan.forward.head_dim)
    parts = call.query.new_empty(floats, dtype=torch.float32)
    arrived = call.query.new_zeros(pieces.listed_tiles, dtype=torch.int32)
    listed |= {"parts": parts.data_ptr(), "arrived": arrived.data_ptr()}
    return fields | listed, (parts, arrived), (pieces.blocks, 1, 1)


def _fill_sinks(call: AttentionCall, parts: Tensor, joined: int, unit: str, lift: float) -> None:
    """Make the last part that of one more key, whose value is zero: see :func:`part_fields`. lift: what sums of
    probabilities are multiplied by."""
    assert call.sinks is not None
    out, largest, sums = parts.split([parts.numel() // (call.head_dim_v + 2) * n for n in (call.head_dim_v, 1, 1)])
    out.view(joined, -1)[-1] = 0
    sums.view(joined, -1)[-1] = lift
    sinks = call.sinks.float() * (1.0 if unit == "natural" else LOG2_E)
    largest.view(joined, -1, call.num_heads, call.seq_len_q)[-1] = sinks[:, None]


def softcap_fields(call: AttentionCall) -> dict[str, float]:
    """Capped scores are softcap * tanh(...): the kernel takes the tanh, and scales by softcap. With scale 0 all are
    0."""
    if call.softcap is None or call.scale == 0:
        return {}
    scale = call.softcap
    return {"scale": scale, "scale_log2": scale * LOG2_E, "tanh_scale": 2 * LOG2_E * call.scale / call.softcap}


def _mask_bits(
    call: AttentionCall, view: View, variant: Variant
) -> tuple[list[Tensor], dict[str, int], tuple[int, int, int]]:
    """Memory for a mask's bits and flags (``mask_bits.cuh``), the fields that name it, and the grid of the kernel
    that writes it. What a mask repeats is not repeated there."""
    assert view.mask is not None
    geometry = variant.geometry
    of_batch, of_head, of_query, _ = steps(view.mask)
    batches = view.query.shape[0] if of_batch else 1
    heads, rows = (call.num_heads if of_head else 1), (call.seq_len_q if of_query else 1)
    key_tiles = -(-call.seq_len_kv // geometry.cols)
    words = key_tiles * (geometry.cols // 32)
    if variant.is_small:  # a tile of rows holds those of a group of heads
        units, tile_rows = (call.num_kv_heads if of_head else 1), call.groups * call.seq_len_q
    else:
        units, tile_rows = heads, rows
    row_tiles = -(-tile_rows // geometry.rows)
    bits = view.query.new_empty((batches, heads, rows, words), dtype=torch.int32)
    flags = view.query.new_empty((batches, units, row_tiles, key_tiles), dtype=torch.uint8)
    has_row_tiles = variant.is_small or of_query
    fields = {
        "mask_bits": bits.data_ptr(),
        "flags": flags.data_ptr(),
        "bits_b": bits.stride(0) if of_batch else 0,
        "bits_h": bits.stride(1) if of_head else 0,
        "bits_q": bits.stride(2) if of_query else 0,
        "flags_b": flags.stride(0) if of_batch else 0,
        "flags_h": flags.stride(1) if of_head else 0,
        "flags_q": flags.stride(2) if has_row_tiles else 0,
        "mask_heads": units,
        "mask_rows": rows,
    }
    return [bits, flags], fields, (key_tiles, row_tiles, batches * units)


def parts_bytes(plan: Plan) -> int:
    """Memory that the parts of tiles take whose keys are cut by a launch with listed blocks."""
    slots = 0 if plan.pieces is None else plan.pieces.slots
    return 4 * slots * part_floats(plan.forward.geometry.rows, plan.forward.head_dim) if slots else 0


def mask_bits_bytes(call: AttentionCall) -> int:
    """Memory that the bits of a call's mask take, about."""
    mask = call.attn_mask
    if not isinstance(mask, Tensor):
        return 0
    unique = math.prod(size for size, step in zip(mask.shape[:-1], mask.stride()[:-1]) if step)
    return unique * (-(-call.seq_len_kv // 64) * 8)
