"""Activations, linear layers and MLPs against plain torch; what their checkpoints are called."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.flash_attn.oracle import assert_same_gradients, leaves_of, near, rand
from torch import Tensor

from pascal_attn_core.flash_attn.modules import absent
from pascal_attn_core.flash_attn.modules import activations as act
from pascal_attn_core.flash_attn.modules.mlp import (
    FusedDense,
    FusedMLP,
    GatedMlp,
    Mlp,
    fused_dense_func,
    fused_mlp_func,
)

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


# Function, definition, shapes of the inputs.
ACTIVATIONS: list[Any] = [
    (act.gelu_fwd, gelu, [(6, 5)]),
    (act.sqrelu_fwd, lambda x: x.clamp(min=0) ** 2, [(6, 5)]),
    (act.swiglu, lambda x, y: x * torch.sigmoid(x) * y, [(6, 5), (6, 5)]),
    (act.SwiGLUFunction.apply, lambda x, y: x * torch.sigmoid(x) * y, [(6, 5), (6, 5)]),
    (act.bias_gelu_impl, lambda x, b: gelu(x + b), [(6, 5), (5,)]),
]


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("function", "defined", "shapes"), ACTIVATIONS)
def test_activations_and_their_gradients(dtype: torch.dtype, function: Any, defined: Any, shapes: Any) -> None:
    size = 3 if len(shapes) == 1 else 1
    leaves = [(rand(*shape) * size).to(dtype).requires_grad_() for shape in shapes]
    references = leaves_of(leaves)
    grad = (rand(6, 5) * size).to(dtype)
    out, expected = function(*leaves), defined(*references)
    assert out.dtype == dtype
    near(out, expected, CLOSE[dtype])
    wanted = torch.autograd.grad(expected, references, grad.double())
    for one, other in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        assert one.dtype == dtype
        near(one, other, CLOSE[dtype] * (4 if len(leaves) > 1 else 1))


def test_swiglu_keeps_only_its_inputs() -> None:
    x, y = (torch.randn(64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        act.swiglu(x, y)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), y.data_ptr()]


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("save_pre_act", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_mlp(activation: str, level: int, save_pre_act: bool, bias: bool) -> None:
    torch.manual_seed(0)
    shapes = [(2, 3, 4), (6, 4), (5, 6), *([(6,), (5,)] if bias else [])]
    leaves = [rand(*shape).requires_grad_() for shape in shapes]
    x, weight1, weight2, *biases = leaves
    function = {"gelu_approx": gelu, "relu": torch.relu, "sqrelu": lambda t: torch.relu(t) ** 2}[activation]
    expected = F.linear(function(F.linear(x, weight1, *biases[:1])), weight2, *biases[1:])
    options = {"activation": activation, "save_pre_act": save_pre_act, "checkpoint_lvl": level}
    out, residual = fused_mlp_func(x, weight1, weight2, *biases, **options, return_residual=True)
    assert residual is x
    torch.testing.assert_close(out, expected)
    assert_same_gradients(out, leaves, expected, leaves, 1e-7)


def test_a_checkpoint_level_keeps_less() -> None:
    x, weight1, weight2 = torch.randn(8, 16), torch.randn(512, 16), torch.randn(4, 512)
    weight1.requires_grad_()
    weight2.requires_grad_()
    sizes = []
    for level in (0, 1, 2):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = fused_mlp_func(x, weight1, weight2, checkpoint_lvl=level)
        sizes.append(sum(kept.values()))
        del out
    assert sizes[0] > sizes[1] == sizes[2]


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
    with pytest.raises(ValueError, match="checkpoint_lvl must be"):
        FusedMLP(4, checkpoint_lvl=3)
    with pytest.raises(NotImplementedError, match="process_group is not supported"):
        FusedMLP(6)(x.flatten(0, 1), process_group=object())


def test_names_that_are_not_provided() -> None:
    class Model(torch.nn.Module, absent.GenerationMixin):
        pass

    for name in ("ParallelFusedMLP", "all_gather", "Block", "decode"):
        with pytest.raises(NotImplementedError, match=f"{name} is not provided"):
            getattr(absent, name)(4)
    with pytest.raises(NotImplementedError, match="GenerationMixin is not provided"):
        Model()


def test_mlps() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6)
    mlp = Mlp(6, return_residual=True)
    out, residual = mlp(x)
    assert residual is x
    assert mlp.fc1.out_features == 24
    torch.testing.assert_close(out, mlp.fc2(F.gelu(mlp.fc1(x))))
    for activation in (F.sigmoid, F.silu, torch.tanh):
        gated = GatedMlp(6, activation=activation, multiple_of=16)
        assert gated.fc1.out_features == 32
        assert list(gated.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
        y, gate = gated.fc1(x).chunk(2, -1)
        torch.testing.assert_close(gated(x), gated.fc2(y * activation(gate)))
    assert GatedMlp(300).fc2.in_features == 896
