"""These tests check what is beside attention in xformers' stand-in, wrong arguments, ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pascal_attn_core.stand_ins.attn_bias import (
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularMask,
)
from pascal_attn_core.stand_ins.sageattention import sageattn, sageattn_varlen
from pascal_attn_core.stand_ins.xformers import (
    ANY_OPS,
    RMSNorm,
    SwiGLU,
    index_select_cat,
    memory_efficient_attention,
    scaled_index_add,
)

X = torch.randn(2, 12, 3, 8)
ENDS = torch.tensor([0, 5, 12])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: memory_efficient_attention(X, X[0], X), ValueError, r"must all be .*, got .*, \[12, 3, 8\]"),
        (lambda: memory_efficient_attention(X[0, 0], X[0, 0], X[0, 0]), ValueError, r"got \[3, 8\]"),
        (lambda: memory_efficient_attention(X, X, X, "causal"), TypeError, "an AttentionBias or None, got str"),
        (lambda: memory_efficient_attention(X, X, X, X), ValueError, r"attn_mask must broadcast to \(2, 3, 12, 12\)"),
        (lambda: memory_efficient_attention(X, X, X, p=2.0), ValueError, "dropout_p must be from 0 to 1, got 2.0"),
        (
            lambda: memory_efficient_attention(X, X, X, BlockDiagonalMask.from_seqlens([12])),
            ValueError,
            r"query must be \[1, 12, ...\] for this BlockDiagonalMask, got batch 2 and 12 tokens",
        ),
        (
            lambda: memory_efficient_attention(X[:1], X[:1], X[:1], BlockDiagonalMask.from_seqlens([12], [9])),
            ValueError,
            r"key must be \[1, 9, ...\] for this BlockDiagonalMask, got batch 1 and 12 tokens",
        ),
        (
            lambda: memory_efficient_attention(X[:1], X[:1], X[:1], BlockDiagonalMask.from_seqlens([12], [9, 3])),
            ValueError,
            r"cu_seqlens_q and cu_seqlens_k must both be \[B \+ 1\], got \[2\] and \[3\]",
        ),
        *(
            (lambda mask=mask: memory_efficient_attention(X[:1], X[:1], X[:1], mask), ValueError, "kv_seqlen must be")
            for mask in (
                BlockDiagonalPaddedKeysMask.from_seqlens([5, 7], 6, [6, 7]),
                BlockDiagonalGappyKeysMask.from_seqlens([5, 7], [0, 6, 12], [7, 6]),
                BlockDiagonalGappyKeysMask.from_seqlens([5, 7], [0, 6, 12], [6]),
            )
        ),
        (lambda: BlockDiagonalMask.from_seqlens([5]).split(X), ValueError, r"\[1, 5, ...\], got \[2, 12, 3, 8\]"),
        (lambda: BlockDiagonalMask.from_seqlens([5]).make_local_attention(0), ValueError, "window_size must be"),
        (lambda: LocalAttentionFromBottomRightMask(-1, 0), ValueError, "must be at least 0, got -1 and 0"),
        (lambda: sageattn(X, X, X, "BNHD"), ValueError, r"tensor_layout must be one of \['HND', 'NHD'\], got 'BNHD'"),
        (lambda: sageattn(X, X, X[0]), ValueError, r"v must be \[B, heads, tokens, head_dim\], got shape \(12, 3, 8\)"),
        (lambda: sageattn(X, X[:, :5], X), ValueError, "heads"),
        (lambda: sageattn(X, None, X), TypeError, "k must be a tensor"),
        (lambda: sageattn_varlen(X[0], X[0], X[0], ENDS, ENDS[:2], 7, 7), ValueError, "cu_seqlens_q and cu_seqlens_k"),
        (lambda: sageattn_varlen(X, X, X, ENDS, ENDS, 7, 7), ValueError, r"q must be \[total, heads, head_dim\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.torch_2_5
def test_under_compile_a_call_is_one_node_and_blocks_break_the_graph() -> None:
    blocks = BlockDiagonalMask.from_seqlens([5, 7])
    calls: list[tuple[bool, Callable[[Any], Any]]] = [
        (True, lambda x: memory_efficient_attention(x, x, x, LowerTriangularMask(), op=ANY_OPS)),
        (True, lambda x: sageattn(x, x, x, "NHD", smooth_k=False)),
        (False, lambda x: memory_efficient_attention(x[:1], x[:1], x[:1], blocks)),
    ]
    for fullgraph, call in calls:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=fullgraph)(X), call(X))


def test_tensors_go_into_blocks_and_come_out_again() -> None:
    tensors = [torch.randn(2, 5, 3, 8), torch.randn(1, 4, 3, 8), torch.randn(3, 1, 3, 8)]
    mask, x = BlockDiagonalMask.from_tensor_list(tensors)
    assert x.shape == (1, 17, 3, 8)
    out = mask.split(memory_efficient_attention(x, x, x, mask))
    for tensor, part in zip(tensors, out):
        torch.testing.assert_close(part, memory_efficient_attention(tensor, tensor, tensor))
    assert [part.shape[1] for part in BlockDiagonalMask.from_seqlens([3, 0, 14]).split(x)] == [3, 0, 14]


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_and_rms_norm_have_xformers_weights(bias: bool) -> None:
    packed, apart = SwiGLU(8, 20, 6, bias=bias), SwiGLU(8, 20, 6, bias, _pack_weights=False)
    names = {"w12.weight", "w3.weight"} | ({"w12.bias", "w3.bias"} if bias else set())
    assert packed.state_dict().keys() == names
    assert packed.w12.weight.shape == (40, 8)
    with torch.no_grad():
        for name, own in (("weight", nn.init.normal_), *((("bias", nn.init.normal_),) if bias else ())):
            own(getattr(packed.w12, name))
            first, second = getattr(packed.w12, name).chunk(2)
            getattr(apart.w1, name).copy_(first)
            getattr(apart.w2, name).copy_(second)
        apart.w3.load_state_dict(packed.w3.state_dict())
    expected = apart.w3(F.silu(apart.w1(X)) * apart.w2(X))
    torch.testing.assert_close(packed(X), expected)
    torch.testing.assert_close(apart(X), expected)
    norm = RMSNorm(8)
    assert norm.state_dict().keys() == {"weight"}
    torch.testing.assert_close(norm(X), X * (X.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    assert RMSNorm(8, include_weight=False, eps=0.5).weight is None


def test_the_indexing_of_dinov2() -> None:
    sources, indices = [torch.randn(4, 6), torch.randn(3, 2)], [torch.tensor([3, 0]), torch.tensor([1])]
    expected = torch.cat([sources[0][3], sources[0][0], sources[1][1]])
    torch.testing.assert_close(index_select_cat(sources, indices), expected)
    x, source, scaling = torch.randn(4, 5, 6), torch.randn(2, 5, 6), torch.randn(6)
    expected = x.clone()
    expected[[3, 0]] += 2.0 * scaling * source
    assert scaled_index_add(x, indices[0], source, scaling, alpha=2.0) is x
    torch.testing.assert_close(x, expected)
