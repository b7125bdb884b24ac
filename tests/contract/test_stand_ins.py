"""SageAttention's and xformers' functions against the definition in float64, with gradients: every mask, every form."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from attn_support import oracle
from torch import Tensor

from pascal_attn_core.observe.report import record
from pascal_attn_core.stand_ins import attn_bias as masks
from pascal_attn_core.stand_ins.sageattention import sageattn, sageattn_varlen
from pascal_attn_core.stand_ins.xformers import memory_efficient_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Q_LENGTHS, K_LENGTHS = [7, 1, 20], [9, 4, 21]


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def inputs(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query ``[B, H, L, D]``, key, value, leaves."""
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in (q, k, k)]


def assert_exact(
    attend: Callable[..., Tensor], given: list[Tensor], mask: Tensor | None = None, **options: Any
) -> None:
    """``attend`` of query, key and value ``[B, H, L, D]``, and its gradients, are those of the definition."""
    dtype, four = given[0].dtype, [*given, mask]
    out = attend(*given)
    right, similar = oracle.exact(four, options)[0], oracle.plain(four, options, oracle.plain_dtype(dtype))[0]
    oracle.assert_close(out, right, similar, "out", dtype=dtype)
    oracle.assert_gradients(lambda grad, _: torch.autograd.grad(out, given, grad), four, options, dtype)


def band(queries: int, keys: int, left: int | None, right: int | None, lower_right: bool) -> Tensor:
    """``[queries, keys]``: True where a query may look."""
    place = torch.arange(queries)[:, None] + (keys - queries) * lower_right
    distance = torch.arange(keys)[None] - place
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= True if left is None else distance >= -left
    return seen & (True if right is None else distance <= right)


