"""These tests check what the surroundings of a call may do: modes, transforms, defaults, and tensors of other kinds."""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.randomness import some
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core import AttentionConfig, LazyMask, UnsupportedAttention, mask_rule, record, sdpa
from pascal_attn_core.machine.out_of_memory import is_out_of_memory
from pascal_attn_core.observe import report
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes.tiled import forget_halvings
from pascal_attn_core.sdpa_patch import patch_sdpa

TILED = AttentionConfig(route="tiled")


def _leaves(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode) -> None:
    query, key, value = _leaves()
    with mode():
        out = sdpa(query, key, value, config=TILED)
    assert not out.requires_grad
    torch.testing.assert_close(out, reference_sdpa(query, key, value)[0].detach(), atol=1e-6, rtol=1e-5)


def test_a_graph_can_be_walked_twice_and_what_it_saves_may_live_elsewhere() -> None:
    leaves = _leaves()
    with torch.autograd.graph.save_on_cpu():
        out = sdpa(*leaves, torch.randn(70, 70), 0.3, config=TILED).square().sum()
    first, second = (torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_nothing_outlives_the_call() -> None:
    (query,) = _leaves(1)
    mask = torch.rand(70, 70) < 0.5
    out = sdpa(query, query, query, mask, config=TILED)
    alive = [weakref.ref(t) for t in (query, mask, out)]
    out.sum().backward()
    del query, mask, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_inputs_changed_before_the_backward_pass_are_noticed() -> None:
    query, _, value = _leaves()
    key = torch.randn(1, 2, 70, 8)
    out = sdpa(query, key, value, config=TILED)
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_process_wide_settings_of_torch_do_not_matter(mask: torch.dtype | None) -> None:
    leaves = _leaves()
    bias = None if mask is None else (torch.rand(70, 70) < 0.5).to(mask)
    torch.manual_seed(1)
    expected = sdpa(*leaves, bias, 0.2, is_causal=True, config=TILED)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            out = sdpa(*leaves, bias, 0.2, is_causal=True, config=TILED)
            out.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)
    assert leaves[0].grad.device.type == "cpu"


