"""How far a kernel's answers are from the definition's, on a small call: checked at the first use of each kernel on a
device. The definition is computed in float64 on a CPU: that takes no memory of the device, which may be full, no handle
of cuBLAS's, and no flag of the process (TF32) changes its numbers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall, check_call, empty_output
from ...reference import allowed_keys, reference_sdpa
from ...reference.checks import gap
from ..code import kinds
from ..code.compilation import Compilation, DtypeVariant, GgufLinearVariant
from ..code.source import Variant
from ..launch import int8_definition
from ..launch.backward import backward_launches
from ..launch.forward import forward_launches
from ..launch.int8 import int8_launches
from ..launch.packed import packed_launches
from ..launch.plan import Packed, Plan, Shape, key_tiles, plan_call
from ..launch.stream_k import Piece, Pieces
from . import verify_linear
from .verify_linear import Run

# From what the same words give with another exp2: a probability that rounds the other way moves by 1/255.
_INT8_TOLERANCE = 0.01
# As many multiprocessors as make the keys of a call with few rows many parts.
_MANY_SMS = 1000


def tolerance(variant: Compilation) -> float:
    """The largest :func:`largest_error` of a kernel that is right."""
    is_int8 = isinstance(variant, Variant) and variant.kind == "int8"
    return _INT8_TOLERANCE if is_int8 else math.sqrt(torch.finfo(getattr(torch, variant.dtype)).eps)


def largest_error(variant: Compilation, device: torch.device, run: Run, keys: int | None = None) -> float:
    """Largest difference from the definition, relative to the largest number, on a call that fills two tiles of rows
    and of keys in part, or has so many ``keys``, unless the variant's blocks are listed. ``run`` executes launches; the
    random state of torch is left alone."""
    if isinstance(variant, DtypeVariant):
        is_expansion = variant.kind == kinds.GGUF_EXPAND
        of_kind = verify_linear.expansion_error if is_expansion else verify_linear.largest_error
        return of_kind(variant, device, run)
    if isinstance(variant, GgufLinearVariant):
        return verify_linear.product_error(variant, device, run)
    assert isinstance(variant, Variant)
    call = sample_call(variant, device, None if variant.is_even else keys)
    if variant.is_gradient:
        return _gradient_error(variant, call, run)
    out = empty_output(call).fill_(float("nan"))
    if variant.kind == "int8":
        return _int8_error(variant, call, out, run)
    packed, parts = _sequences(variant, call)
    plan = Plan(variant, _splits(variant, call), packed=packed, pieces=_pieces(variant, call))
    run(packed_launches(forward_launches(call if packed is None else replace(call, offset=0), plan, out), packed))
    return gap(out.cpu(), torch.cat([_reference(part)[0] for part in parts], dim=-2)).relative


def _on_cpu(call: AttentionCall, wide: torch.dtype | None = torch.float64) -> AttentionCall:
    """The call on a CPU; its floating numbers as ``wide``, None = as they are."""

    def moved(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.to("cpu", wide if tensor.is_floating_point() else None)

    tensors = ("query", "key", "value", "attn_mask", "sinks")
    return replace(call, **{name: moved(getattr(call, name)) for name in tensors})


def _int8_error(variant: Variant, call: AttentionCall, out: Tensor, run: Run) -> float:
    """From the same rounding on a CPU, of the output and of lse. Keys behind the first tile have larger scores, so that
    sums are rescaled; some values are smaller with their mean than without."""
    call = replace(call, key=call.key.clone(), value=call.value + 0.5)
    call.key[..., variant.geometry.cols :, :] *= 9
    call.value[..., 1::16, :] *= 0.02
    lse = torch.full_like(out[..., 0], float("nan"), dtype=torch.float32)
    run(int8_launches(call, Plan(variant), out, lse))
    right = torch.empty(out.shape, device="cpu"), torch.empty(lse.shape, device="cpu")
    int8_definition.compute(_on_cpu(call, None), *right, variant.arch)
    return max(gap(found.cpu(), expected).relative for found, expected in zip((out, lse), right))


def _splits(variant: Variant, call: AttentionCall) -> int:
    if variant.on_tensor_cores:
        return 2 if variant.is_small else 0
    if not variant.is_small:
        return 2 if variant.cuts_keys else 0
    return plan_call(call, _MANY_SMS, arch=variant.arch).splits


def _pieces(variant: Variant, call: AttentionCall) -> Pieces | None:
    """A list of blocks for four tiles of rows: one tile is not listed, one is whole, and two with their keys in two and
    in three parts, whose blocks do not come in their order."""
    if not variant.is_even:
        return None
    of_first, of_last = key_tiles(Shape.of(call), variant.geometry)
    listed = [Piece(2, 2, of_first, 0, 1, 2), Piece(1, 0, of_last), Piece(2, 0, 2, 0, 0, 2)]
    listed += [Piece(3, 3, of_last, 2, 2, 3), Piece(3, 0, 1, 2, 0, 3), Piece(3, 1, 3, 2, 1, 3)]
    return Pieces(1, tuple(listed))


def _sequences(variant: Variant, call: AttentionCall) -> tuple[Packed | None, list[AttentionCall]]:
    """The two sequences in the tokens of a call for kernels that keep sequences apart, and each as a call on a CPU; for
    others None, and the call on a CPU."""
    here = _on_cpu(call)
    if not variant.traits.is_packed:
        return None, [here]
    q_ends, k_ends = ([0, length - 9, length] for length in (call.seq_len_q, call.seq_len_kv))
    rules: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": here.sinks}
    parts = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(q_ends), itertools.pairwise(k_ends)):
        query, key, value = here.query[..., q0:q1, :], here.key[..., k0:k1, :], here.value[..., k0:k1, :]
        parts.append(check_call(query, key, value, is_causal=True, enable_gqa=True, alignment="lower_right", **rules))
    return Packed.of(q_ends, k_ends, call.query.device, lower_right=True), parts


def sample_call(variant: Variant, device: torch.device, keys: int | None = None) -> AttentionCall:
    """A causal call with two query heads per key head that needs exactly this variant. keys: instead of those of a tile
    and some of the next one's."""
    geometry, dim = variant.geometry, variant.head_dim - (4 if variant.padded else 0)
    rows = 3 if variant.is_small else geometry.rows + 5
    if keys is None:
        keys = 5 * geometry.cols if variant.cuts_keys else geometry.cols + 9
        if variant.is_even:
            keys += geometry.rows
        if variant.is_gradient and variant.gradients.stop == 3:  # the rows of its tiles are keys
            rows, keys = keys, rows
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, variant.dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    mask = None
    if variant.mask != "none" and not variant.traits.is_packed:
        mask = numbers(rows, keys)
        mask = mask > 0 if variant.mask == "bool" else mask
    tensors = numbers(1, 2, rows, dim), numbers(1, 1, keys, dim), numbers(1, 1, keys, dim)
    # Without a mask, kernels that add one serve negative scales.
    scale = -0.1 if variant.mask == "float" and mask is None else None
    rules: dict[str, Any] = {}
    if variant.traits.is_capped:
        rules["softcap"] = 2.0
    if variant.traits.is_capped and not variant.on_tensor_cores:
        rules["sinks"] = torch.tensor([0.5, 3.0], device=device)
    return check_call(*tensors, mask, is_causal=True, scale=scale, enable_gqa=True, alignment="lower_right", **rules)


