"""diffusers' context parallelism with our attention, over two and four processes: the answer of one process."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from attn_support import fresh
from attn_support.parallel.processes import run_in
from attn_support.randomness import is_random

from pascal_attn_core import parallel
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention
from tools.families import families
from tools.families.family import Family
from tools.families.proof import outputs

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked"),
    pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none"),
]
MODELS = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel (text to video)",
    "WanTransformer3DModel (image to video)",
    "LTXVideoTransformer3DModel",
    "ChronoEditTransformer3DModel",
]
TWO: list[dict[str, Any]] = [
    {"ring_degree": 2},
    {"ulysses_degree": 2},
    {"ring_degree": 2, "ring_anything": True},
    {"ulysses_degree": 2, "ulysses_anything": True},
]
FOUR: list[dict[str, Any]] = [{"ring_degree": 4}, {"ring_degree": 2, "ulysses_degree": 2}]
TEXT = 9  # tokens of the families' texts: diffusers shares out even numbers only


def shared_out(name: str, *, even: bool) -> Family:
    """The family with inputs that can be shared out, and an output that can be gathered."""
    family = next(family for family in families() if family.name == name)

    def inputs(draw: Any) -> dict[str, Any]:
        given = {**family.inputs(draw), "return_dict": False}
        for key, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            if even and TEXT in value.shape:
                value = value.narrow(value.shape.index(TEXT), 0, TEXT - 1)
            given[key] = value[None] if name.startswith("Flux2") and key.endswith("_ids") else value
        return given

    return dataclasses.replace(family, inputs=inputs)


def distance(name: str, sharing: dict[str, Any], *, ours: str = "processor", first: bool = False) -> float:
    """Between the output with this sharing and that of one process, relative to its largest value."""
    family = shared_out(name, even=not any(key.endswith("anything") for key in sharing))
    model: Any = family.build()
    stock = outputs(family, model)
    steps = [lambda: model.enable_parallelism(config=diffusers.ContextParallelConfig(**sharing))]
    if ours:
        by_patch, by_processor = lambda: patch_attention(model), lambda: model.set_attn_processor(PascalAttnProcessor())
        steps.insert(0 if first else 1, by_patch if ours == "patch" else by_processor)
    for step in steps:
        step()
    return (outputs(family, model) - stock).abs().max().item() / stock.abs().max().item()


def _every_model(
    world: int, sharings: list[dict[str, Any]], measure: Callable[[str, dict[str, Any]], float], most: float, every: int
) -> None:
    def work(rank: int) -> dict[str, float]:
        pairs = list(itertools.product(MODELS, sharings))[::every]
        return {f"{name} {sharing}": measure(name, sharing) for name, sharing in pairs}

    for answer in run_in(world, work):
        assert isinstance(answer, dict), answer
        assert max(answer.values()) < most, answer


def _orders_and_mutants() -> None:
    flux, qwen = MODELS[0], MODELS[2]

    def work(rank: int) -> list[Any]:
        found = [distance(flux, TWO[way], ours=ours, first=True) for way in (0, 1) for ours in ("processor", "patch")]
        found.append(distance(qwen, TWO[0], ours="patch"))
        gathered = parallel._gathered_tokens
        parallel._gathered_tokens = lambda tensor, dim, lengths, ranks: torch.cat([tensor] * ranks.size, dim)
        wrong = distance(qwen, TWO[0])
        parallel._gathered_tokens = gathered
        try:
            stock = str(distance(flux, TWO[0], ours=""))
        except ValueError as error:
            stock = str(error)
        return [found, wrong, stock]

    for found, wrong, stock in run_in(2, work):
        assert max(found) < 2e-6
        assert wrong > 1e-3  # each process's part of the mask, applied to the keys of the other
        assert "return_lse" in stock  # diffusers' own backend of this name refuses a ring


def weight_gradients(family: Family, model: Any) -> list[torch.Tensor | None]:
    """Return the gradient of every parameter, from a fixed gradient of the output."""
    out = model(**family.arguments())[0]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(out, list(model.parameters()), grad, allow_unused=True))


def gradient_distance(name: str, sharing: dict[str, Any]) -> float:
    """The largest difference of a weight's gradient, summed over the processes, relative to its largest value."""
    family = shared_out(name, even=True)
    model: Any = family.build()
    right = weight_gradients(family, model)
    model.enable_parallelism(config=diffusers.ContextParallelConfig(**sharing))
    model.set_attn_processor(PascalAttnProcessor())
    differences = []
    for found, expected in zip(weight_gradients(family, model), right):
        if expected is not None:
            found = torch.zeros_like(expected) if found is None else found
            dist.all_reduce(found)
            size = expected.abs().max().item()
            differences.append((found - expected).abs().max().item() / size if size > 1e-6 else 0.0)
    assert len(differences) > 10
    return max(differences)


@pytest.mark.parametrize("every", ["1" if is_random() else "28"])
@fresh.alone
def test_the_answer_is_that_of_one_process(every: str) -> None:
    """By day of every model that diffusers shares out in some of the ways, every night in all; with gradients."""
    _every_model(2, TWO, distance, 2e-6, int(every))
    _every_model(4, FOUR, distance, 2e-6, int(every))
    _every_model(2, TWO, gradient_distance, 1e-5, int(every))
    _every_model(4, FOUR[1:], gradient_distance, 1e-5, int(every))
    _orders_and_mutants()
