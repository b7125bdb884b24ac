"""The first use of a variant on a device is checked against the definition on a small call: a kernel that gives another
answer on this card, with this driver, is given up with a warning instead of being believed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..call import AttentionCall, check_call, empty_output
from ..device import DeviceInfo, device_info
from ..reference import reference_sdpa
from . import kernels
from .launches import Launch, forward_launches
from .launches_backward import backward_launches
from .launches_int8 import int8_launches
from .source import Variant

# Far above any rounding, far below any mistake in which element goes where.
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_INT8_TOLERANCE = 0.1
Run = Callable[[list[Launch]], object]
_verified: set[tuple[int, Variant]] = set()
_lock = threading.RLock()


def ensure(variants: list[Variant], index: int) -> None:
    """Load variants and check those that are new on this device. While a graph is being captured they are only loaded.

    Raises:
        KernelUnavailable: one cannot be loaded, or gives wrong answers here.
    """
    for variant in variants:
        if (index, variant) in _verified:
            continue
        kernels.functions(index, variant)
        if torch.cuda.is_current_stream_capturing():
            continue
        with _lock, torch.cuda.device(index), torch.no_grad():
            if (index, variant) not in _verified:
                error = largest_error(variant, torch.device("cuda", index), lambda some: kernels.run(some, index))
                if not error <= (_INT8_TOLERANCE if variant.kind == "int8" else _TOLERANCE[variant.dtype]):
                    kernels.give_up(index, variant, f"{variant.name} differs from the definition by {error:.2g}")
                    raise kernels.KernelUnavailable(f"{variant.name} differs from the definition by {error:.2g}")
                _verified.add((index, variant))


def largest_error(variant: Variant, device: torch.device, run: Run) -> float:
    """Largest difference from the definition, relative to the largest number, on a call that fills two tiles of rows
    and of keys in part. ``run`` executes launches; the random state of torch is left alone."""
    call = sample_call(variant, device)
    info = device_info(device) if device.type == "cuda" else DeviceInfo("cuda", num_sms=28)
    wide = [t.float() for t in (call.query, call.key, call.value)]
    if variant.kind.startswith("grad"):
        return _gradient_error(variant, call, wide, info, run)
    out = empty_output(call).fill_(float("nan"))
    if variant.kind == "int8":
        run(int8_launches(call, out))
    else:
        run(_forward(call, out, None, info, split=variant.kind == "split"))
    return _difference([out], [_reference(call, wide)[0]])


def sample_call(variant: Variant, device: torch.device) -> AttentionCall:
    """A causal call with two query heads per key head that needs exactly this variant."""
    geometry, dim = variant.geometry, variant.head_dim - (4 if variant.padded else 0)
    rows = 3 if variant.kind == "split" else geometry.rows + 5
    keys = 5 * geometry.cols if variant.kind == "split" else geometry.cols + 9
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, variant.dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    mask = None
    if variant.mask != "none":
        mask = numbers(rows, keys)
        mask = mask > 0 if variant.mask == "bool" else mask
    tensors = numbers(1, 2, rows, dim), numbers(1, 1, keys, dim), numbers(1, 1, keys, dim)
    return check_call(*tensors, mask, is_causal=True, enable_gqa=True, alignment="lower_right")


def _forward(call: AttentionCall, out: Tensor, lse: Tensor | None, info: DeviceInfo, *, split: bool) -> list[Launch]:
    has_bias = call.attn_mask is not None and call.attn_mask.dtype != torch.bool
    log_sum = torch.empty_like(lse) if lse is not None and has_bias else None
    return forward_launches(call, out, lse, log_sum, replace(info, num_sms=1000), may_split=split)


def _reference(call: AttentionCall, wide: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32."""
    mask = call.attn_mask
    assert mask is None or isinstance(mask, Tensor)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    query, key, value = wide
    return reference_sdpa(query, key, value, mask, is_causal=True, enable_gqa=True, alignment="lower_right")


def _gradient_error(variant: Variant, call: AttentionCall, wide: list[Tensor], info: DeviceInfo, run: Run) -> float:
    with torch.enable_grad():
        leaves = [t.requires_grad_() for t in wide]
        out, lse = _reference(call, leaves)
        expected = torch.autograd.grad(out.sum(), leaves)
    out, lse = (t.detach().contiguous() for t in (out.to(call.query.dtype), lse))
    log_sum = torch.zeros_like(lse) if variant.mask == "float" else None
    grads = [torch.full_like(t, float("nan")) for t in (call.query, call.key, call.value)]
    query, key, value = grads
    launches = backward_launches(call, torch.ones_like(out), out, lse, log_sum, None, (query, key, value))
    kinds = ("pa_delta", f"pa_{variant.kind}")
    run([launch for launch in launches if launch.function in kinds])
    chosen = slice(1, 3) if variant.kind == "grad_key_value" else slice(0, 1)
    return _difference(grads[chosen], list(expected[chosen]))


def _difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    largest = torch.stack([e.abs().max() for e in expected]).max()
    errors = torch.stack([(a.float() - e).abs().max() for a, e in zip(actual, expected)])
    return (errors.nan_to_num(nan=torch.inf).max() / largest).item()
