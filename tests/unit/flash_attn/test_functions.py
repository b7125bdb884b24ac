"""flash-attn's functions for one length against plain float64 attention: flags, layouts, gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_support.flash_attn import oracle
from attn_support.flash_attn.oracle import F64, FLAGS, assert_same, assert_same_gradients, inputs, plain, rand
from torch import Tensor

from pascal_attn_core import flash_attn as fa
from pascal_attn_core.flash_attn.modules import version3


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 9, 9, 4, 2, 8), (2, 5, 12, 3, 1, 8), (1, 12, 5, 2, 2, 4), (2, 1, 40, 4, 4, 8), (2, 45, 70, 4, 2, 8)]
)
def test_every_flag_means_what_it_means_there_forward_and_backward(flags, sizes: tuple, request) -> None:
    if sizes[1] == 45:
        request.getfixturevalue("tiled")
    flags = oracle.with_slopes(flags, sizes[0], sizes[3])
    tensors = inputs(*sizes)
    out, lse, probs = fa.flash_attn_func(*tensors, **flags, return_attn_probs=True)
    expected, expected_lse = plain(*(same := oracle.leaves_of(tensors)), **flags)
    assert probs is None
    assert out.is_contiguous()
    assert_same(out, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")
    assert_same_gradients(out, tensors, expected, same)
    assert_same(fa.flash_attn_func(*tensors, **flags), expected, F64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_every_dtype_works(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = inputs(2, 33, 50, 4, 2, 16, dtype)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    expected, expected_lse = plain(q.double(), k.double(), v.double(), causal=causal)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_same(out, expected, dtype)
    assert_same(lse, expected_lse, dtype, "lse")


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [t.flatten(0, 1) for t in tensors]


ENDS = torch.tensor([0, 6, 12], dtype=torch.int32)
LENGTHS = (ENDS, ENDS, 6, 6)
LAYOUTS: dict[str, Callable[..., tuple]] = {
    "flash_attn_func": lambda q, k, v: (q, k, v),
    "flash_attn_qkvpacked_func": lambda q, k, v: (torch.stack([q, k, v], 2),),
    "flash_attn_kvpacked_func": lambda q, k, v: (q, torch.stack([k, v], 2)),
    "flash_attn_varlen_func": lambda q, k, v: (*_flat(q, k, v), *LENGTHS),
    "flash_attn_varlen_kvpacked_func": lambda q, k, v: (*_flat(q, torch.stack([k, v], 2)), *LENGTHS),
    "flash_attn_varlen_qkvpacked_func": lambda q, k, v: (*_flat(torch.stack([q, k, v], 2)), ENDS, 6),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_with_its_arguments_by_position_in_the_order_they_have_there(name: str) -> None:
    tensors, slopes = inputs(2, 6, 6, 2, 2, 4), torch.tensor([0.1, 0.2])
    out = getattr(fa, name)(*LAYOUTS[name](*tensors), 0.0, 0.5, True, (3, 0), 2.0, slopes, True, True)[0]
    rule = {"softmax_scale": 0.5, "causal": True, "window_size": (3, 0), "softcap": 2.0, "alibi_slopes": slopes}
    expected, _ = plain(*(same := oracle.leaves_of(tensors)), **rule)
    assert_same(out.view_as(expected), expected, F64)
    assert_same_gradients(out.view_as(expected), tensors, expected, same)


@pytest.mark.usefixtures("tiled")
def test_dropout_drops_and_its_backward_drops_the_same() -> None:
    q, k, _ = inputs(2, 20, 24, 2, 1, 8)
    v = torch.ones(2, 24, 1, 8, dtype=F64, requires_grad=True)
    torch.manual_seed(1)
    out = fa.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(1)
    assert torch.equal(fa.flash_attn_func(q, k, v, dropout_p=0.5), out)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.1
    # v is what the output is linear in: <grad, out> = <dv, v> only if both passes dropped the same
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, grad)
    assert_same((dv * v).sum(), (grad * out).sum(), F64)


def test_alibi_never_makes_a_matrix_of_scores() -> None:
    q, k, v = (torch.randn(1, 3000, 1, 4) for _ in range(3))
    with oracle.Largest() as largest:
        fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.tensor([0.01]))
    assert largest.elements < 3000 * 3000 / 4


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": 5}, TypeError, "window_size must be two whole numbers"),
    ({"window_size": (1.5, 2)}, TypeError, "window_size must be two whole numbers"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
    ({"softcap": math.inf}, ValueError, "softcap must be finite"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must be \[2\] or \[2, 2\], got \[3\]"),
    ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a tensor"),
    ({"alibi_slopes": torch.ones(2, requires_grad=True)}, ValueError, "must not require a gradient"),
    ({"q": torch.ones(2, 3, 4)}, ValueError, "q must be"),
    ({"k": None}, TypeError, "k must be a tensor"),
    ({"k": torch.ones(1, 3, 2, 4)}, ValueError, r"k must be \[2, tokens, heads, head_dim\], got \[1, 3, 2, 4\]"),
    ({"q": torch.ones(2, 3, 5, 4)}, ValueError, "multiple"),
    ({"v": torch.ones(2, 3, 2, 4, dtype=F64)}, TypeError, "one dtype"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD_CALLS, ids=lambda x: str(x)[:30])
def test_wrong_arguments_are_named(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments = {name: torch.ones(2, 3, 2, 4) for name in "qkv"} | change
    with pytest.raises(kind, match=words):
        fa.flash_attn_func(**arguments)


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((1, 2), {}, "missing a required argument: 'v'"),
        ((1, 2, 3), {"q": 1}, "multiple values for argument 'q'"),
        ((1, 2, 3), {"scale": 1.0}, "unexpected keyword argument 'scale'"),
        ((1, 2), {"scale": 1.0}, "missing a required argument: 'v'"),
        (tuple(range(18)), {}, "too many positional arguments"),
    ],
)
def test_a_call_that_does_not_fit_a_version_is_refused(given: tuple, named: dict, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        version3.flash_attn_func(*given, **named)


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 3.0}])
def test_version_3(flags: dict[str, Any]) -> None:
    q, k, v = rand(2, 5, 4, 8), rand(2, 7, 2, 8), rand(2, 7, 2, 8)
    expected, lse = plain(q, k, v, **flags)
    torch.testing.assert_close(version3.flash_attn_func(q, k, v, **flags), expected)
    out, got = version3.flash_attn_func(q, k, v, return_attn_probs=True, num_splits=4, pack_gqa=True, **flags)
    torch.testing.assert_close((out, got.double()), (expected, lse))
    torch.testing.assert_close(
        version3.flash_attn_func(q, k, v, 0.3, True), plain(q, k, v, softmax_scale=0.3, causal=True)[0]
    )
    gqa = torch.cat([q, k[:, :5], v[:, :5]], 2)
    torch.testing.assert_close(
        version3.flash_attn_qkvpacked_func(gqa, num_heads_q=4, **flags), plain(q, k[:, :5], v[:, :5], **flags)[0]
    )
    qkv = rand(2, 5, 3, 2, 8)
    torch.testing.assert_close(version3.flash_attn_qkvpacked_func(qkv, **flags), plain(*qkv.unbind(2), **flags)[0])


def test_version_3_of_concatenated_sequences() -> None:
    (ends, key_ends), (q, k, v) = (
        (torch.tensor(n).int() for n in ([0, 4, 6], [0, 3, 8])),
        (rand(n, 2, 8) for n in (6, 8, 8)),
    )
    out, lse = version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 6)
    torch.testing.assert_close(out[4:], plain(q[None, 4:], k[None, 3:], v[None, 3:], causal=True)[0][0])
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            version3.flash_attn_varlen_func(q, k, v, ends, key_ends, 4, 5, **{name: torch.tensor([3, 2])})


@pytest.mark.parametrize("name", ["q_descale", "attention_chunk", "k_descale", "v_descale", "qv"])
def test_version_3_refuses_what_would_change_the_result(name: str) -> None:
    q = rand(1, 2, 1, 8)
    value: Any = 4 if name == "attention_chunk" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        version3.flash_attn_func(q, q, q, **{name: value})
