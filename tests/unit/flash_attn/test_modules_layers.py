"""Linear layers and MLPs against plain torch; what their checkpoints are called."""

import pytest
import torch
import torch.nn.functional as F
from attn_support.flash_attn.oracle import assert_same_gradients, leaves_of, near, rand
from torch import Tensor

from pascal_attn_core.flash_attn.modules.mlp import FusedDense, FusedMLP, fused_dense_func, fused_mlp_func, swiglu

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_swiglu_and_its_gradients(dtype: torch.dtype) -> None:
    leaves = [rand(6, 5).to(dtype).requires_grad_() for _ in range(2)]
    references = leaves_of(leaves)
    grad = rand(6, 5).to(dtype)
    out, expected = swiglu(*leaves), references[0] * torch.sigmoid(references[0]) * references[1]
    assert out.dtype == dtype
    near(out, expected, CLOSE[dtype])
    wanted = torch.autograd.grad(expected, references, grad.double())
    for one, other in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        assert one.dtype == dtype
        near(one, other, CLOSE[dtype] * 4)


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_mlp(activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    shapes = [(2, 3, 4), (6, 4), (5, 6), *([(6,), (5,)] if bias else [])]
    leaves = [rand(*shape).requires_grad_() for shape in shapes]
    x, weight1, weight2, *biases = leaves
    function = {"gelu_approx": gelu, "relu": torch.relu, "sqrelu": lambda t: torch.relu(t) ** 2}[activation]
    expected = F.linear(function(F.linear(x, weight1, *biases[:1])), weight2, *biases[1:])
    options = {"activation": activation, "save_pre_act": False, "checkpoint_lvl": 2}
    out, residual = fused_mlp_func(x, weight1, weight2, *biases, **options, return_residual=True)
    assert residual is x
    torch.testing.assert_close(out, expected)
    assert_same_gradients(out, leaves, expected, leaves, 1e-7)


def test_dense_layers() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 3, 4), FusedDense(4, 5, return_residual=True)
    out, residual = layer(x)
    assert residual is x
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert isinstance(fused_dense_func(x, layer.weight), Tensor)
    mlp = FusedMLP(4, 8, checkpoint_lvl=1, return_residual=True)
    assert list(mlp.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    torch.testing.assert_close(mlp(x)[0], mlp.fc2(gelu(mlp.fc1(x))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(x)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="activation must be one of"):
        FusedMLP(4, activation="tanh")
    with pytest.raises(NotImplementedError, match="process_group is not supported"):
        FusedMLP(6)(x.flatten(0, 1), process_group=object())
