"""Linear layers, MLPs and attention with projections against plain torch; what their checkpoints are called."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.flash_attn.oracle import F64, assert_same_gradients, leaves_of, near, plain, rand
from torch import Tensor

from pascal_attn_core.flash_attn.modules.mha import MHA
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


LAYERS: list[dict[str, Any]] = [
    {},
    {"num_heads_kv": 2, "causal": True},
    {"use_flash_attn": True, "window_size": (4, 0), "causal": True},
    {"qkv_proj_bias": False, "softmax_scale": 0.3},
]


@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_is_its_parts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MHA(32, 4, dtype=F64, **options)
    x = rand(2, 6, 32).requires_grad_()
    heads_kv = options.get("num_heads_kv", 4)
    parts = layer.Wqkv(x).split([32, 8 * heads_kv, 8 * heads_kv], -1)
    rule = {name: options[name] for name in ("causal", "window_size", "softmax_scale") if name in options}
    expected, _ = plain(*(part.unflatten(-1, (-1, 8)) for part in parts), **rule)
    expected = layer.out_proj(expected.flatten(-2))
    out = layer(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *layer.parameters()]
    assert_same_gradients(out, leaves, expected, leaves, 1e-7)


@pytest.mark.parametrize("cross", [True, False])
def test_what_a_checkpoint_is_called(cross: bool) -> None:
    parts = ["Wq", "Wkv", "out_proj"] if cross else ["Wqkv", "out_proj"]
    assert list(MHA(32, 4, cross_attn=cross).state_dict()) == [
        f"{p}.{end}" for p in parts for end in ("weight", "bias")
    ]


def test_sequences_of_different_lengths_and_cross_attention() -> None:
    ends = torch.tensor([0, 4, 4, 6]).int()
    for heads_kv in (4, 2):
        layer = MHA(32, 4, heads_kv, causal=True, dtype=F64)
        x = rand(6, 32)
        out = layer(x, cu_seqlens=ends, max_seqlen=4)
        torch.testing.assert_close(out, torch.cat([layer(x[None, :4])[0], layer(x[None, 4:])[0]]))
    cross = MHA(32, 4, 2, cross_attn=True, dtype=F64)
    x, other = rand(2, 3, 32), rand(2, 5, 32)
    kv = cross.Wkv(other).unflatten(-1, (2, 2, 8))
    expected = plain(cross.Wq(x).unflatten(-1, (4, 8)), *kv.unbind(2))[0]
    torch.testing.assert_close(cross(x, x_kv=other), cross.out_proj(expected.flatten(-2)))


def test_what_does_not_fit_attention_is_refused() -> None:
    x = torch.zeros(1, 2, 32)
    for heads in ((5, None), (4, 3)):
        with pytest.raises(ValueError, match="num_heads of num_heads_kv, got 32"):
            MHA(32, *heads)
    with pytest.raises(ValueError, match="x_kv must be None without cross_attn"):
        MHA(32, 4)(x, x)
    for name in ("inference_params", "mixer_subset", "key_padding_mask"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            MHA(32, 4)(x, **{name: object()})
    with pytest.raises(NotImplementedError, match="rotary_emb_dim is not supported"):
        MHA(32, 4, rotary_emb_dim=8)
