"""From a call and its plan to the launches of the forward kernels: which grid, which parameters. Nothing is launched or
compiled here, so all of it can be tested, and emulated, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.params import CappedForward, Forward, Params, TensorEven, TensorForward
from . import Launch
from .fields import LOG2_E, View, common_fields, mask_bits, mask_tiles, result_fields, softcap_fields, view_of, work_of
from .plan import Plan
from .stream_k import part_floats


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
    view = view_of(call, out, *stats)
    fields = common_fields(call, view) | result_fields(view.rest[0], "o", "o")
    for name, stat in zip(("lse", "log_sum"), view.rest[1:]):
        fields |= result_fields(stat, name, "l")
    launches_of = _tensor_launches if plan.forward.on_tensor_cores else _plain_launches
    return launches_of(call, view, plan, fields)


def _plain_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    keep, params = view.tensors, Forward
    if plan.forward.traits.is_capped:
        params, fields = CappedForward, fields | softcap_fields(call)
        if call.sinks is not None:
            keep = (call.sinks.float().contiguous(), *keep)
            fields["sinks"] = keep[0].data_ptr()
    if plan.splits:
        return _cut_launches(call, view, plan, params, fields, keep)
    return [_launch(call, view, plan, params(**fields), keep)]


def _launch(call: AttentionCall, view: View, plan: Plan, params: Params, keep: tuple[Tensor, ...]) -> Launch:
    """The launch with a block for each tile of rows, and for each range of keys."""
    variant, geometry = plan.forward, plan.forward.geometry
    heads = call.groups if variant.is_small else 1  # whose rows a tile holds
    tiles = -(-heads * call.seq_len_q // geometry.rows) * max(1, plan.splits)
    grid = tiles, call.num_heads // heads, view.query.shape[0]
    return Launch(variant, variant.functions[0], grid, geometry.threads, params, keep, work_of(call))


def _cut_launches(
    call: AttentionCall, view: View, plan: Plan, params: type[Params], fields: dict, keep: tuple[Tensor, ...]
) -> list[Launch]:
    """The launches of a kernel whose keys are cut into ranges: that of the kernel, and that which joins the parts."""
    variant, joined = plan.forward, plan.splits + (call.sinks is not None)
    parts, of_parts = part_fields(call, view, joined)
    if call.sinks is not None:
        _fill_sinks(call, parts, joined, "natural" if variant.mask == "float" else "log2", variant.lift)
    keep, fields = (*keep, parts), fields | of_parts
    rows = view.query.shape[0] * call.num_heads * call.seq_len_q
    to_join = params(**fields | {"splits": joined})
    return [
        _launch(call, view, plan, params(**fields | {"splits": plan.splits}), keep),
        Launch(variant, variant.functions[1], (-(-rows // 4), 1, 1), 128, to_join, keep),
    ]


def part_fields(call: AttentionCall, view: View, splits: int) -> tuple[Tensor, dict[str, int]]:
    """Memory for the parts of a call whose keys are cut, and the fields that name it: out ``[splits, rows, Dv]``, then
    the maximum and the sum ``[splits, rows]`` of each row."""
    rows = view.query.shape[0] * call.num_heads * call.seq_len_q
    parts = view.query.new_empty(splits * rows * (call.head_dim_v + 2), dtype=torch.float32)
    address, row_bytes = parts.data_ptr(), 4 * splits * rows
    return parts, {
        "part_out": address,
        "part_max": address + row_bytes * call.head_dim_v,
        "part_sums": address + row_bytes * (call.head_dim_v + 1),
    }


# ---- on tensor cores -------------------------------------------------------------------------------------------------


def _tensor_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry = plan.forward, plan.forward.geometry
    forward, keep, work = variant.functions[0], list(view.tensors), work_of(call)
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
        fields, parts_and_counters, grid = _even_fields(call, plan, fields)
        return [
            *(launch._replace(params=TensorEven(**fields)) for launch in launches),
            Launch(variant, forward, grid, geometry.threads, TensorEven(**fields), (*keep, *parts_and_counters), work),
        ]
    if plan.splits > 1:
        return [*launches, *_cut_launches(call, view, plan, TensorForward, fields, tuple(keep))]
    return [*launches, _launch(call, view, plan, TensorForward(**fields), tuple(keep))]


def _even_fields(
    call: AttentionCall, plan: Plan, fields: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Tensor, ...], tuple[int, int, int]]:
    """The fields of a launch whose blocks are listed, memory for its parts, and its grid."""
    geometry, pieces = plan.forward.geometry, plan.pieces
    assert pieces is not None
    row_tiles = -(-call.seq_len_q // geometry.rows)
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
    out, largest, sums = parts.split([parts.numel() // (call.head_dim_v + 2) * n for n in (call.head_dim_v, 1, 1)])
    out.view(joined, -1)[-1] = 0
    sums.view(joined, -1)[-1] = lift
    sinks = call.sinks.float() * (1.0 if unit == "natural" else LOG2_E)  # type: ignore[union-attr]
    largest.view(joined, -1, call.num_heads, call.seq_len_q)[-1] = sinks[:, None]


def parts_bytes(plan: Plan) -> int:
    """Memory that the parts of tiles take whose keys are cut by a launch with listed blocks."""
    slots = 0 if plan.pieces is None else plan.pieces.slots
    return 4 * slots * part_floats(plan.forward.geometry.rows, plan.forward.head_dim) if slots else 0
