"""Which calls the fused kernels take: reasons, one sentence each, from shapes, dtypes and strides alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import AttentionCall
from ...call.lazy_mask import LazyMask
from ..code.source import HEAD_DIMS
from ..geometry.gradient import generation_of
from ..geometry.plain import INT8_HEAD_DIMS
from ..geometry.tensor import FLOAT_MASK_HEAD_DIM
from .fields import UNBOUNDED, has_one_batch, rows_are_readable

GRADIENT_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEADS = 65535  # a grid's second and third dimension
# Offsets within the columns of a mask's tile, at most 128, are 32-bit numbers.
_MASK_STRIDE = 1 << 25


def call_reasons(call: AttentionCall, *, int8: bool = False) -> list[str]:
    """Why the kernels cannot take a call, whatever the device; empty = they can."""
    reasons = _common_reasons(call, HEAD_DIMS[-1])
    if call.query.dtype not in _DTYPES:
        reasons.append(f"the fused kernel takes float32, float16 and bfloat16, got {call.query.dtype}")
    if call.needs_grad and (call.softcap is not None or call.sinks is not None):
        reasons.append("the fused kernel has no gradients with softcap or attention sinks")
    reasons += _mask_reasons(call) + (_int8_reasons(call) if int8 else [])
    return reasons or _layout_reasons(call)


def tensor_reasons(call: AttentionCall, capability: tuple[int, int] | None, arch: str = "") -> list[str]:
    """Why the kernels on tensor cores, or on AMD's matrix units, cannot take a call on a device of this compute
    capability, or of AMD's architecture ``arch``; empty = they can."""
    generation = generation_of(capability, arch)
    if generation is None:
        found = arch or ("an unknown one" if capability is None else f"{capability[0]}.{capability[1]}")
        wanted = "AMD's matrix units need gfx11 or gfx12" if arch else "tensor cores need compute capability 7.0"
        return [f"{wanted}, got {found}"]
    reasons = [*_common_reasons(call, generation.head_dims[-1]), *_mask_reasons(call)]
    if str(call.query.dtype).removeprefix("torch.") not in generation.dtypes:
        reasons.append(f"the kernel on tensor cores takes {' and '.join(generation.dtypes)}, got {call.query.dtype}")
    of_gradients = max(generation.gradient_head_dims, default=0)
    if call.needs_grad and call.softcap is not None and max(call.head_dim, call.head_dim_v) > of_gradients:
        ends = f"end at head_dim {of_gradients}" if of_gradients else "have no kernel on AMD's cards"
        reasons.append(f"with softcap its gradients {ends}")
    adds = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    if (adds or call.scale <= 0) and max(call.head_dim, call.head_dim_v) > FLOAT_MASK_HEAD_DIM:
        what = "a float mask" if adds else f"scale {call.scale:g}"
        reasons.append(f"with {what} its head_dim ends at {FLOAT_MASK_HEAD_DIM}")
    if isinstance(call.attn_mask, Tensor) and call.batch_size * call.num_heads > _HEADS:
        reasons.append(f"{call.batch_size * call.num_heads} heads of all batch elements > {_HEADS} with attn_mask")
    return reasons or _layout_reasons(call)


def _common_reasons(call: AttentionCall, largest: int) -> list[str]:
    """largest: head_dim that a kernel has."""
    reasons = []
    if torch._C._are_functorch_transforms_active():
        reasons.append("torch.func transforms need an operator of torch")
    if call.dropout_p:
        reasons.append("the fused kernel has no dropout")
    if call.score_rule is not None:
        reasons.append("the fused kernel has no score_mod")
    if call.is_empty or not call.head_dim:
        reasons.append("the call is empty")
    elif max(call.head_dim, call.head_dim_v) > largest:
        reasons.append(f"head_dim {max(call.head_dim, call.head_dim_v)} > {largest}")
    elif call.needs_grad and max(call.head_dim, call.head_dim_v) > GRADIENT_HEAD_DIM:
        reasons.append(f"its gradients end at head_dim {GRADIENT_HEAD_DIM}, got {max(call.head_dim, call.head_dim_v)}")
    if call.head_dim % 4 or call.head_dim_v % 4:
        reasons.append(f"head_dim must be a multiple of 4, got {call.head_dim} and {call.head_dim_v}")
    if call.num_heads > _HEADS:
        reasons.append(f"{call.num_heads} heads > {_HEADS}")
    if max(call.seq_len_q, call.seq_len_kv) >= UNBOUNDED:
        reasons.append(f"sequences must be shorter than {UNBOUNDED}, got {call.seq_len_q} and {call.seq_len_kv}")
    return reasons


def _mask_reasons(call: AttentionCall) -> list[str]:
    mask = call.attn_mask
    if mask is None:
        return []
    if isinstance(mask, LazyMask):
        return ["attn_mask is a rule, not a tensor"]
    reasons = []
    if mask.dtype not in (torch.bool, torch.float32, call.query.dtype):
        reasons.append(f"attn_mask is {mask.dtype} and query {call.query.dtype}")
    if mask.dtype == torch.bool and call.scale <= 0:
        reasons.append(f"a bool mask needs a positive scale, got {call.scale:g}")
    if call.needs_mask_grad:
        reasons.append("the fused kernel gives no gradient of attn_mask")
    steps = [step for size, step in zip(mask.shape, mask.stride()) if size > 1]
    # The columns of a tile are keys; in the kernel that gives the gradients of key and value they are queries.
    columns = [step for size, step in zip(mask.shape[-2:], mask.stride()[-2:]) if size > 1]
    if any(step >= 1 << 40 for step in steps) or any(step >= _MASK_STRIDE for step in columns):
        reasons.append("the strides of attn_mask are too large")
    return reasons


def _int8_reasons(call: AttentionCall) -> list[str]:
    largest, heads, mask = max(call.head_dim, call.head_dim_v), call.batch_size * call.num_heads, call.attn_mask
    most, is_tensor = INT8_HEAD_DIMS[-1], isinstance(mask, Tensor)
    checks = (
        (call.needs_grad, "the int8 mode has no gradients"),
        (most < largest <= HEAD_DIMS[-1], f"the int8 mode's head_dim ends at {most}, got {largest}"),
        (isinstance(mask, Tensor) and mask.dtype != torch.bool, "the int8 mode has no float mask"),
        (is_tensor and heads > _HEADS, f"{heads} heads of all batch elements > {_HEADS} with attn_mask"),
        (call.softcap is not None or call.sinks is not None, "the int8 mode has no softcap and no attention sinks"),
        (call.scale <= 0, f"the int8 mode needs a positive scale, got {call.scale:g}"),
    )
    return [why for holds, why in checks if holds]


def _layout_reasons(call: AttentionCall) -> list[str]:
    unreadable = [name for name in ("query", "key", "value") if not rows_are_readable(getattr(call, name))]
    reasons = [f"{name}'s rows must be contiguous and begin at multiples of 4 elements" for name in unreadable]
    if not reasons and len(call.batch) > 1 and not has_one_batch(call):
        reasons.append("its batch dimensions must be one by their strides")
    return reasons
