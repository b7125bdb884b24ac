"""The code of a module runs once a call, sees all tokens and changes its state once; results are those without us."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attn_support.ffn_zoo import CASES, WIDTH, Case, Ffn, With
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pascal_attn_core.ffn import FfnPatch, FfnReportLine, patch_ffn

TOKENS = 64


def _patch(module: nn.Module, **options: Any) -> FfnPatch:
    return patch_ffn(module, **{"include": "", "chunk_tokens": 16, "min_tokens": 2, **options})


def _line(patch: FfnPatch) -> FfnReportLine:
    return patch.report().lines[0]


def _seeded(seed: int = 3) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def _three_calls(module: Any, grad: bool, x: Tensor) -> list[list[Any]]:
    """Results, gradients, buffers and state after each of three calls, and the next random numbers."""
    found = []
    _seeded()
    for _ in range(3):
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            out = module(leaf * 1)  # which may be written to
            outs = [out.detach().clone(), type(out) is Tensor]
            if grad:
                outs += torch.autograd.grad(out.square().mean(), [leaf, *module.parameters()], allow_unused=True)
        last = getattr(module, "last", None)
        kept = [] if last is None else [last.detach().clone(), grad or type(last) is Tensor]
        state = getattr(module, "calls", 0), list(getattr(module, "seen", []))
        found.append([*outs, *(buffer.clone() for buffer in module.buffers()), *kept, state])
        module.last = None if last is None or grad else last
    return [*found, [torch.rand(2), random.random(), np.random.rand()]]


@pytest.mark.parametrize(("batch", "grad"), [(1, False), (2, True)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_gradients_and_state_are_those_without_us(case: Case, batch: int, grad: bool) -> None:
    torch.manual_seed(0)
    module = case.make().eval()
    plain, x = copy.deepcopy(module), torch.randn(batch, TOKENS, WIDTH)
    expected = _three_calls(plain, grad, x)
    with _patch(module) as patch:
        found = _three_calls(module, grad, x)
        state = case.state if case.state != "backward" else "refused" if grad else "on"
        assert _line(patch).state == state, _line(patch).why
    exact = {"rtol": 0.0, "atol": 0.0} if state == "refused" else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(found, expected):
        torch.testing.assert_close(one[0], other[0], equal_nan=True, **exact)
        torch.testing.assert_close(one[1:], other[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    module, x = Ffn().eval().to(dtype), torch.randn(2, TOKENS, WIDTH).to(dtype)
    with torch.no_grad():
        expected = module(x)
        with _patch(module) as patch:
            torch.testing.assert_close(module(x), expected)
            assert _line(patch).state == "on"


def test_the_gradient_of_a_weight_under_autocast_is_added_up_in_its_own_precision() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(1, 4096, 64)

    def gradient() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        return torch.autograd.grad(out.float().sum(), module[0].weight)[0]

    exact = x.sum(1).expand(64, 64)
    with _patch(module, chunk_tokens=16) as patch:
        error = (gradient() - exact).abs().max()
        assert _line(patch).state == "on"
    assert error < 0.02 * exact.abs().max()


def test_hooks_inside_see_all_tokens_once() -> None:
    module, seen, x = Ffn().eval(), [], torch.randn(1, TOKENS, WIDTH)
    module.fc1.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    with torch.no_grad(), _patch(module) as patch:
        module(x)
        assert _line(patch).state == "on"
    assert seen == [(1, TOKENS, 64)]


def test_a_module_within_a_patched_one_runs_as_a_part_of_it() -> None:
    module, x = nn.Sequential(Ffn(), Ffn()).eval(), torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad():
        expected = module(x)
        with _patch(module, include="0") as inner, _patch(module) as outer:
            torch.testing.assert_close(module(x), expected)
            assert (_line(inner).state, _line(outer).state) == ("waiting", "on")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, torch.OutOfMemoryError])
def test_errors_go_through_and_what_was_kept_is_computed_when_it_is_used(error: type[BaseException]) -> None:
    def interrupted(module: Any, h: Tensor) -> Tensor:
        module.kept, module.calls = h, module.calls + 1
        if module.calls == 1:
            raise error("once")
        return h

    module, x = With(interrupted, wide=True, calls=0, kept=None).eval(), torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad(), _patch(module) as patch:
        with pytest.raises(error):
            module(x)
        assert module.calls == 1
        torch.testing.assert_close(module.kept + 0, torch.nn.functional.gelu(module.fc1(x)))
        assert _line(patch).state == "waiting"
        module.kept = None
        module(x)
        assert type(module.kept) is Tensor


@pytest.mark.torch_2_5
def test_compiled_children_are_chunked_and_compiled_modules_say_why_not() -> None:
    x, child = torch.randn(1, TOKENS, WIDTH), Ffn().eval()
    child.fc1 = torch.compile(child.fc1, backend="eager")
    whole = Ffn().eval()
    whole.compile(backend="eager")
    with torch.no_grad():
        for module, state in ((child, "on"), (whole, "waiting")):
            expected = module(x)
            with _patch(module) as patch:
                for _ in range(2):
                    torch.testing.assert_close(module(x), expected)
                assert _line(patch).state == state
                assert _line(patch).why
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("change", [lambda m, x: x * 2, lambda m, x: (x * 2).flip(1).exp()], ids=["on", "refused"])
def test_within_a_checkpoint_of_the_user(change: Callable, use_reentrant: bool) -> None:
    module, first, x = With(change), nn.Linear(16, 16), torch.randn(2, TOKENS, 16, requires_grad=True)
    leaves = [x, *module.parameters(), *first.parameters()]

    def gradients() -> Any:
        out = checkpoint(lambda x: module(first(x)).exp(), x, use_reentrant=use_reentrant).sum()
        for leaf in leaves:
            leaf.grad = None
        out.backward()
        return [leaf.grad for leaf in leaves]

    wanted = gradients()
    with _patch(module):
        for _ in range(3):
            torch.testing.assert_close(gradients(), wanted, rtol=1e-4, atol=1e-3)
