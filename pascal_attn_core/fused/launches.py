"""From a call and its plan to kernel launches: which grid, which parameters. Nothing is launched or compiled here, so
all of it can be tested, and emulated, on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..lazy_mask import LazyMask
from .params import Forward, Params
from .plan import Plan
from .source import Variant

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a side of the band that cuts nothing


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
    stats = [t for t in (lse, log_sum) if t is not None]
    launches = []
    for view in views(call, out, *stats):
        fields = common_fields(call, view) | result_fields(view.rest[0], "o", "o")
        for name, stat in zip(("lse", "log_sum"), view.rest[1:]):
            fields |= result_fields(stat, name, "l")
        launches += (
            _split_launches(call, view, plan, fields) if plan.splits else _plain_launches(call, view, plan, fields)
        )
    return launches


def work_of(call: AttentionCall, view: View) -> int:
    """Multiplications of the two products, without what masks leave out."""
    scores = view.query.shape[0] * call.num_heads * call.seq_len_q * call.seq_len_kv
    return scores * (call.head_dim + call.head_dim_v)


def _plain_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry = plan.forward, plan.forward.geometry
    grid = (-(-call.seq_len_q // geometry.rows), call.num_heads, view.query.shape[0])
    return [Launch(variant, "pa_forward", grid, geometry.threads, Forward(**fields), view.tensors, work_of(call, view))]


def _split_launches(call: AttentionCall, view: View, plan: Plan, fields: dict) -> list[Launch]:
    variant, geometry, batches, splits = plan.forward, plan.forward.geometry, view.query.shape[0], plan.splits
    rows = batches * call.num_heads * call.seq_len_q
    # out [splits, rows, Dv], then the maximum and the sum [splits, rows] of each row
    parts = view.query.new_empty(splits * rows * (call.head_dim_v + 2), dtype=torch.float32)
    address, row_bytes = parts.data_ptr(), 4 * splits * rows
    fields |= {
        "splits": splits,
        "part_out": address,
        "part_max": address + row_bytes * call.head_dim_v,
        "part_sums": address + row_bytes * (call.head_dim_v + 1),
    }
    tiles = -(-call.groups * call.seq_len_q // geometry.rows)
    params, keep, work = Forward(**fields), (parts, *view.tensors), work_of(call, view)
    grid = (tiles * splits, call.num_kv_heads, batches)
    return [
        Launch(variant, "pa_forward_split", grid, geometry.threads, params, keep, work),
        Launch(variant, "pa_combine", (-(-rows // 4), 1, 1), 128, params, keep),
    ]
