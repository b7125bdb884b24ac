"""From a call to kernel launches: which variant, which grid, which parameters. Nothing is launched or compiled here, so
all of it can be tested, and emulated, on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..device import DeviceInfo
from ..lazy_mask import LazyMask
from .params import Forward, Params
from .source import HEAD_DIMS, Variant

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a side of the band that cuts nothing
MAX_SPLITS = 64
# Of a full tile for few rows, in units of the plain kernel's: it reads more of shared memory per multiplication.
_SPLIT_SPEED = 0.6


class Launch(NamedTuple):
    """One kernel launch. ``keep`` holds tensors that must live until it has been queued; ``work`` is about the number
    of its multiplications."""

    variant: Variant
    function: str
    grid: tuple[int, int, int]
    threads: int
    params: Params
    keep: tuple[Tensor, ...] = ()
    work: int = 0


@dataclass(frozen=True, eq=False)
class View:
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
    assert not isinstance(call.attn_mask, LazyMask)
    lead_q, lead_k = (*call.batch, call.num_heads), (*call.batch, call.num_kv_heads)
    query = call.query.expand(*lead_q, *call.query.shape[-2:])
    key, value = (t.expand(*lead_k, *t.shape[-2:]) for t in (call.key, call.value))
    mask = call.attn_mask
    if mask is not None:
        mask = mask.expand(*lead_q, call.seq_len_q, call.seq_len_kv)
    if call.query.dim() == 2:
        rest = tuple(t[None] for t in rest)
    for tensors in _one_batch([query, key, value, mask, *rest], len(call.batch)):
        query_, key_, value_, mask_, *rest_ = tensors
        assert query_ is not None
        assert key_ is not None
        assert value_ is not None
        yield View(query_, key_, value_, mask_, tuple(t for t in rest_ if t is not None))


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


def table_dim(head_dim: int, head_dim_v: int) -> int | None:
    """The smallest head_dim of the table that both fit into, or None."""
    return next((d for d in HEAD_DIMS if max(head_dim, head_dim_v) <= d), None)


def variant_of(call: AttentionCall, kind: str) -> Variant:
    """The compilation that a call needs. :func:`table_dim` is not None for it."""
    dim = table_dim(call.head_dim, call.head_dim_v)
    assert dim is not None
    mask = "none" if call.attn_mask is None else "bool" if call.attn_mask.dtype == torch.bool else "float"
    if mask == "none" and call.scale <= 0:
        mask = "float"  # there scores are scaled before their maximum is taken
    padded = call.head_dim != dim or call.head_dim_v != dim
    return Variant(kind, dim, str(call.query.dtype).removeprefix("torch."), mask, padded)


def band_of(call: AttentionCall) -> dict[str, int]:
    """low and high: query i sees keys i + low ... i + high."""
    low = -UNBOUNDED if call.left is None else call.offset - call.left
    high = UNBOUNDED if call.right is None else call.offset + call.right
    return {"low": max(-UNBOUNDED, min(UNBOUNDED, low)), "high": max(-UNBOUNDED, min(UNBOUNDED, high))}


def stride_fields(tensor: Tensor | None, names: str) -> dict[str, int]:
    """The first strides of a tensor under these names; 0 for a dimension of length 1."""
    if tensor is None:
        return {}
    return {n: 0 if size == 1 else step for n, size, step in zip(names.split(), tensor.shape, tensor.stride())}


def common_fields(call: AttentionCall, view: View) -> dict[str, int | float]:
    """What every kernel is told of a call, except for its results."""
    mask = view.mask
    return {
        "q": view.query.data_ptr(),
        "k": view.key.data_ptr(),
        "v": view.value.data_ptr(),
        "mask": 0 if mask is None else mask.data_ptr(),
        **stride_fields(view.query, "qb qh qs"),
        **stride_fields(view.key, "kb kh ks"),
        **stride_fields(view.value, "vb vh vs"),
        **stride_fields(mask, "mb mh mq mk"),
        "mask_is_float32": int(mask is not None and mask.dtype == torch.float32),
        "lq": call.seq_len_q,
        "lk": call.seq_len_kv,
        "heads": call.num_heads,
        "group": call.groups,
        "batches": view.query.shape[0],
        "dim": call.head_dim,
        "dim_v": call.head_dim_v,
        **band_of(call),
        "scale": call.scale,
        "scale_log2": call.scale * LOG2_E,
    }


def forward_launches(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor | None,
    log_sum: Tensor | None,
    info: DeviceInfo,
    *,
    may_split: bool = True,
) -> list[Launch]:
    """The launches that write out ``[*batch, Hq, L, Dv]`` and, where given, lse and log_sum ``[*batch, Hq, L]``."""
    extras = [t for t in (lse, log_sum) if t is not None]
    launches = []
    for view in views(call, out, *extras):
        out_view, *stat_views = view.rest
        fields = common_fields(call, view)
        fields |= {"o": out_view.data_ptr(), **stride_fields(out_view, "ob oh os")}
        for name, stat in zip(("lse", "log_sum"), stat_views):
            fields |= {name: stat.data_ptr(), **stride_fields(stat, "lb lh")}
        splits = num_splits(call, info) if may_split else 0
        launches += _split_launches(call, view, fields, splits) if splits else _plain_launches(call, view, fields)
    return launches


def work_of(call: AttentionCall, view: View) -> int:
    """Multiplications of the two products, without what masks leave out."""
    scores = view.query.shape[0] * call.num_heads * call.seq_len_q * call.seq_len_kv
    return scores * (call.head_dim + call.head_dim_v)


def num_splits(call: AttentionCall, info: DeviceInfo) -> int:
    """Into how many ranges the keys are cut by the kernel for few query rows, so that they still fill the device; 0 =
    the plain kernel takes the call.

    A tile of that kernel is small and holds the queries of all heads of a group, one of the plain kernel those of one
    head: the one that has less of its tiles empty wins, at the speed that a full tile has.
    """
    plain, split = variant_of(call, "forward").geometry, variant_of(call, "split").geometry
    rows = call.groups * call.seq_len_q
    is_small = _SPLIT_SPEED * _fullness(rows, split.rows) > _fullness(call.seq_len_q, plain.rows)
    blocks = call.batch_size * call.num_heads * -(-call.seq_len_q // plain.rows)
    if 2 * blocks > info.num_sms and not is_small:
        return 0
    units = call.batch_size * call.num_kv_heads * -(-rows // split.rows)
    wanted = -(-split.blocks * info.num_sms // max(1, units))
    splits = max(1, min(wanted, call.seq_len_kv // (2 * split.cols), MAX_SPLITS))
    return splits if is_small or splits > 1 else 0


def _fullness(rows: int, tile_rows: int) -> float:
    """The share of the rows of all tiles that exist."""
    return rows / (-(-rows // tile_rows) * tile_rows)


def _plain_launches(call: AttentionCall, view: View, fields: dict) -> list[Launch]:
    variant = variant_of(call, "forward")
    geometry = variant.geometry
    grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, view.query.shape[0])
    return [Launch(variant, "pa_forward", grid, geometry.threads, Forward(**fields), view.tensors, work_of(call, view))]


def _split_launches(call: AttentionCall, view: View, fields: dict, splits: int) -> list[Launch]:
    variant = variant_of(call, "split")
    geometry, batches = variant.geometry, view.query.shape[0]
    rows = batches * call.num_heads * call.seq_len_q
    parts = view.query.new_empty((splits, rows, call.head_dim_v + 2), dtype=torch.float32).view(-1)
    out, maxima, sums = parts.split([splits * rows * call.head_dim_v, splits * rows, splits * rows])
    fields = fields | {
        "splits": splits,
        "part_out": out.data_ptr(),
        "part_max": maxima.data_ptr(),
        "part_sums": sums.data_ptr(),
    }
    tiles = -(-call.groups * call.seq_len_q // geometry.rows)
    params, keep, work = Forward(**fields), (parts, *view.tensors), work_of(call, view)
    grid = (tiles * splits, call.num_kv_heads, batches)
    return [
        Launch(variant, "pa_forward_split", grid, geometry.threads, params, keep, work),
        Launch(variant, "pa_combine", (-(-rows // 4), 1, 1), 128, params, keep),
    ]
