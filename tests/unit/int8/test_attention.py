"""patch_attention_int8: which layers, how they decide, what they measure, and that nothing is left behind."""

import copy
import logging
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.oracle import error_of
from torch import Tensor, nn

from pascal_attn_core import patch_attention_int8, patch_linear_int8, sdpa
from pascal_attn_core.call import Arguments
from pascal_attn_core.int8 import attention
from pascal_attn_core.int8.attention import attention_error

WIDTH, HEADS = 128, 2


class SelfAttention(nn.Module):
    def __init__(self, sharpness: float = 1.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sharpness, self.mask, self.is_causal = sharpness, None, False

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        query, key = query * self.sharpness, key * self.sharpness
        out = F.scaled_dot_product_attention(query, key, value, self.mask, 0.0, self.is_causal)
        return self.out(out.transpose(-2, -3).flatten(-2))


class AttnBlock(nn.Module):
    def __init__(self, sharpness: float = 1.0):
        super().__init__()
        self.attn1, self.attn2 = SelfAttention(), SelfAttention(sharpness)
        self.ff = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn1(x)
        return x + self.ff(x + self.attn2(x))


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(AttnBlock(), AttnBlock(12.0)).eval().requires_grad_(False)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 150, WIDTH, generator=torch.Generator().manual_seed(1))


def test_layers_within_the_limit_run_in_8_bits_and_the_others_are_named(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with patch_attention_int8(model) as patch:
        out = model(x)
        report = patch.report()
        assert patch.sites == 4
    assert [(line.name, line.state) for line in report.lines] == [
        ("0.attn1", "on"),
        ("0.attn2", "on"),
        ("1.attn1", "on"),
        ("1.attn2", "refused"),
    ]
    assert all(0 < line.error < line.worst_row for line in report.lines)
    assert "is above 2.00%" in report.lines[-1].why
    assert [state.name for state in report.states if state.state == "refused"] == ["1.attn2"]
    assert report.sentence().startswith("3 of 4 attention layers in int8, not exact: relative error per layer 0.")
    assert report.sentence().endswith("%; 1 stay in float")
    assert 0 < error_of(out, expected) < 0.02
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("target", "options", "error"),
    [
        (nn.Linear(4, 4), {}, ValueError),
        (AttnBlock(), {"include": "no such"}, ValueError),
        (AttnBlock(), {"max_error": -1}, ValueError),
        (AttnBlock(), {"max_error": "1"}, TypeError),
        ("model", {}, TypeError),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_left(target: object, options: dict, error: type) -> None:
    with pytest.raises(error):
        patch_attention_int8(target, **options)
    if isinstance(target, nn.Module):
        assert not any("forward" in vars(module) for module in target.modules())


def test_what_8_bits_do_not_take_is_exact_and_named(model: nn.Module, x: Tensor) -> None:
    for block in model:
        block.attn1.mask = torch.randn(150, 150)
    expected = model(x)
    with patch_attention_int8(model, include="*.attn1") as patch:
        torch.testing.assert_close(model(x), expected)
        lines = patch.report().lines
    assert {(line.state, line.why) for line in lines} == {("refused", "the int8 mode has no float mask")}
    leaf = x.clone().requires_grad_()
    with patch_attention_int8(model, include="*.attn2") as patch:
        model(leaf).sum().backward()
        assert leaf.grad is not None
        assert patch.report().count("on") == 0


def test_an_interrupt_in_a_layer_leaves_no_interception_behind(model: nn.Module, x: Tensor) -> None:
    model[0].attn2.out.forward = Mock(side_effect=KeyboardInterrupt)
    with patch_attention_int8(model), pytest.raises(KeyboardInterrupt):
        model(x)
    assert torch._C._len_torch_function_stack() == 0


def test_a_layer_whose_inputs_change_goes_back_with_a_warning(model, x, caplog: pytest.LogCaptureFixture) -> None:
    with patch_attention_int8(model, include="0.attn1", max_error=0.01) as patch, caplog.at_level(logging.WARNING):
        model(x)
        (line,) = patch.report().lines
        assert line.state == "on"
        model[0].attn1.sharpness = 12.0
        model(x)
        (line,) = patch.report().lines
    assert line.state == "refused"
    assert line.why.endswith(" in call 2 is above 1.00%")
    assert caplog.records[0].getMessage() == f"0.attn1: {line.why}"


def test_each_call_is_computed_once_and_a_check_computes_some_rows(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal call that ends in float is one of them."""
    counted: list[int] = []

    def counting(*args: Tensor, **given: Tensor) -> Tensor:
        counted.append(given["query"].shape[-2])
        return sdpa(*args, **given)

    monkeypatch.setattr(attention, "sdpa", counting)
    layer, x = model[0].attn1, torch.randn(1, 700, WIDTH)
    layer.is_causal = True
    with patch_attention_int8(model, include="0.attn1", max_error=0):
        layer(x)
    checked, whole = counted
    assert checked <= 512 < whole == 700
    counted.clear()
    with patch_attention_int8(model, include="0.attn1") as patch:
        for _ in range(3):
            layer(x)
        assert patch.report().count("on") == 1
    assert [rows <= most for rows, most in zip(counted, (512, 128, 128), strict=True)] == [True] * 3


def test_copies_are_without_the_patch_and_linear_layers_may_be_in_8_bits_too(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with patch_attention_int8(model) as attention, patch_linear_int8(model, include=nn.Linear, max_error=1) as linear:
        out = model(x)
        assert attention.report().count("on") == 3
        assert linear.report().count("on") == 10
    assert 0 < error_of(out, expected) < 0.05
    with patch_attention_int8(model) as patch:
        assert torch.equal(copy.deepcopy(model)(x), expected)
        assert patch.report().count("waiting") == 4


@pytest.mark.parametrize(
    ("wrong", "factor", "whole", "worst"),
    [((0, 1, 1234), 3.0, 0.0, 2.0), ((..., slice(1, None, 3), 0), 1.1, 0.1 / 3**0.5, 0.1), ((1,), 1.1, 0.1, 0.1)],
    ids=["one row", "every third", "smaller branch"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_sample_sees_rows_of_large_norm_every_period_and_each_branch(
    wrong, factor, whole, worst, is_causal
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, 3000, 16), torch.randn(2, 8, 50, 16), torch.randn(2, 8, 50, 16)
    query[0, 1, 1234] *= 2.5
    query[:, 0] *= 100
    value[1] /= 100
    given = Arguments(query, key, value, is_causal=is_causal)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    factors = torch.ones(2, 8, 3000, 1)
    factors[wrong] = factor
    found = attention_error(given, exact * factors, 3, 512)
    assert found.worst_row == pytest.approx(worst, rel=1e-3)
    assert found.error == pytest.approx(whole, rel=0.15) or (whole == 0 and 0 < found.error < 0.1)
    assert attention_error(given, exact * float("nan"), 3, 512) == (float("inf"),) * 3
