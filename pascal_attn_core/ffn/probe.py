"""Runs a module on a few real tokens, to catch what the rules of operators cannot see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .run import Inputs, NotTokenwise

# Sums over the same numbers in another order differ by this fraction of the largest value. The operators are proven
# by then: these limits catch what the rules cannot see, not rounding.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
_TF32_TOLERANCE = 5e-3


def probe(fn: Callable[..., Any], inputs: Inputs, count: int, dtypes: set[torch.dtype]) -> float:
    """Run ``fn`` on ``count`` tokens of the input, half of them replaced by noise, and check that they do not affect
    each other.

    Args:
        dtypes: of all tensors that hold tokens.
    Returns:
        How far results may be apart, relative to the largest.
    Raises:
        NotTokenwise: they do.
    """
    samples = [_sample(tensor, count) for tensor in inputs.tokens.values()]
    whole = inputs.call(fn, [sample.clone() for sample in samples])
    relative = relative_limit(dtypes)
    limit = relative * _largest(whole)
    positions = torch.arange(count, device=whole.device)
    for poisoned in (positions < count // 2, positions >= count // 2, positions % 2 == 0, positions % 2 == 1):
        others = [_poison(sample, poisoned) for sample in samples]
        out = inputs.call(fn, others)
        if _differ(out[..., ~poisoned, :], whole[..., ~poisoned, :], limit):
            raise NotTokenwise("mixes tokens: one changes with its neighbours' values")
    for length in {2, max(2, count // 3), max(2, count // 2)}:
        for start in {0, count - length}:
            out = inputs.call(fn, [sample[..., start : start + length, :].clone() for sample in samples])
            if _differ(out, whole[..., start : start + length, :], limit):
                raise NotTokenwise("a token's result depends on its position or on how many tokens there are")
    return relative


def probe_gradients(fn: Callable[..., Any], module: nn.Module, inputs: Inputs, count: int, relative: float) -> None:
    """Check that the gradients of two halves add up to those of all ``count`` tokens.

    Raises:
        NotTokenwise: they do not.
    """
    samples = [_sample(tensor, count) for tensor in inputs.tokens.values()]
    wanted = [tensor.requires_grad for tensor in inputs.tokens.values()]
    plain = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
    parameters = [parameter for parameter in plain if parameter.requires_grad]

    def gradients(start: int, stop: int) -> list[Tensor]:
        parts = [sample[..., start:stop, :].clone().requires_grad_(wants) for sample, wants in zip(samples, wanted)]
        leaves = [part for part in parts if part.requires_grad] + parameters
        with torch.enable_grad():
            out = inputs.call(fn, parts)
        if not leaves or not out.requires_grad:
            return []
        ramp = torch.arange(start, stop, dtype=torch.float32, device=out.device)[:, None]
        weight = torch.sin(3 * ramp + torch.arange(out.shape[-1], device=out.device)).to(out.dtype)
        found = torch.autograd.grad(out, leaves, weight.expand_as(out).contiguous(), allow_unused=True)
        return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]

    whole, one, two = gradients(0, count), gradients(0, count // 2), gradients(count // 2, count)
    tokens = sum(wanted)
    for place, (all_of, first, second) in enumerate(zip(whole, one, two)):
        parts = torch.cat([first, second], dim=-2) if place < tokens else first + second
        if _differ(parts, all_of, relative * _largest(all_of)):
            raise NotTokenwise("has a backward pass whose gradients over slices do not add up to those of the whole")


def _sample(tensor: Tensor, count: int) -> Tensor:
    """[..., count, C] out of [..., T, C]: the first and the last tokens, every second one replaced by noise."""
    tensor = tensor.detach()
    head, tail = tensor[..., : count // 2, :], tensor[..., tensor.shape[-2] - (count - count // 2) :, :]
    sample = torch.cat([head, tail], dim=-2)
    if not sample.is_floating_point():
        return sample
    sample = torch.nan_to_num(sample, posinf=0.0, neginf=0.0)
    noise = torch.randn(sample[..., 1::2, :].shape, generator=torch.Generator().manual_seed(0)).to(sample)
    sample[..., 1::2, :] = noise * sample.float().square().mean().sqrt().clamp(1e-3, 1e3).to(sample.dtype)
    return sample


def _poison(sample: Tensor, where: Tensor) -> Tensor:
    if not sample.is_floating_point():
        return sample.clone()
    return sample.masked_fill(where[:, None].to(sample.device), float("nan"))


def relative_limit(dtypes: set[torch.dtype]) -> float:
    """How far results may be apart that were computed with tensors of ``dtypes``, relative to the largest."""
    relative = max(_TOLERANCE.get(dtype, 0.25) for dtype in dtypes if dtype.is_floating_point)
    if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
        relative = max(relative, _TF32_TOLERANCE)
    return relative


def is_alike(out: Tensor, expected: Tensor, relative: float) -> bool:
    """Whether ``out`` equals the finite values of ``expected`` up to rounding."""
    return not _differ(out, expected, relative * _largest(expected))


def _largest(values: Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return finite.abs().max().item() if finite.numel() else 0.0


def _differ(out: Tensor, expected: Tensor, limit: float) -> bool:
    if out.shape != expected.shape:
        return True
    finite = torch.isfinite(expected)
    error = (out - expected).abs()[finite]
    return bool(error.numel()) and not error.max().item() <= limit
