"""A call is planned once for both passes, and one kernel computes all gradients where it is asked for by name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.device import EmulatedKernels, emulated_card
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import RADEON_VII
from attn_support.fused.modes import deterministic
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.flash_attn import flash_attn_func, flash_attn_varlen_func
from pascal_attn_core.fused.launch.backward import sums_bytes
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.observe import report
from pascal_attn_core.routes import choose

FUSED = AttentionConfig(route="fused")
ATOMIC = replace(FUSED, atomic_gradients=True)
SEVEN = ["pa_delta", "pa_grad_query", "pa_grad_key_value"]
FIVE = ["pa_delta", "pa_grad_all"]


@pytest.fixture
def kernels() -> Iterator[EmulatedKernels]:
    """The kernels of a card on which ours was timed as the faster one; nothing is executed."""
    with emulated_card(lambda launch: None, ratio=0.5) as found:
        yield found


def _leaves(dim: int = 64, dtype: torch.dtype = torch.float32, tokens: int = 600) -> list[Tensor]:
    return [torch.randn(1, 2, tokens, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def _backward(kernels: EmulatedKernels, config: AttentionConfig | None, *leaves: Tensor) -> list[str]:
    """The functions that are launched for the gradients of a call."""
    out = sdpa(*(leaves or _leaves()), config=config)
    forwards = len(kernels.queued)
    out.sum().backward()
    return [launch.function for launch in kernels.queued[forwards:]]


def _why(config: AttentionConfig, *leaves: Tensor) -> str:
    return choose(check_call(*leaves), config).why


@pytest.mark.parametrize(("config", "functions"), [(None, SEVEN), (FUSED, SEVEN), (ATOMIC, FIVE)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_gradients_take_the_plan_of_the_forward_pass(
    kernels: EmulatedKernels, is_compiled: bool, config: AttentionConfig | None, functions: list[str]
) -> None:
    """Nothing adds in any order unless it is asked for."""
    leaves = _leaves()

    def attend(*tensors: Tensor) -> Tensor:
        return sdpa(*tensors, config=config)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
    run(*leaves).sum().backward()
    gradients = [name.removeprefix("pa_") for name in functions[1:]]
    assert kernels.ensured == [["split", *gradients], gradients]
    assert [launch.function for launch in kernels.queued] == ["pa_forward_split", "pa_combine", *functions]
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("route", ["auto", "fused"])
def test_one_kernel_computes_all_gradients_where_it_is_asked_for(kernels: EmulatedKernels, route: str) -> None:
    config, leaves = replace(ATOMIC, route=route), _leaves()
    assert _backward(kernels, config, *leaves) == FIVE
    assert _why(config, *leaves).endswith("; its gradients in five products, by atomic additions")
    assert "five products" in str(explain(*leaves, config=config))
    narrow = _leaves(dtype=torch.float16)
    assert _backward(kernels, config, *narrow) == [*FIVE, "pa_round_query"]


@pytest.mark.parametrize("warn_only", [False, True])
def test_torchs_wish_for_the_same_bits_wins(kernels: EmulatedKernels, warn_only: bool) -> None:
    leaves = _leaves()
    with deterministic(warn_only=warn_only):
        assert _backward(kernels, ATOMIC, *leaves) == SEVEN
        why = _why(ATOMIC, *leaves)
    assert why.endswith("its gradients in seven products: torch.use_deterministic_algorithms is on")


def test_a_wish_that_comes_after_the_forward_pass_wins_too(kernels: EmulatedKernels) -> None:
    out = sdpa(*_leaves(), config=ATOMIC)
    forwards = len(kernels.queued)
    with deterministic():
        out.sum().backward()
    assert [launch.function for launch in kernels.queued[forwards:]] == SEVEN
    assert kernels.ensured == [["split", "grad_all"], ["grad_query", "grad_key_value"]]


def test_flash_attn_asks_for_the_same_bits_by_name(kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pascal_attn_core.flash_attn.options.config_of", lambda config: ATOMIC)
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in _leaves())
    ends = torch.tensor([0, 130, 600], dtype=torch.int32)

    def launched(run: Callable[..., Any], *ends: Any, **options: Any) -> list[str]:
        before = len(kernels.queued)
        tensors = (t if run is flash_attn_func else t[0] for t in (q, k, v))
        run(*tensors, *ends, **options).sum().backward()
        return [launch.function for launch in kernels.queued[before:]]

    lengths = ends, ends, 470, 470
    assert launched(flash_attn_varlen_func, *lengths) == ["pa_forward", *FIVE]
    assert launched(flash_attn_varlen_func, *lengths, deterministic=True) == ["pa_forward", *SEVEN]
    assert "pa_grad_all" not in launched(flash_attn_func, deterministic=True)


@pytest.mark.parametrize(
    ("card", "dim", "dtype", "config", "reason"),
    [
        (CARD, 256, torch.float32, {}, "atomic_gradients has no kernel for head_dim 256"),
        (CARD, 64, torch.float16, {"budget_mib": 0.125}, "the sums of atomic_gradients take 0 MiB, more than 0 MiB"),
        (replace(CARD, capability=(8, 6)), 64, torch.float32, {}, "atomic_gradients is for compute capability 5.0"),
        (RADEON_VII, 64, torch.float32, {}, "atomic_gradients needs an NVIDIA GPU"),
    ],
)
def test_otherwise_the_gradients_are_summed_in_order(
    card: DeviceInfo, dim: int, dtype: torch.dtype, config: dict[str, Any], reason: str
) -> None:
    with emulated_card(lambda launch: None, card, ratio=0.5) as kernels:
        leaves, wanted = _leaves(dim, dtype), replace(ATOMIC, **config)
        assert _backward(kernels, wanted, *leaves) == SEVEN
        assert f"; its gradients in seven products: {reason}" in _why(wanted, *leaves)


def test_a_kernel_that_turns_out_wrong_is_left_out(kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kernels), "largest_error", lambda self, variant: float(variant.kind == "grad_all"))
    with report.record() as seen:
        assert _backward(kernels, ATOMIC, *_leaves()) == SEVEN
    ((key, _),) = seen.calls.items()
    assert key.route == "fused"
    assert "grad_all-64-float32-none differs from the definition by 1" in key.why


def test_memory_is_that_of_the_sums(kernels: EmulatedKernels) -> None:
    for dtype, expected in ((torch.float32, 0), (torch.bfloat16, 4 * 2 * 600 * 64)):
        leaves = _leaves(dtype=dtype)
        assert sums_bytes(check_call(*leaves)) == expected
        _backward(kernels, ATOMIC, *leaves)
        launch = next(launch for launch in reversed(kernels.queued) if launch.function == "pa_grad_all")
        assert (launch.params.sums == launch.params.dq) == (expected == 0)
