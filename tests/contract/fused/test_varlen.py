"""Sequences of different lengths in one launch, packed one behind the other, in the emulation, against each alone."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_support.fused.device import emulated_card
from attn_support.fused.modes import deterministic as poisoned_memory
from attn_support.fused.packed import assert_each_alone, ends_of
from attn_support.oracle import gradients
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core.call import check_call
from pascal_attn_core.config import AttentionConfig
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.plan import Packed
from pascal_attn_core.routes.fused import find_plan
from pascal_attn_core.routes.route import Choice
from pascal_attn_core.routes.run import by, route_named

# Among them one without queries, one without keys, and one of a single token.
Q_LENGTHS, K_LENGTHS = [5, 130, 0, 1, 77, 20], [9, 200, 30, 1, 0, 64]
# Sums over so many keys, and over so many queries, are moved to the outputs on the way.
LONG = [9, 1300, 70], [5, 70, 1300]
RULES: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "alignment": "upper_left"},
    {"is_causal": True, "alignment": "lower_right"},
    {"window": (30, 7), "alignment": "upper_left"},
    {"window": (30, 7), "alignment": "lower_right"},
]


@pytest.fixture
def queued() -> Iterator[list[Launch]]:
    """The launches that the emulation has run."""
    with emulated_card() as kernels:
        yield kernels.queued


def _inputs(
    head_dim: int,
    dtype: torch.dtype,
    lengths: tuple[list[int], list[int]] = (Q_LENGTHS, K_LENGTHS),
    *,
    spare: int = 3,
    requires_grad: bool = False,
) -> list[Tensor]:
    """Query, key and value ``[1, heads, total, head_dim]``, heads inside tokens; the last ``spare`` tokens are NaN."""
    made = []
    for heads, each in ((4, lengths[0]), (2, lengths[1]), (2, lengths[1])):
        tokens = torch.randn(1, sum(each) + spare, heads, head_dim)
        tokens[:, sum(each) :] = torch.nan
        made.append(tokens.to(dtype).transpose(1, 2).requires_grad_(requires_grad))
    return made


def _run(
    inputs: list[Tensor],
    lengths: tuple[list[int], list[int]] = (Q_LENGTHS, K_LENGTHS),
    alignment: str = "upper_left",
    **rule: Any,
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs
    packed = Packed.of(*map(ends_of, lengths), query.device, lower_right=alignment == "lower_right")
    call = check_call(query, key, value, enable_gqa=True, **rule)
    plan = find_plan(call, AttentionConfig(), packed=packed)
    assert not isinstance(plan, list)
    with poisoned_memory():
        choice = Choice(route_named("fused"), "", plan)
        out, lse, *_ = by(choice, call, AttentionConfig(), with_lse=True, stats=None)
    assert lse is not None
    return out, lse


def _check(inputs: list[Tensor], lengths: tuple[list[int], list[int]], **rule: Any) -> None:
    """Output, lse and gradients against the definition of each sequence alone."""
    with poisoned_memory():
        assert_each_alone(*_run(inputs, lengths, **rule), inputs, lengths, **rule)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rule"), some(itertools.product([torch.float32, torch.float16], [64, 60], RULES), 5), ids=str
)
def test_each_sequence_gets_the_answer_and_the_gradients_it_has_alone(
    queued: list[Launch], dtype: torch.dtype, head_dim: int, rule: dict[str, Any]
) -> None:
    _check(_inputs(head_dim, dtype, requires_grad=True), (Q_LENGTHS, K_LENGTHS), **rule)
    apart = ["pa_delta", "pa_grad_query", "pa_grad_key_value"]  # for so few tiles within a band
    at_once = ["pa_delta_all", "pa_grad_all", *["pa_round_query"] * (dtype != torch.float32)]
    assert [launch.function for launch in queued] == ["pa_forward", *(apart if rule else at_once)]


def test_long_sums_do_too(queued: list[Launch]) -> None:
    _check(_inputs(40, torch.float32, LONG, requires_grad=True), LONG)


def test_launches_in_parts_give_the_same_bits() -> None:
    inputs = _inputs(64, torch.float32, spare=0, requires_grad=True)
    rule = {"is_causal": True, "alignment": "lower_right"}
    answers, counts = [], []
    for work in (1 << 39, 30_000_000, 2_000_000):
        with emulated_card(work_per_sm=work // 28) as kernels:
            out, lse = _run(inputs, **rule)
            answers.append([out, *gradients(out, inputs, torch.ones_like(out), lse)])
        counts.append(len(kernels.queued))
    assert counts[0] == 4
    assert counts[0] < counts[1] < counts[2]
    assert any(launch.params.first_tile for launch in kernels.queued)
    assert any(launch.params.first_batch for launch in kernels.queued)
    for others in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], others))
