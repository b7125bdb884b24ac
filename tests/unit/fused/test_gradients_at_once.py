"""One kernel computes all gradients of a call, where that is faster than two."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_support.fused.device import EmulatedKernels, emulated_card
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import RADEON_VII
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.fused.geometry.plain import Geometry
from pascal_attn_core.fused.launch.plan import Shape, is_faster_at_once
from pascal_attn_core.machine.device import DeviceInfo

FUSED = AttentionConfig(route="fused")
TWO = ["pa_delta", "pa_grad_query", "pa_grad_key_value"]
ONE = ["pa_delta_all", "pa_grad_all"]
HEADS = 12


@pytest.fixture
def kernels() -> Iterator[EmulatedKernels]:
    """The kernels of a card on which ours was timed as the faster one; nothing is executed."""
    with emulated_card(lambda launch: None, ratio=0.5) as found:
        yield found


def _leaves(
    heads: int = HEADS, tokens: int = 600, keys: int = 600, dim: int = 64, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.randn(1, heads, n, dim, dtype=dtype, requires_grad=True) for n in (tokens, keys, keys)]


def _backward(kernels: EmulatedKernels, *leaves: Tensor, config: AttentionConfig | None = FUSED) -> list[str]:
    """The functions that are launched for the gradients of a call."""
    out = sdpa(*(leaves or _leaves()), config=config)
    forwards = len(kernels.queued)
    out.sum().backward()
    return [launch.function for launch in kernels.queued[forwards:]]


@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.parametrize("config", [None, FUSED])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_gradients_take_the_plan_of_the_forward_pass(
    kernels: EmulatedKernels, is_compiled: bool, config: AttentionConfig | None, heads: int
) -> None:
    """Two heads are too few to fill the card: ranges are faster."""
    leaves = _leaves(heads)

    def attend(*tensors: Tensor) -> Tensor:
        return sdpa(*tensors, config=config)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if is_compiled else attend
    run(*leaves).sum().backward()
    functions = ONE if heads == HEADS else TWO
    gradients = [name.removeprefix("pa_") for name in functions[1:]]
    forward = ["pa_forward"] if heads == HEADS else ["pa_forward_split", "pa_combine"]
    assert [kinds[-len(gradients) :] for kinds in kernels.ensured] == [gradients, gradients]
    assert list(dict.fromkeys(launch.function for launch in kernels.queued)) == [*forward, *functions]
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize(
    ("card", "leaves", "functions"),
    [
        (CARD, {"dtype": torch.float16}, [*ONE, "pa_round_query"]),
        (CARD, {"tokens": 4096, "keys": 77}, TWO),
        (CARD, {"dim": 256}, TWO),
        (replace(CARD, capability=(8, 6)), {}, ONE),
        (RADEON_VII, {}, TWO),
    ],
    ids=["float16", "few keys", "head_dim 256", "compute capability 8.6", "AMD"],
)
def test_which_kernels_compute_the_gradients(card: DeviceInfo, leaves: dict, functions: list[str]) -> None:
    with emulated_card(lambda launch: None, card, ratio=0.5) as kernels:
        found = _backward(kernels, *_leaves(**leaves))
        assert list(dict.fromkeys(found)) == functions


def test_a_kernel_that_turns_out_wrong_is_left_out(kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kernels), "largest_error", lambda self, variant: float(variant.kind == "grad_all"))
    assert _backward(kernels, config=None) == TWO


def test_packed_sequences_take_one_kernel_too(kernels: EmulatedKernels) -> None:
    tokens, ends = torch.randn(600, HEADS, 64, requires_grad=True), torch.tensor([0, 130, 600], dtype=torch.int32)
    flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, 470, 470).sum().backward()
    assert [launch.function for launch in kernels.queued] == ["pa_forward", *ONE]


def test_memory_is_that_of_the_sums(kernels: EmulatedKernels) -> None:
    """A gradient of query in float32 holds them itself; else they must fit the budget."""
    for dtype in (torch.float32, torch.bfloat16):
        _backward(kernels, *_leaves(dtype=dtype))
        launch = next(launch for launch in reversed(kernels.queued) if launch.function == "pa_grad_all")
        assert (launch.params.sums == launch.params.dq) == (dtype == torch.float32)
    size = 4 * HEADS * 600 * 64 / 2**20
    for budget, functions in ((size, [*ONE, "pa_round_query"]), (size - 0.01, TWO)):
        config = replace(FUSED, budget_mib=budget)
        assert _backward(kernels, *_leaves(dtype=torch.float16), config=config) == functions


def _time(shape: Shape, places: int) -> float:
    """Return the time of the kernel for all gradients, in tiles of a product: blocks begin in the order of their
    numbers, each as soon as there is room, and wait as ``query_sums.cuh`` says."""
    high = shape.band[1] if shape.band else shape.tokens
    low = shape.band[0] if shape.band else -shape.keys
    free, ended = [0.0] * places, {}
    for first in range(0, shape.keys, 64):
        for head in range(shape.batch * shape.heads):
            free.sort()
            now = free[0]
            for query in range(max(0, first - high) // 64 * 64, min(shape.tokens, first + 64 - low), 64):
                now = max(now + 1, ended.get((head, query), 0.0) + 0.1)
                ended[head, query] = now
            free[0] = now
    return 5 * max(free)


@pytest.mark.parametrize("band", [None, "causal", "window"])
@pytest.mark.parametrize("tokens", [512, 2048, 4096])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 40])
def test_the_choice_is_that_of_a_simulated_card(heads: int, tokens: int, band: str | None) -> None:
    """Where it is not, the two ways are within a tenth of each other."""
    limits = {None: None, "causal": (-tokens, 0), "window": (-256, 0)}[band]
    shape, geometry, places = Shape(1, heads, 1, tokens, tokens, limits, False), Geometry(64, 64, 16, 8), 2 * 28
    starts = range(0, tokens, 64)
    met = [sum(_is_met(shape, query, key) for query in starts) for key in starts]
    evenly = heads * sum(met) / places
    in_rounds = max(evenly, max(met)) if band else math.ceil(heads * len(met) / places) * len(met)
    for ranges in ((1, 1), (4, 4)):
        apart = 7 * (in_rounds if ranges == (1, 1) else evenly)
        ratio = _time(shape, places) / apart
        assert is_faster_at_once(shape, geometry, places, ranges) == (ratio < 0.95) or 0.85 < ratio < 1.05


def _is_met(shape: Shape, query: int, key: int) -> bool:
    low, high = shape.band or (-shape.keys, shape.keys)
    return query + low < key + 64 and key <= query + 63 + high
