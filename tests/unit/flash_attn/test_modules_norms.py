"""flash-attn's norms against their definition in float64: forward, gradients, masks, the order of results."""

import itertools
from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same_gradients, near, rand
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core.flash_attn.modules import norms

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


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
        near(actual, wanted, CLOSE[dtype])
    leaves, references = ([t for t in some if t is not None] for some in (leaves, references))
    assert_same_gradients(
        results, leaves, expected, references, CLOSE[torch.bfloat16 if dtype == torch.float16 else dtype]
    )


@pytest.mark.parametrize(
    ("dtype", "rms", "extra", "with_bias"),
    some(itertools.product(CLOSE, (False, True), ((), ("residual",), ("rowscale",)), (False, True)), 5),
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
