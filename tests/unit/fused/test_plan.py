"""A call is planned once, whichever pass uses the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_support.fused.device import EmulatedKernels, emulated_card
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch.plan import Plan
from pascal_attn_core.routes import choose

FUSED = AttentionConfig(route="fused")


@pytest.fixture
def kernels() -> Iterator[EmulatedKernels]:
    """The kernels of a card on which ours was timed as the faster one; nothing is executed."""
    with emulated_card(lambda launch: None, ratio=0.5) as found:
        yield found


def _leaves(tokens: int = 600, *, requires_grad: bool = True) -> list[Tensor]:
    return [torch.randn(1, 2, tokens, 64, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("config", [None, FUSED], ids=["auto", "by name"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_gradients_take_the_plan_of_the_forward_pass(
    kernels: EmulatedKernels, is_compiled: bool, config: AttentionConfig | None
) -> None:
    leaves = _leaves()

    def attend(*tensors: Tensor) -> Tensor:
        return sdpa(*tensors, config=config)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
    run(*leaves).sum().backward()
    assert kernels.ensured == [["split", "grad_query", "grad_key_value"]]
    functions = ["pa_forward_split", "pa_combine", "pa_delta", "pa_grad_query", "pa_grad_key_value"]
    assert [launch.function for launch in kernels.queued] == functions
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_plan_holds_no_tensor_of_the_call(kernels: EmulatedKernels, requires_grad: bool) -> None:
    plan = choose(check_call(*_leaves(requires_grad=requires_grad)), FUSED).plan
    assert isinstance(plan, Plan)
    assert not any(isinstance(part, Tensor) for part in plan)
    assert plan.packed is None
    assert len(plan.gradients) == (2 if requires_grad else 0)