def _reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype of a :func:`sample_call`."""
    rules: dict[str, Any] = {"scale": call.scale, "is_causal": True, "enable_gqa": True, "alignment": "lower_right"}
    rules |= {"attn_mask": call.attn_mask, "softcap": call.softcap, "sinks": call.sinks}
    return reference_sdpa(call.query, call.key, call.value, **rules)


DELTAS = ("pa_delta", "pa_tensor_delta")
RANGES = (1, 2)  # of the columns, see ``Plan``


def _gradient_error(variant: Variant, call: AttentionCall, run: Run) -> float:
    packed, parts = _sequences(variant, call)
    out, lse, *expected = (torch.cat(tensors, dim=2) for tensors in zip(*map(_gradients_of, parts)))
    call = call if packed is None else replace(call, offset=0)
    out, lse = out.to(call.query), lse.to(call.query.device, torch.float32)
    log_sum = torch.zeros_like(lse) if call.has_bias else None
    has_ranges = variant.on_tensor_cores and packed is None and call.attn_mask is None
    errors = []
    for ranges in RANGES[: 1 + has_ranges]:  # on plain cores they are batches to the kernel
        shapes = ((*(ranges,) * (ranges > 1), *t.shape) for t in (call.query, call.key, call.value))
        query, key, value = (call.query.new_full(shape, float("nan")) for shape in shapes)
        plan = Plan(variant, 0, all_gradients(variant), packed, ranges=(ranges, ranges))
        launches = backward_launches(call, plan, _grad_out(call), out, lse, log_sum, None, (query, key, value))
        launches = packed_launches(launches, packed)
        run([launch for launch in launches if launch.variant == variant or launch.function in DELTAS])
        pairs = list(zip((query, key, value), expected))[variant.gradients]
        errors += [gap(found.cpu().sum_to_size(right.shape), right).relative for found, right in pairs]
    return max(errors)


def all_gradients(variant: Variant) -> tuple[Variant, ...]:
    """The variants that compute the gradients of query, key and value, of which this is one."""
    if variant.gradients == slice(0, 3):
        return (variant,)
    of_query, of_key = (replace(variant, kind=kinds.sibling(variant.kind, of_keys=keys)) for keys in (False, True))
    return of_query, of_key


def _gradients_of(call: AttentionCall) -> tuple[Tensor, ...]:
    """(out, lse, the gradients of query, key and value) in the dtype of a :func:`sample_call`."""
    out, lse = _reference(call)
    return out, lse, *expected_gradients(call, out, lse)


def _grad_out(call: AttentionCall) -> Tensor:
    """A gradient of the output of a :func:`sample_call`, whose columns and rows all differ."""
    return call.query.flip(-1)


def expected_gradients(call: AttentionCall, out: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients by query, key and value of a :func:`sample_call`, for :func:`_grad_out`, in its dtype, from its
    results, written out: autograd would wait for the thread that may be waiting for this check."""
    query, key, value = call.query, call.key, call.value  # the two query heads have one key head, which broadcasts
    mask: Any = call.attn_mask
    scores = query @ key.mT * call.scale
    slope = torch.ones_like(scores)
    if call.softcap is not None:
        tanh = torch.tanh(scores / call.softcap)
        scores, slope = tanh * call.softcap, 1 - tanh * tanh
    rule: dict[str, Any] = {"is_causal": True, "alignment": "lower_right", "device": query.device}
    allowed = allowed_keys(call.seq_len_q, call.seq_len_kv, **rule)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    probs = (scores - lse[..., None]).exp().masked_fill(~allowed, 0.0)
    grad_out = _grad_out(call)
    grad_scores = probs * (grad_out @ value.mT - (grad_out * out).sum(dim=-1, keepdim=True)) * slope * call.scale
    per_head = grad_scores.mT @ query, probs.mT @ grad_out
    return [grad_scores @ key, *(grad.sum(dim=1, keepdim=True) for grad in per_head)]
