"""Activations, linear layers, MLPs, blocks and embeddings against plain torch; what their checkpoints are called."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.flash_attn.oracle import assert_same_gradients, leaves_of, near, rand
from torch import Tensor, nn

from pascal_attn_core.flash_attn.modules import absent
from pascal_attn_core.flash_attn.modules import activations as act
from pascal_attn_core.flash_attn.modules.block import Block, StochasticDepth
from pascal_attn_core.flash_attn.modules.embedding import GPT2Embeddings, PatchEmbed
from pascal_attn_core.flash_attn.modules.mha import MHA
from pascal_attn_core.flash_attn.modules.mlp import (
    FusedDense,
    FusedMLP,
    GatedMlp,
    Mlp,
    fused_dense_func,
    fused_mlp_func,
)
from pascal_attn_core.flash_attn.modules.norms import RMSNorm

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


# Forward, backward by hand (of the inputs and the gradient of the result), definition, shapes of the inputs.
ACTIVATIONS: list[Any] = [
    (act.gelu_fwd, lambda x, g: [act.gelu_bwd(g, x)], gelu, [(6, 5)]),
    (act.fast_gelu_impl, lambda x, g: [act.gelu_bwd(g, x)], gelu, [(6, 5)]),
    (act.sqrelu_fwd, lambda x, g: [act.sqrelu_bwd(g, x)], lambda x: x.clamp(min=0) ** 2, [(6, 5)]),
    (torch.relu, lambda x, g: [act.relu_bwd(g, x)], lambda x: x.clamp(min=0), [(6, 5)]),
    (act.swiglu, act.swiglu_bwd, lambda x, y: x * torch.sigmoid(x) * y, [(6, 5), (6, 5)]),
    (act.bias_gelu_impl, lambda x, b, g: act.bias_gelu_back(g, x, b), lambda x, b: gelu(x + b), [(6, 5), (5,)]),
]


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("forward", "backward", "defined", "shapes"), ACTIVATIONS)
def test_activations_and_their_gradients(dtype: torch.dtype, forward: Any, backward: Any, defined: Any, shapes) -> None:
    size = 3 if len(shapes) == 1 else 1
    leaves = [(rand(*shape) * size).to(dtype).requires_grad_() for shape in shapes]
    references = leaves_of(leaves)
    grad = (rand(6, 5) * size).to(dtype)
    out, expected = forward(*leaves), defined(*references)
    assert out.dtype == dtype
    near(out, expected, CLOSE[dtype])
    wanted = torch.autograd.grad(expected, references, grad.double())
    for actual in (torch.autograd.grad(out, leaves, grad), backward(*(leaf.detach() for leaf in leaves), grad)):
        for one, other in zip(actual, wanted, strict=True):
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
    for name in ("ParallelFusedMLP", "all_gather", "get_dim_for_local_rank"):
        with pytest.raises(NotImplementedError, match=f"{name} is not provided"):
            getattr(absent, name)(4)


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


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
@pytest.mark.parametrize("prenorm", [False, True])
def test_a_block_fused_or_not_is_the_same(norm: Any, prenorm: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mixer_cls": lambda dim: MHA(dim, 2), "norm_cls": norm, "prenorm": prenorm}
    plain, fused = Block(16, **options), Block(16, fused_dropout_add_ln=True, **options)
    keys = list(plain.state_dict())
    assert keys[:4] == [f"mixer.{part}.{end}" for part in ("Wqkv", "out_proj") for end in ("weight", "bias")]
    assert keys[4:6] == ["norm1.weight", "norm1.bias" if norm is nn.LayerNorm else "mlp.fc1.weight"]
    fused.load_state_dict(plain.state_dict())
    x, residual = torch.randn(2, 5, 16), torch.randn(2, 5, 16) if prenorm else None
    result = plain(x, residual)
    torch.testing.assert_close(fused(x, residual), result)
    if prenorm:
        total = x + residual
        first = plain.mixer(plain.norm1(total))
        torch.testing.assert_close(result, (plain.mlp(plain.norm2(first + total)), first + total))
    else:
        first = plain.norm1(plain.mixer(x) + x)
        torch.testing.assert_close(result, plain.norm2(plain.mlp(first) + first))


def test_stochastic_depth_and_what_a_block_refuses() -> None:
    torch.manual_seed(0)
    depth = StochasticDepth(0.25)
    out = depth(torch.ones(4000, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert 0.7 < (out[:, 0] > 0).float().mean() < 0.8
    assert torch.equal(out[:, 0], out[:, 1])
    assert torch.equal(depth.eval()(torch.ones(3)), torch.ones(3))
    assert not StochasticDepth(1.0)(torch.ones(3)).any()
    block = Block(16, lambda dim: MHA(dim, 2), drop_path1=1.0, drop_path2=0.5, fused_dropout_add_ln=True)
    _, residual = block(torch.randn(2, 3, 16), torch.ones(2, 3, 16))
    assert residual.shape == (2, 3, 16)
    with pytest.raises(ValueError, match="residual_in_fp32 needs"):
        Block(16, lambda dim: MHA(dim, 2), prenorm=False, residual_in_fp32=True)


def test_embeddings() -> None:
    ids = torch.tensor([[3, 1, 2], [0, 4, 4]])
    gpt = GPT2Embeddings(6, 5, 8, word_embed_proj_dim=4)
    assert list(gpt.state_dict()) == ["word_embeddings.weight", "project_in.weight", "position_embeddings.weight"]
    words = gpt.word_embeddings.weight[ids] @ gpt.project_in.weight.T
    torch.testing.assert_close(gpt(ids), words + gpt.position_embeddings.weight[:3])
    image, patches = torch.randn(2, 3, 8, 12), PatchEmbed((8, 12), 4, 3, 10, fused_bias_fc=True)
    conv = nn.Conv2d(3, 10, 4, 4)
    conv.load_state_dict({"weight": patches.proj.weight.unflatten(1, (3, 4, 4)), "bias": patches.proj.bias})
    torch.testing.assert_close(patches(image), conv(image).flatten(2).transpose(1, 2))
    assert PatchEmbed((8, 12), 4, 3, 10, flatten=False)(image).shape == (2, 2, 3, 10)
    with pytest.raises(ValueError, match=r"x must be \[B, C, 8, 12\]"):
        patches(image[..., :8])
