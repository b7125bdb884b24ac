"""A call as the kernels see it: views with one batch dimension, and the fields of the parameters that all kernels have
in common."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30  # a side of the band that cuts nothing
# Offsets within a tile are 32-bit numbers: those of 128 rows of float16, in bytes, on AMD's matrix units.
MOST_STRIDE = 1 << 24


def rows_are_readable(tensor: Tensor, elements: int = 4) -> bool:
    """Whether the kernels can read a tensor in place, ``elements`` at a time."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % (elements * tensor.element_size()):
        return False
    innermost = 0
    for size, stride in zip(tensor.shape, strides):
        if size > 1:
            if stride % elements:
                return False
            innermost = stride
    return innermost < MOST_STRIDE


class View(NamedTuple):
    """A call with its leading dimensions merged into one: query ``[B, Hq, L, D]``, key ``[B, Hkv, S, D]``, value
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


def view_of(call: AttentionCall, *rest: Tensor) -> View:
    """The call with one batch dimension; ``rest`` are ``[*batch, H, ...]`` tensors beside it. A RuntimeError where
    their strides have no such view."""
    mask: Any = call.attn_mask
    keys = (*call.batch, call.num_kv_heads, call.seq_len_kv)
    query = _expanded(call.query, (*call.batch, call.num_heads, call.seq_len_q, call.head_dim))
    key = _expanded(call.key, (*keys, call.head_dim))
    value = _expanded(call.value, (*keys, call.head_dim_v))
    if mask is not None:
        mask = _expanded(mask, (*call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv))
    lead = len(call.batch)
    if lead == 1:
        return View(query, key, value, mask, rest)
    if call.query.dim() == 2:
        rest = tuple(t[None] for t in rest)
    given = [query, key, value, *([] if mask is None else [mask]), *rest]
    query, key, value, *others = (t.view(-1, *t.shape[lead:]) for t in given)
    return View(query, key, value, None if mask is None else others.pop(0), tuple(others))


def has_one_batch(call: AttentionCall) -> bool:
    """Whether the strides of a call's tensors let its batch dimensions be one."""
    try:
        view_of(call)
    except RuntimeError:
        return False
    return True


def _expanded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.expand(shape)


def band_of(call: AttentionCall) -> tuple[int, int]:
    """(low, high): query i sees keys i + low ... i + high."""
    low = -UNBOUNDED if call.left is None else call.offset - call.left
    high = UNBOUNDED if call.right is None else call.offset + call.right
    return max(-UNBOUNDED, min(UNBOUNDED, low)), max(-UNBOUNDED, min(UNBOUNDED, high))


def steps(tensor: Tensor) -> list[int]:
    """The strides in elements; 0 for a dimension of length 1."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride())]


def common_fields(call: AttentionCall, view: View) -> dict[str, int | float]:
    """The parameters that every kernel has, except for its results."""
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
    return fields | {f"{prefix}s": tokens} if columns else fields


def softcap_fields(call: AttentionCall) -> dict[str, float]:
    """Capped scores are softcap * tanh(...): the kernel takes the tanh, and scales by softcap. With scale 0 all are
    0."""
    if call.softcap is None or call.scale == 0:
        return {}
    scale = call.softcap
    return {"scale": scale, "scale_log2": scale * LOG2_E, "tanh_scale": 2 * LOG2_E * call.scale / call.softcap}


def work_of(call: AttentionCall) -> int:
    """Multiplications of the two products, as if no mask left anything out."""
    scores = call.batch_size * call.num_heads * call.seq_len_q * call.seq_len_kv
    return scores * (call.head_dim + call.head_dim_v)


def mask_bits(call: AttentionCall, view: View, words: int) -> Tensor:
    """Memory for a mask's bits (``mask_bits.cuh``), ``words`` for each row. Repetitions in a mask are not repeated."""
    assert view.mask is not None
    of_batch, of_head, of_query, _ = steps(view.mask)
    batches = view.query.shape[0] if of_batch else 1
    heads, rows = (call.num_heads if of_head else 1), (call.seq_len_q if of_query else 1)
    return view.query.new_empty((batches, heads, rows, words), dtype=torch.int32)


def mask_tiles(
    bits: Tensor, units: int, row_tiles: int, key_tiles: int
) -> tuple[Tensor, dict[str, int], tuple[int, int, int]]:
    """Memory for a flag of each of these tiles, of ``units`` heads or groups of heads, the fields that name flags and
    the bits of :func:`mask_bits`, and the grid of the kernel that writes both."""
    flags = bits.new_empty((bits.shape[0], units, row_tiles, key_tiles), dtype=torch.uint8)
    bits_b, bits_h, bits_q, _ = steps(bits)
    flags_b, flags_h, flags_q, _ = steps(flags)
    fields = {
        "mask_bits": bits.data_ptr(), "bits_b": bits_b, "bits_h": bits_h, "bits_q": bits_q,
        "flags": flags.data_ptr(), "flags_b": flags_b, "flags_h": flags_h, "flags_q": flags_q,
        "mask_heads": units, "mask_rows": bits.shape[2],
    }  # fmt: skip
    return flags, fields, (key_tiles, row_tiles, bits.shape[0] * units)


def mask_bits_bytes(call: AttentionCall) -> int:
    """Memory that the bits of a call's mask take, about."""
    mask = call.attn_mask
    if not isinstance(mask, Tensor):
        return 0
    unique = math.prod(size for size, step in zip(mask.shape[:-1], mask.stride()[:-1]) if step)
    return unique * (-(-call.seq_len_kv // 64) * 8)
