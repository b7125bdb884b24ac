"""Packed sequences of different lengths in one launch of the fused kernel, on a real card."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_support.fused.packed import assert_each_alone, ends_of
from torch import Tensor

from pascal_attn_core.config import default_config
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.observe import report

pytestmark = pytest.mark.gpu
Q_LENGTHS, K_LENGTHS = [5, 1300, 0, 1, 77, 200], [9, 2000, 30, 1, 0, 640]
RULES: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (300, 70)}]


@pytest.fixture(autouse=True)
def _by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fused route on any card."""
    monkeypatch.setenv("PASCAL_ATTN_ROUTE", "fused")
    default_config.cache_clear()
    yield
    monkeypatch.undo()
    default_config.cache_clear()


def _inputs(head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value ``[1, heads, total, head_dim]``, two query heads per key head, and three spare tokens."""
    return [
        torch.randn(1, heads, sum(lengths) + 3, head_dim, device="cuda").to(dtype).requires_grad_()
        for heads, lengths in ((4, Q_LENGTHS), (2, K_LENGTHS), (2, K_LENGTHS))
    ]


def _attend(inputs: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """(out ``[1, heads, total, head_dim]``, lse)"""
    tokens = (t[0].transpose(0, 1).contiguous() for t in inputs)
    ends = [torch.tensor(ends_of(n), dtype=torch.int32, device="cuda") for n in (Q_LENGTHS, K_LENGTHS)]
    out, lse, _ = flash_attn_varlen_func(*tokens, *ends, 1300, 2000, **options, return_attn_probs=True)
    return out.transpose(0, 1)[None], lse[None]


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 60, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_sequence_gets_the_answer_and_the_gradients_it_has_alone(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any]
) -> None:
    inputs = _inputs(head_dim, dtype)
    rule = {"is_causal": options.get("causal", False), "window": options.get("window_size"), "alignment": "lower_right"}
    with report.record() as seen:
        out, lse = _attend(inputs, **options)
    ((kind, stats),) = seen.calls.items()
    assert (kind.route, stats.count) == ("fused", 1)
    assert kind.why == "6 sequences of different lengths in one launch"
    assert_each_alone(out, lse, inputs, (Q_LENGTHS, K_LENGTHS), **rule)


def test_gradients_are_the_same_bits_every_time() -> None:
    inputs = _inputs(64, torch.float16)
    grads = [torch.autograd.grad(_attend(inputs, deterministic=True)[0].float().sum(), inputs) for _ in range(3)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))
