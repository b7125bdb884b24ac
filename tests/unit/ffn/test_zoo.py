"""No module that mixes tokens, keeps state or draws random numbers is ever run in slices."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from attn_support.ffn_zoo import BAD as ALL_BAD
from attn_support.ffn_zoo import GOOD, WIDTH, Case, Ffn, With
from attn_support.randomness import some
from torch import Tensor, nn

from pascal_attn_core.ffn import patch_ffn

# What a trial cannot see, without a difference to these inputs: a millionth of a token's value, and values of a weight
# that are read without an operator.
UNSEEN = {"context hidden from NaN", "path by a parameter's list"}
BAD = [case for case in ALL_BAD if case.name not in UNSEEN]
TOKENS = 64
FIRST_CALLS = {
    "noise": lambda: torch.randn(2, TOKENS, WIDTH),
    "zeros": lambda: torch.zeros(2, TOKENS, WIDTH),
    "one sample": lambda: torch.randn(1, TOKENS, WIDTH),
    "large": lambda: torch.randn(2, TOKENS, WIDTH) * 1e4,
}


def _run(module: nn.Module, *calls: Tensor) -> tuple[list, object]:
    with torch.no_grad(), patch_ffn(module, include="", chunk_tokens=16, min_tokens=2) as patch:
        outs = [module(x) for x in calls]
        return outs, patch.report().lines[0]


def _tried(cases: list[Case]) -> list[tuple[str, Case]]:
    """Each module with two first calls by day, with all at night."""
    return some(((first, case) for case in cases for first in FIRST_CALLS), 2)


@pytest.mark.parametrize(("first", "case"), _tried(GOOD), ids=lambda value: getattr(value, "name", value))
def test_a_module_that_works_token_by_token_is_sliced_and_gives_the_same(case: Case, first: str) -> None:
    module = case.make().eval()
    x = FIRST_CALLS[first]()
    with torch.no_grad():
        expected = module(x)
    (out,), line = _run(module, x)
    assert line.state == "on", line.why
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(("first", "case"), _tried(BAD), ids=lambda value: getattr(value, "name", value))
def test_a_module_that_mixes_tokens_or_keeps_state_is_refused_and_runs_as_ever(case: Case, first: str) -> None:
    if first == "one sample" and "scratch" in case.name:
        pytest.skip("its buffer holds two samples")
    if first == "large" and "share of" in case.name:
        pytest.skip("beside these values it is rounding")
    module = case.make().train(case.training)
    plain = copy.deepcopy(module)
    x = FIRST_CALLS[first]()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    with torch.no_grad():
        expected = [plain(x.clone()), plain(x.clone())]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    one, two = x.clone(), x.clone()
    outs, line = _run(module, one, two)
    assert line.state == "refused"
    if "every other call" not in case.name:
        for out, wanted in zip(outs, expected):
            torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    assert vars(module).get("calls") == vars(plain).get("calls")
    assert vars(module).get("seen") == vars(plain).get("seen")
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [case for case in BAD if not case.name.startswith(("writes to its input", "in-place"))],
    ids=lambda c: c.name,
)
def test_bad_modules_are_refused_in_training_too(case: Case) -> None:
    module = case.make().train(case.training)
    with patch_ffn(module, include="", chunk_tokens=16, min_tokens=2) as patch:
        module(torch.randn(2, TOKENS, WIDTH))
        assert patch.report().lines[0].state == "refused"


def test_a_short_first_call_proves_nothing() -> None:
    module = With(lambda m, x: 0.5 * x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, -1))).eval()
    x = torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad():
        expected = module(x)
        with patch_ffn(module, include="", chunk_tokens=16, min_tokens=2) as patch:
            module(x[:, :2])
            assert torch.equal(module(x), expected)
            assert patch.report().lines[0].state == "refused"


def test_a_mixing_branch_that_is_trained_after_the_first_call_is_never_sliced() -> None:
    module = next(case for case in BAD if case.name == "convolution that starts at zero").make().eval()
    plain, x = copy.deepcopy(module), torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad(), patch_ffn(module, include="", chunk_tokens=16, min_tokens=2):
        module(x)
        module.kernel.fill_(0.5), plain.kernel.fill_(0.5)
        assert torch.equal(module(x), plain(x))


class _MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def test_a_backward_pass_that_mixes_tokens_is_refused_where_gradients_are_wanted() -> None:
    module, x = With(lambda m, x: _MixesBackward.apply(x)), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with patch_ffn(module, include="", chunk_tokens=16, min_tokens=2) as patch:
        module(x).sum().backward()
        assert "backward pass" in patch.report().lines[0].why


def test_channels_that_are_as_many_as_tokens_confuse_nobody() -> None:
    module, x = With(lambda m, x: x + x.mT if x.shape[1] == x.shape[2] else x).eval(), torch.randn(1, WIDTH, WIDTH)
    with torch.no_grad(), patch_ffn(module, include="", chunk_tokens=8, min_tokens=2) as patch:
        module(x)
        assert "different operators" in patch.report().lines[0].why


def test_a_hook_inside_would_see_slices_and_keeps_the_module_whole() -> None:
    module, seen = Ffn().eval(), []
    module.fc1.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    _, line = _run(module, torch.randn(1, TOKENS, WIDTH))
    assert "hook on fc1" in line.why
    assert seen == [TOKENS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", GOOD[:6], ids=lambda case: case.name)
def test_every_floating_dtype_is_proven_with_its_own_tolerance(case: Case, dtype: torch.dtype) -> None:
    module, x = case.make().eval().to(dtype), torch.randn(2, TOKENS, WIDTH).to(dtype)
    with torch.no_grad():
        expected = module(x)
    (out,), line = _run(module, x)
    assert line.state == "on", line.why
    torch.testing.assert_close(out, expected)


def test_refusals_and_proofs_make_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in (GOOD[0], BAD[0]):
            _run(case.make().eval(), torch.randn(2, TOKENS, WIDTH))