@pytest.mark.parametrize(
    "transform",
    [
        lambda attend: torch.func.grad(lambda query: attend(query).sum())(torch.randn(1, 2, 10, 8)),
        lambda attend: torch.func.vmap(attend)(torch.randn(3, 1, 2, 10, 8)),
        lambda attend: torch.func.jvp(attend, (torch.randn(1, 2, 10, 8),), (torch.randn(1, 2, 10, 8),)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_transforms_of_functions_work(transform) -> None:
    torch.manual_seed(0)
    expected = transform(lambda query: sdpa(query, query, query, config=AttentionConfig(route="math")))
    torch.manual_seed(0)
    torch.testing.assert_close(transform(lambda query: sdpa(query, query, query, config=TILED)), expected)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("config", [None, TILED], ids=["auto", "tiled"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 3), "softcap": 2.0}], ids=str)
def test_a_trace_serves_all_lengths_with_and_without_gradients(config, requires_grad: bool, options: dict) -> None:
    def attend(query: Tensor) -> Tensor:
        return sdpa(query, query, query, **options, config=config)

    with torch.set_grad_enabled(requires_grad):
        traced = torch.jit.trace(attend, torch.randn(1, 2, 800, 8, requires_grad=requires_grad))
    for length in (800, 70):
        query = torch.randn(2, 2, length, 8, requires_grad=True)
        expected = sdpa(query, query, query, **options, config=TILED)
        torch.testing.assert_close(traced(query), expected, atol=1e-5, rtol=1e-5)
        actual = torch.autograd.grad(traced(query).square().sum(), query)
        torch.testing.assert_close(actual, torch.autograd.grad(expected.square().sum(), query), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(traced(query), expected.detach(), atol=1e-5, rtol=1e-5)


@mask_rule
def _same_parity(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 2 == 0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_takes_a_window_and_the_shape_of_a_rule_from_its_sizes() -> None:
    def attend(query: Tensor) -> Tensor:
        length = query.shape[2]
        mask = LazyMask((1, 1, length, length), _same_parity, device="cpu")
        return sdpa(query, query, query, mask, window=(length // 2, -1))

    query = torch.randn(1, 2, 600, 8)
    traced = torch.jit.trace(attend, query)
    torch.testing.assert_close(traced(2 * query), attend(2 * query))
    with pytest.raises(RuntimeError, match="must broadcast"):  # sizes that are read are constants of a trace
        traced(query[:, :, :300])


def test_a_trace_needs_a_registered_rule() -> None:
    query = torch.randn(1, 2, 70, 8)
    mask = LazyMask((1, 1, 70, 70), lambda b, h, i, j: i >= j, device="cpu")
    with pytest.raises(TypeError, match=r"under torch\.jit\.trace mask_rule must register the rule"):
        torch.jit.trace(lambda query: sdpa(query, query, query, mask), query)


def _nested(layout: torch.layout) -> torch.Tensor:
    parts = [torch.randn(5, 2, 8), torch.randn(7, 2, 8)]
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize(
    "make",
    [lambda: _nested(torch.strided), lambda: _nested(torch.jagged), lambda: torch.randn(1, 2, 5, 8).to_sparse()],
    ids=["nested", "jagged", "sparse"],
)
def test_tensors_without_strides_are_refused(make) -> None:
    query = make()
    for config in (None, TILED):
        with pytest.raises((TypeError, UnsupportedAttention)):
            sdpa(query, query, query, config=config)


class _Raising(TorchDispatchMode):
    """Counts the operators, and raises ``error`` in place of number ``at``."""

    def __init__(self, error: BaseException | None = None, at: int = 0):
        super().__init__()
        self.error, self.at, self.count = error, at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        if self.error is not None and self.count == self.at:
            raise self.error
        return func(*args, **(kwargs or {}))


_SMALL = AttentionConfig(route="tiled", budget_mib=1 / 16)


@dataclass
class _Scenario:
    """One call that is made again and again; ``around`` is entered before it."""

    shapes: tuple[tuple[int, ...], ...]
    mask: Callable[[], Any] = lambda: None
    dtype: torch.dtype = torch.float32
    config: AttentionConfig | None = _SMALL  # None: by the switch
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager] = nullcontext

    def attend(self, leaves: Sequence[Tensor], mask: Any) -> Tensor:
        options = self.options | ({"sinks": leaves[3]} if len(leaves) > 3 else {})
        attend = F.scaled_dot_product_attention if self.config is None else partial(sdpa, config=self.config)
        return attend(*leaves[:3], mask, **options)


_MANY, _ALIKE, _GROUPED = ((1, 1, 80, 4),) * 3, ((1, 1, 48, 4),) * 3, ((1, 2, 30, 4), (1, 1, 60, 4), (1, 1, 60, 4))
_LONGER = ((1, 2, 130, 8), (1, 2, 260, 8), (1, 2, 260, 8))
_switch = partial(patch_sdpa, _SMALL)
_SCENARIOS = {
    "tiled": _Scenario(_ALIKE),
    "tiled, causal": _Scenario(_MANY, options={"is_causal": True}),
    "float mask, grouped heads": _Scenario(
        _GROUPED, lambda: torch.randn(30, 60, requires_grad=True), options={"enable_gqa": True}
    ),
    "float16, sinks": _Scenario((*_ALIKE, (1,)), dtype=torch.float16),
    "a rule": _Scenario(_ALIKE, lambda: LazyMask((1, 1, 48, 48), lambda b, h, i, j: (i - j) % 3 != 1, device="cpu")),
    "auto, bool mask": _Scenario(_LONGER, lambda: torch.rand(130, 260) < 0.7, config=AttentionConfig()),
    "math": _Scenario(_ALIKE, lambda: torch.rand(48, 48) < 0.7, config=AttentionConfig(route="math")),
    "under autocast": _Scenario(_ALIKE, around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "recorded": _Scenario(_ALIKE, around=record),
    "the switch": _Scenario(_ALIKE, config=None, around=_switch),
    "the switch, float mask": _Scenario(_ALIKE, lambda: torch.randn(48, 48), config=None, around=_switch),
}
_ERRORS = {
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "no workspace": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    "interrupt": KeyboardInterrupt,
    "runtime": lambda: RuntimeError("the device is gone"),
}


def _state() -> tuple:
    stacks = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *stacks, *modes, torch.get_default_dtype(), report.active, F.scaled_dot_product_attention


def _survives_or_passes(run: Callable[[], Any], error: BaseException, at: int) -> Any:
    """Return what ``run`` gives with an error at its n-th operator; None if the error came through."""
    state = _state()
    try:
        with _Raising(error, at):
            result = run()
    except type(error):
        result = None
    else:
        assert is_out_of_memory(error), f"{error!r} at operator {at} was swallowed"
    assert _state() == state, f"{error!r} at operator {at} left something behind"
    return result


@pytest.mark.parametrize("make_error", _ERRORS.values(), ids=_ERRORS)
@pytest.mark.parametrize("scenario", _SCENARIOS.values(), ids=_SCENARIOS)
def test_an_error_at_any_operator_passes_through_and_leaves_nothing_behind(
    scenario: _Scenario, make_error: Callable[[], BaseException]
) -> None:
    outside = _state()
    leaves = [torch.randn(shape).to(scenario.dtype).requires_grad_() for shape in scenario.shapes]
    mask = scenario.mask()
    wanted = [*leaves, mask] if isinstance(mask, Tensor) and mask.requires_grad else leaves
    before = [t.detach().clone() for t in wanted]
    tight = {"atol": 1e-6, "rtol": 1e-5} if scenario.dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    close = partial(torch.testing.assert_close, **tight)
    survived = {"forward": 0, "backward": 0}
    may_survive = is_out_of_memory(make_error())
    with scenario.around():
        attend = partial(scenario.attend, leaves, mask)
        attend()  # what happens at the first call only
        with _Raising() as forward:
            out = attend()
        grad_out = torch.randn_like(out)
        differentiate = partial(torch.autograd.grad, out, wanted, grad_out, retain_graph=True)
        with _Raising() as backward:
            grads = differentiate()
        runs = ("forward", attend, out, forward.count), ("backward", differentiate, grads, backward.count)
        for name, run, expected, count in runs:
            for at in some(range(1, count + 1), 17):
                result = _survives_or_passes(run, make_error(), at)
                if result is not None:
                    close(result, expected)
                    survived[name] += 1
                if may_survive or at % 7 == 0:
                    close(run(), expected)
                forget_halvings()  # or the tiles of the last operators are those of a device without memory
            close(run(), expected)
    assert min(forward.count, backward.count) > 0
    assert all(torch.equal(t, old) for t, old in zip(wanted, before))
    assert _state() == outside
    if may_survive and scenario.config is _SMALL:
        # The first of them are outside of what is tried again, the many in the tiles are not.
        assert all(survived[name] > len(some(range(count), 17)) / 2 for name, _, _, count in runs)
