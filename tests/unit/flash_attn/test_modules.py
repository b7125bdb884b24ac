"""Linear layers, MLPs, attention with projections and norms against their definitions in plain torch."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.flash_attn.oracle import F64, assert_same_gradients, leaves_of, near, plain, rand
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core.flash_attn.modules import norms
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


CLOSE_NORMS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def normed(total: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    centred = total if rms else total - total.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return out if bias is None else out + bias


def leaf(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return rand(*shape).to(dtype).requires_grad_()


def doubles(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_same(results: Any, expected: list[Tensor], leaves: list[Any], references: list[Any], dtype: Any) -> None:
    """The results, and the gradients of all leaves."""
    for actual, wanted in zip(results, expected, strict=True):
        near(actual, wanted, CLOSE_NORMS[dtype])
    leaves, references = ([t for t in some if t is not None] for some in (leaves, references))
    assert_same_gradients(
        results, leaves, expected, references, CLOSE_NORMS[torch.bfloat16 if dtype == torch.float16 else dtype]
    )


@pytest.mark.parametrize(
    ("dtype", "rms", "extra", "with_bias"),
    some(itertools.product(CLOSE_NORMS, (False, True), ((), ("residual",), ("rowscale",)), (False, True)), 5),
)
def test_the_triton_norm(dtype: torch.dtype, rms: bool, extra: Any, with_bias: bool) -> None:
    torch.manual_seed(1)
    shape, hidden = (2, 3, 10), 10
    x, weight = leaf(*shape, dtype=dtype), leaf(hidden, dtype=dtype)
    bias = leaf(hidden, dtype=dtype) if with_bias else None
    residual = leaf(*shape, dtype=torch.promote_types(dtype, torch.float32)) if "residual" in extra else None
    rowscale = torch.rand(2, 3) if "rowscale" in extra else None
    leaves = [x, weight, bias, residual]
    ref_x, ref_w, ref_b, ref_r = references = doubles(*leaves)
    total = ref_x * (1.0 if rowscale is None else rowscale[..., None])
    total = total + (0 if ref_r is None else ref_r)
    expected = [normed(total, ref_w, ref_b, 1e-4, rms), total]
    options = {"rowscale": rowscale, "prenorm": True, "eps": 1e-4}
    if rms:
        results = norms.rms_norm_fn(x, weight, bias, residual, **options)
    else:
        results = norms.layer_norm_fn(x, weight, bias, residual, is_rms_norm=rms, **options)
    assert isinstance(results, tuple)
    assert (results[0].dtype, results[-1].dtype) == (dtype, dtype if residual is None else residual.dtype)
    assert_same(results, expected, leaves, references, dtype)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_the_older_norm(rms: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x0, residual = leaf(2, 3, 8, dtype=dtype), leaf(2, 3, 8, dtype=torch.promote_types(dtype, torch.float32))
    weight, bias = leaf(8, dtype=dtype), leaf(8, dtype=dtype)
    rowscale = torch.rand(2, 3)
    function = norms.dropout_add_rms_norm if rms else norms.dropout_add_layer_norm
    out, total = function(x0, residual, weight, bias, 0.4, 1e-5, rowscale, prenorm=True)
    mask = total != residual
    assert 0.3 < mask.double().mean() < 0.9
    assert out.dtype == dtype
    assert total.dtype == residual.dtype
    leaves = [x0, residual, weight, bias]
    r_x, r_r, r_w, r_b = references = doubles(*leaves)
    ref_total = r_x * rowscale[..., None].double() * mask / 0.6 + r_r
    expected = normed(ref_total, r_w, r_b, 1e-5, rms)
    assert_same((out, total), [expected, ref_total], leaves, references, dtype)
    with pytest.raises(NotImplementedError, match="layerscale is not supported"):
        function(x0, residual, weight, bias, 0.0, 1e-5, layerscale=torch.ones(8))
    with pytest.raises(NotImplementedError, match="return_dropout_mask is not supported"):
        function(x0, residual, weight, bias, 0.0, 1e-5, return_dropout_mask=True)


def test_the_modules_and_their_names_in_a_checkpoint() -> None:
    x, residual = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    for module in (norms.RMSNorm(6), norms.OlderRMSNorm(6), norms.DropoutAddRMSNorm(6)):
        assert list(module.state_dict()) == ["weight"]
        torch.testing.assert_close(module(x), normed(x.double(), torch.ones(6, dtype=F64), None, 1e-5, True).float())
    out, total = norms.RMSNorm(6)(x.bfloat16(), residual=residual, prenorm=True, residual_in_fp32=True)
    assert out.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    prenorm = norms.DropoutAddRMSNorm(6, prenorm=True, p=0.5, residual_in_fp32=True)
    out, total = prenorm(x.bfloat16())
    assert total.dtype == torch.float32
    assert (total == 0).float().mean() > 0.1
    assert torch.equal(prenorm.eval()(x.bfloat16())[1], x.bfloat16().float())
    dropped = norms.RMSNorm(6, dropout_p=0.5)
    assert (dropped(x) == 0).any()
    assert not (dropped.eval()(x) == 0).any()
    weight = torch.randn(6)
    torch.testing.assert_close(norms.rms_norm(x, weight, 1e-5), norms.rms_norm_fn(x, weight, None, eps=1e-5))


WRONG = [
    ({"residual": torch.zeros(2, 6)}, r"residual must be \[3, 6\]"),
    ({"weight": torch.ones(5)}, r"weight must be \[6\], got \[5\]"),
    ({"rowscale": torch.ones(2)}, r"rowscale must be \[3\]"),
    ({"dropout_p": 1.5}, "dropout probability has to be between 0 and 1"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(3, 6), "weight": torch.ones(6), "bias": None, **changed}
    with pytest.raises(ValueError, match=words):
        norms.layer_norm_fn(**arguments)
    with pytest.raises(TypeError, match="floating point"):
        norms.layer_norm_fn(torch.zeros(3, 6).int(), torch.ones(6), None)
