"""Linear layers of a float32 model in float16: no row overflows, and what must not be touched is not."""

import copy

import pytest
import torch
from torch import nn

from pascal_attn_core import patch_linear_float16
from pascal_attn_core.int8.float16 import in_float16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)).requires_grad_(False)


@pytest.fixture
def float16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pascal_attn_core.int8.binding.median_times", lambda attempts, device: [2.0, 1.0])


def relative(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ((found - right).norm(dim=-1) / right.norm(dim=-1)).max()


def test_rows_of_zeros_are_the_bias_and_a_row_with_nan_stays_alone() -> None:
    layer, x = nn.Linear(64, 32).requires_grad_(False), torch.zeros(3, 64)
    x[1] = float("nan")
    found = in_float16(layer, x)
    assert torch.allclose(found[::2], layer.bias, rtol=1e-3)
    assert found[1].isnan().all()


def test_no_sum_overflows_where_all_signs_agree() -> None:
    layer = nn.Linear(12288, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        found = in_float16(layer, torch.full((1, 12288), 6e4))
    assert torch.allclose(found, torch.full((1, 2), 12288 * 6e4), rtol=1e-3)


@pytest.mark.usefixtures("float16_is_fast")
def test_a_patch_puts_in_tells_and_takes_out() -> None:
    layers, x = model(), 1e6 * torch.randn(40, 128)
    right = layers(x)
    with patch_linear_float16(layers, include="*") as patch:
        assert [state.state for state in patch.report().states] == ["waiting", "waiting"]
        found, again = layers(x), copy.deepcopy(layers)
        assert 0 < relative(found, right) < 0.002
        assert torch.equal(again(x), right)
        assert "error 0.0" in patch.report().text()
    assert torch.equal(layers(x), right)
    assert all("forward" not in vars(layer) for layer in layers)


@pytest.mark.usefixtures("float16_is_fast")
def test_gradients_and_other_dtypes_run_as_before() -> None:
    layers = model().requires_grad_(True)
    x = torch.randn(5, 128)
    right = layers(x)
    with patch_linear_float16(layers, include="*") as patch:
        assert torch.equal(layers(x), right)
        layers(x).sum().backward()
        assert {state.state for state in patch.report().states} == {"waiting"}
        assert layers.double()(x.double()).dtype == torch.float64


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="max_error must be a share from 0 to 1"):
        patch_linear_float16(model(), max_error=-1)
    with pytest.raises(ValueError, match="include"):
        patch_linear_float16(model(), include="nothing.*")
    with pytest.raises(ValueError, match="nothing"):
        patch_linear_float16(nn.Sequential(nn.ReLU()))


@pytest.mark.usefixtures("float16_is_fast")
def test_a_layer_of_zeros_is_exact_in_float16() -> None:
    layer = nn.Sequential(nn.Linear(128, 64, bias=False)).requires_grad_(False)
    layer[0].weight.zero_()
    with patch_linear_float16(layer, include="*") as patch:
        assert not layer(torch.randn(8, 128)).any()
        assert [state.state for state in patch.report().states] == ["on"]