DENSE = {
    "LowerTriangularMask": ((), (None, 0, False)),
    "LowerTriangularFromBottomRightMask": ((), (None, 0, True)),
    "LowerTriangularFromBottomRightMask.make_local_attention": ((5,), (4, 0, True)),
    "LocalAttentionFromBottomRightMask": ((3, 2), (3, 2, True)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_masks_of_one_sequence(name: str, dtype: torch.dtype) -> None:
    arguments, rule = DENSE[name]
    kind, _, method = name.partition(".")
    make = getattr(masks, kind)
    mask = getattr(make(), method)(*arguments) if method else make(*arguments)
    mask = mask.to("cpu")
    for queries, keys in ((30, 30), (20, 33), (33, 20)):
        given = inputs((2, 3, queries, 8), (2, 3, keys, 8), dtype)
        attend = lambda *qkv: heads_first(memory_efficient_attention(*map(heads_first, qkv), mask))  # noqa: E731
        assert_exact(attend, given, band(queries, keys, *rule))


# constructor -> its arguments, first key and number of keys of each block, (left, right, lower right) within a block
CROSS = (Q_LENGTHS, K_LENGTHS), [(0, 9), (9, 4), (13, 21)]
BLOCKS: dict[str, tuple[tuple[Any, ...], list[tuple[int, int]], tuple[int | None, int | None, bool]]] = {
    "BlockDiagonalMask": (*CROSS, (None, None, False)),
    "BlockDiagonalCausalMask": (*CROSS, (None, 0, False)),
    "BlockDiagonalCausalFromBottomRightMask": (*CROSS, (None, 0, True)),
}


def within_blocks(keys: int, ranges: list[tuple[int, int]], rule: tuple[Any, ...]) -> Tensor:
    """``[queries, keys]``: True where a query may look, by the first key and the number of keys of each block."""
    seen, first = torch.zeros(sum(Q_LENGTHS), keys, dtype=torch.bool), 0
    for queries, (start, count) in zip(Q_LENGTHS, ranges):
        seen[first : first + queries, start : start + count] = band(queries, count, *rule)
        first += queries
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_masks_of_blocks(name: str, dtype: torch.dtype) -> None:
    arguments, ranges, rule = BLOCKS[name]
    mask = getattr(masks, name).from_seqlens(*arguments)
    seen = within_blocks(mask.k_seqinfo.seqstart_py[-1], ranges, rule)
    given = inputs((1, 3, seen.shape[0], 8), (1, 3, seen.shape[1], 8), dtype)
    assert_exact(lambda *qkv: heads_first(memory_efficient_attention(*map(heads_first, qkv), mask)), given, seen)


def test_blocks_never_make_a_mask_and_dropout_works_in_them() -> None:
    mask = masks.BlockDiagonalMask.from_seqlens([2048] * 4)
    query = torch.randn(1, 8192, 1, 8)
    with record() as seen:
        memory_efficient_attention(query, query, query, mask)
    assert {kind.mask for kind in seen.calls} == {"none"}
    assert {kind.key[-2] for kind in seen.calls} == {2048}
    assert not memory_efficient_attention(query[:, :8], query[:, :8], query[:, :8], p=1.0).any()


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {  # query, key, tensor mask
    "[B, M, K]": ((2, 20, 8), (2, 33, 8), (2, 20, 33)),
    "[B, M, H, K]": ((2, 20, 6, 8), (2, 33, 6, 8), (2, 6, 20, 33)),
    "[B, M, G, H, K]": ((2, 20, 2, 3, 8), (2, 33, 2, 3, 8), (2, 2, 3, 20, 33)),
    "[B, M, G, H, K], bias of G": ((2, 20, 2, 3, 8), (2, 33, 2, 3, 8), (2, 2, 1, 20, 33)),
    "[B, M, G, H, K], bias of H": ((2, 20, 2, 3, 8), (2, 33, 2, 1, 8), (2, 1, 3, 20, 33)),
    "[B, M, G, H, K], expanded": ((2, 20, 2, 3, 8), (2, 33, 2, 1, 8), (2, 2, 3, 20, 33)),
}


@pytest.mark.parametrize("bias", ["none", "tensor", "causal", "causal and tensor"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_tensor_masks(form: str, bias: str) -> None:
    q_shape, k_shape, mask_shape = FORMS[form]
    added = torch.randn(mask_shape)
    mask = {
        "none": None,
        "tensor": added,
        "causal": masks.LowerTriangularMask(),
        "causal and tensor": masks.LowerTriangularMask().add_bias(added),
    }[bias]
    of_all = added.expand(2, *q_shape[2:-1], 20, 33) if len(q_shape) == 5 else added
    scores = (of_all if "tensor" in bias else torch.zeros(of_all.shape)).reshape(2, -1, 20, 33)
    scores = scores.masked_fill(~band(20, 33, None, 0, False), -torch.inf) if "causal" in bias else scores
    given = [torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, k_shape)]

    def attend(*four: Tensor) -> Tensor:
        q, k, v = (heads_first(t).reshape(shape) for t, shape in zip(four, (q_shape, k_shape, k_shape)))
        wide = (*k_shape[:3], *q_shape[3:4], *k_shape[4:])
        k, v = (t.expand(wide) if len(k_shape) == 5 else t for t in (k, v))
        with record() as seen:
            out = memory_efficient_attention(q, k, v, mask, 0.0, 0.3, op=None)
        if "expanded" in form:
            assert {kind.key[1] for kind in seen.calls} == {2}  # two key/value heads: nothing was copied
        assert out.shape == q_shape
        assert out.is_contiguous()
        return heads_first(out.reshape(2, 20, -1, 8))

    four = [heads_first(t.detach().reshape(*t.shape[:2], -1, 8)).requires_grad_() for t in given]
    assert_exact(attend, four, scores, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("options", "masked"), [({}, False), ({"is_causal": True, "sm_scale": 0.2}, False), ({}, True)]
)
def test_sageattn(layout: str, options: dict[str, Any], masked: bool, dtype: torch.dtype) -> None:
    given = inputs((2, 6, 20, 8), (2, 2, 33, 8), dtype)
    mask = torch.rand(20, 33) > 0.3 if masked else None
    named = {name.removeprefix("sm_"): value for name, value in options.items()} | {"enable_gqa": True}

    def turned(tensor: Tensor) -> Tensor:
        return heads_first(tensor) if layout == "NHD" else tensor

    def attend(*qkv: Tensor) -> Tensor:
        quantised = {"smooth_k": False, "pv_accum_dtype": "fp32", "qk_quant_gran": "per_warp"}
        out, lse = sageattn(*map(turned, qkv), layout, attn_mask=mask, return_lse=True, **options, **quantised)
        assert lse.shape == (2, 6, 20)
        right = oracle.exact([*qkv, mask], named)[1]
        torch.testing.assert_close(lse.double(), right.detach(), rtol=1e-3, atol=1e-3)
        return turned(out)

    assert_exact(attend, given, mask, **named)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k_lengths", [Q_LENGTHS, K_LENGTHS], ids=["self", "cross"])
def test_sageattn_of_sequences(k_lengths: list[int], causal: bool) -> None:
    ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (Q_LENGTHS, k_lengths)]
    given = inputs((1, 6, sum(Q_LENGTHS), 8), (1, 2, sum(k_lengths), 8))

    def attend(*qkv: Tensor) -> Tensor:
        q, k, v = (heads_first(t).squeeze(0) for t in qkv)
        return heads_first(sageattn_varlen(q, k, v, *ends, 20, 21, is_causal=causal, smooth_k=True)[None])

    ranges = list(zip(ends[1].tolist(), k_lengths))
    seen = within_blocks(sum(k_lengths), ranges, (None, 0 if causal else None, False))
    assert_exact(attend, given, seen, enable_gqa=True)
