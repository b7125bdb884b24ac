"""Runs a module on a few real tokens and on parts of them, to see whether they affect each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..reference.checks import gap, tolerance
from .run import Inputs, NotTokenwise


def probe(fn: Callable[..., Any], inputs: Inputs, count: int, dtypes: set[torch.dtype]) -> float:
    """Run ``fn`` on ``count`` tokens of the input, half of them replaced by noise, and raise NotTokenwise if they
    affect each other. Returns how far equal results may be apart for the dtypes of all tensors that hold tokens,
    relative to the largest value."""
    samples = [_sample(tensor, count) for tensor in inputs.tokens.values()]
    whole = inputs.call(fn, [sample.clone() for sample in samples])
    relative = tolerance(*dtypes)
    limit = relative * gap(whole, whole).largest
    positions = torch.arange(count, device=whole.device)
    for poisoned in (positions < count // 2, positions >= count // 2, positions % 2 == 0, positions % 2 == 1):
        others = [_poison(sample, poisoned) for sample in samples]
        out = inputs.call(fn, others)
        if gap(out[..., ~poisoned, :], whole[..., ~poisoned, :]).error > limit:
            raise NotTokenwise("mixes tokens: one changes with its neighbours' values")
    for length in {2, max(2, count // 3), max(2, count // 2)}:
        for start in {0, count - length}:
            out = inputs.call(fn, [sample[..., start : start + length, :].clone() for sample in samples])
            if gap(out, whole[..., start : start + length, :]).error > limit:
                raise NotTokenwise("a token's result depends on its position or on how many tokens there are")
    return relative


def probe_gradients(fn: Callable[..., Any], module: nn.Module, inputs: Inputs, count: int, relative: float) -> None:
    """Raise NotTokenwise unless the gradients of two halves add up to those of all ``count`` tokens."""
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
        if gap(parts, all_of).relative > relative:
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
    is_float = sample.is_floating_point()
    return sample.masked_fill(where[:, None].to(sample.device), math.nan) if is_float else sample.clone()
