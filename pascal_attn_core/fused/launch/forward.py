"""From a call and its plan to the launches of the forward kernels: which grid, which parameters. Nothing is launched or
compiled here, so all of it can be tested, and emulated, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.params import CappedForward, Forward, TensorEven, TensorForward
from ..code.source import Variant
from . import Launch
from .fields import LOG2_E, View, common_fields, mask_bits, mask_tiles, result_fields, softcap_fields, views, work_of
from .plan import Plan
from .stream_k import Pieces, part_floats


def forward_launches(
    call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor | None = None, log_sum: Tensor | None = None
) -> list[Launch]:
    """The launches that write out ``[*batch, Hq, L, Dv]`` and, where given, lse and log_sum ``[*batch, Hq, L]``."""
    if plan.tail is not None:
        first, plans = plan.tail.first, (plan._replace(tail=None), Plan(plan.tail.variant, plan.tail.ranges))
        return [
            launch
            for part, rows, of_part in zip(plan.tail.calls(call), (slice(first), slice(first, None)), plans)
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


def _plain_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry = plan.forward, plan.forward.geometry
    grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, view.query.shape[0])
    params, keep = _forward_params(call, variant, fields)
    keep += view.tensors
    return [Launch(variant, variant.functions[0], grid, geometry.threads, params, keep, work_of(call, view))]


def _forward_params(call: AttentionCall, variant: Variant, fields: dict) -> tuple[Forward, tuple[Tensor, ...]]:
    """The parameters of a kernel on plain cores, and the tensors that must live as long as they."""
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
    forward, keep, work = variant.functions[0], list(view.tensors), work_of(call, view)
    fields |= {"splits": max(1, plan.splits), **softcap_fields(call)}
    launches = []
    if view.mask is not None:
        key_tiles = -(-call.seq_len_kv // geometry.cols)
        bits = mask_bits(call, view, key_tiles * (geometry.cols // 32))
        units, rows = bits.shape[1:3]
        if variant.is_small:  # a tile of rows holds those of a group of heads
            units, rows = min(units, call.num_kv_heads), call.groups * call.seq_len_q
        flags, of_mask, grid = mask_tiles(bits, units, -(-rows // geometry.rows), key_tiles)
        keep += [bits, flags]
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
    return [*launches, *_small_launches(call, view, plan, fields, tuple(keep))]


def _small_launches(
    call: AttentionCall, view: View, plan: Plan, fields: dict, keep: tuple[Tensor, ...]
) -> list[Launch]:
    """The launches of the kernel for few query rows, of which a tile holds those of a group of heads."""
    variant, geometry, batches, splits = plan.forward, plan.forward.geometry, view.query.shape[0], max(1, plan.splits)
    grid = (-(-call.groups * call.seq_len_q // geometry.rows) * splits, call.num_kv_heads, batches)
    if splits == 1:
        params = TensorForward(**fields)
        return [Launch(variant, variant.functions[0], grid, geometry.threads, params, keep, work_of(call, view))]
    joined, rows = splits + (call.sinks is not None), batches * call.num_heads * call.seq_len_q
    parts, of_parts = part_fields(call, view, joined)
    keep, fields = (*keep, parts), fields | of_parts
    if call.sinks is not None:
        _fill_sinks(call, parts, joined, "natural" if variant.mask == "float" else "log2", variant.lift)
    params, to_join = TensorForward(**fields | {"splits": splits}), TensorForward(**fields | {"splits": joined})
    forward, combine = variant.functions[:2]
    return [
        Launch(variant, forward, grid, geometry.threads, params, keep, work_of(call, view)),
        Launch(variant, combine, (-(-rows // 4), 1, 1), 128, to_join, keep),
    ]


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


def parts_bytes(plan: Plan) -> int:
    """Memory that the parts of tiles take whose keys are cut by a launch with listed blocks."""
    slots = 0 if plan.pieces is None else plan.pieces.slots
    return 4 * slots * part_floats(plan.forward.geometry.rows, plan.forward.head_dim) if slots else 0
