"""flash-attn's functions against plain float64 attention: flags, layouts, gradients, the cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core import flash_attn as fa
from pascal_attn_core import report
from pascal_attn_core.config import default_config

F64 = torch.float64
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out ``[B, L, H, D]``, lse ``[B, H, L]``) the long way, in the dtype of the inputs."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    length, keys = scores.shape[-2:]
    distance = torch.arange(keys)[None] - (torch.arange(length)[:, None] + keys - length)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).reshape(-1, q.shape[2])
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = window_size
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1) if keys else scores.new_full(scores.shape[:-1], -math.inf)
    probs = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("bhls,bshd->blhd", probs, v), lse


def inputs(
    batch: int, length: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = F64
) -> list[Tensor]:
    shapes = (batch, length, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)
    return [torch.randn(shape, dtype=F64).to(dtype).requires_grad_() for shape in shapes]


def assert_same(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "out") -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype], msg=lambda m: f"{what}: {m}"
    )


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


FLAGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3},
    {"window_size": (3, 2)},
    {"window_size": (4, -1)},
    {"window_size": (-1, 1)},
    {"window_size": (5, 3), "causal": True},
    {"softcap": 1.5},
    {"alibi_slopes": "heads"},
    {"alibi_slopes": "batch", "causal": True},
    {"alibi_slopes": "batch", "softcap": 2.0, "window_size": (6, 6)},
]


def with_slopes(flags: dict[str, Any], batch: int, heads: int) -> dict[str, Any]:
    kind = flags.get("alibi_slopes")
    if kind is None:
        return flags
    return {**flags, "alibi_slopes": torch.rand((heads,) if kind == "heads" else (batch, heads)) + 0.1}


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every call by the tiled route with small tiles."""
    for name, value in {"ROUTE": "tiled", "Q_BLOCK": "8", "KV_BLOCK": "16"}.items():
        monkeypatch.setenv(f"PASCAL_ATTN_{name}", value)
    default_config.cache_clear()
    yield
    monkeypatch.undo()
    default_config.cache_clear()


class Largest(TorchDispatchMode):
    """Elements of the largest piece of memory that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


# ---- one length ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 9, 9, 4, 2, 8), (2, 5, 12, 3, 1, 8), (1, 12, 5, 2, 2, 4), (2, 1, 40, 4, 4, 8)])
def test_every_flag_means_what_it_means_there_forward_and_backward(flags: dict[str, Any], sizes: tuple) -> None:
    flags = with_slopes(flags, sizes[0], sizes[3])
    tensors = inputs(*sizes)
    out, lse, probs = fa.flash_attn_func(*tensors, **flags, return_attn_probs=True)
    expected, expected_lse = plain(*(same := leaves_of(tensors)), **flags)
    assert probs is None
    assert out.is_contiguous()
    assert_same(out, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")
    grad = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, same, grad)):
        assert_same(actual, wanted, F64, "gradient")
    assert_same(fa.flash_attn_func(*tensors, **flags), expected, F64)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_flag_holds_across_tiles(flags: dict[str, Any]) -> None:
    flags = with_slopes(flags, 2, 4)
    tensors = inputs(2, 45, 70, 4, 2, 8)
    out = fa.flash_attn_func(*tensors, **flags)
    expected, _ = plain(*(same := leaves_of(tensors)), **flags)
    assert_same(out, expected, F64)
    grad = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, same, grad)):
        assert_same(actual, wanted, F64, "gradient")


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


def test_causal_is_lower_right() -> None:
    value = torch.eye(5, dtype=F64)[None, :, None]
    q, k = torch.zeros(1, 2, 1, 4, dtype=F64), torch.zeros(1, 5, 1, 4, dtype=F64)
    seen = fa.flash_attn_func(q, k, value, causal=True)[0, :, 0] > 0
    assert seen.tolist() == [[True, True, True, True, False], [True, True, True, True, True]]


def test_a_query_without_keys_gives_zero_and_lse_of_minus_infinity() -> None:
    q, k, v = inputs(1, 5, 2, 1, 1, 4)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[0, :3].any()
    assert lse[0, 0, :3].tolist() == [-math.inf] * 3
    assert lse[0, 0, 3:].isfinite().all()


def test_gradients_flow_through_lse() -> None:
    tensors = inputs(2, 7, 9, 2, 1, 4)
    _, lse, _ = fa.flash_attn_func(*tensors, softmax_scale=0.4, return_attn_probs=True)
    _, expected = plain(*(same := leaves_of(tensors)), softmax_scale=0.4)
    for actual, wanted in zip(
        torch.autograd.grad(lse.sum(), tensors, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected.sum(), same, allow_unused=True, materialize_grads=True),
    ):
        assert_same(actual, wanted, F64, "gradient")


@pytest.mark.parametrize("causal", [False, True])
def test_packed_layouts_are_the_same_call(causal: bool) -> None:
    q, k, v = inputs(2, 8, 8, 3, 3, 4)
    grad = torch.randn(2, 8, 3, 4, dtype=F64)
    expected = fa.flash_attn_func(q, k, v, causal=causal)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    qkv = torch.stack([q, k, v], dim=2).detach().requires_grad_()
    out = fa.flash_attn_qkvpacked_func(qkv, causal=causal)
    assert torch.equal(out, expected)
    assert_same(torch.autograd.grad(out, qkv, grad)[0], torch.stack(wanted, dim=2), F64)
    kv = torch.stack([k, v], dim=2).detach().requires_grad_()
    out = fa.flash_attn_kvpacked_func(q, kv, causal=causal)
    assert torch.equal(out, expected)
    assert_same(torch.autograd.grad(out, kv, grad)[0], torch.stack(wanted[1:], dim=2), F64)


def test_arguments_may_be_given_by_position_in_the_order_they_have_there() -> None:
    q, k, v = inputs(2, 6, 6, 2, 2, 4)
    slopes = torch.tensor([0.1, 0.2])
    by_name = fa.flash_attn_func(
        q, k, v, softmax_scale=0.5, causal=True, window_size=(3, 0), softcap=2.0, alibi_slopes=slopes
    )
    rest = (0.0, 0.5, True, (3, 0), 2.0, slopes, False, True)
    for out in (
        fa.flash_attn_func(q, k, v, *rest)[0],
        fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *rest)[0],
        fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *rest)[0],
    ):
        assert_same(out, by_name, F64)
    flat, ends = [t.flatten(0, 1) for t in (q, k, v)], torch.tensor([0, 6, 12], dtype=torch.int32)
    q1, k1, v1 = flat
    for out in (
        fa.flash_attn_varlen_func(q1, k1, v1, ends, ends, 6, 6, *rest)[0],
        fa.flash_attn_varlen_kvpacked_func(q1, torch.stack([k1, v1], 1), ends, ends, 6, 6, *rest)[0],
        fa.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), ends, 6, *rest)[0],
    ):
        assert_same(out, by_name.flatten(0, 1), F64)


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


def test_deterministic_gradients_are_the_same_every_time() -> None:
    tensors = inputs(1, 65, 65, 4, 2, 16, torch.float32)
    first, second = (
        torch.autograd.grad(fa.flash_attn_func(*tensors, causal=True, deterministic=True).sum(), tensors)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_alibi_never_makes_a_matrix_of_scores() -> None:
    q, k, v = (torch.randn(1, 3000, 1, 4) for _ in range(3))
    with Largest() as largest:
        fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.tensor([0.01]))
    assert largest.elements < 3000 * 3000 / 4


def test_calls_reach_the_report() -> None:
    q, k, v = inputs(1, 4, 4, 1, 1, 4)
    with report.record() as seen:
        fa.flash_attn_func(q, k, v)
    assert seen.total == 1


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
    ({"k": torch.ones(1, 3, 2, 4)}, ValueError, "one batch size"),
    ({"q": torch.ones(2, 3, 5, 4)}, ValueError, "multiple"),
    ({"v": torch.ones(2, 3, 2, 4, dtype=F64)}, TypeError, "one dtype"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD_CALLS, ids=lambda x: str(x)[:30])
def test_wrong_arguments_are_named(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments = {name: torch.ones(2, 3, 2, 4) for name in "qkv"} | change
    with pytest.raises(kind, match=words):
        fa.flash_attn_func(**arguments)


# ---- many lengths ----------------------------------------------------------------------------------------------------


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], **flags: Any
) -> tuple[Tensor, Tensor]:
    """Each sequence by :func:`plain`; zeros and -inf behind the last."""
    slopes = flags.pop("alibi_slopes", None)
    outs, all_lse = [], []
    parts = zip(q[: sum(q_lengths)].split(q_lengths), k[: sum(k_lengths)].split(k_lengths),
                v[: sum(k_lengths)].split(k_lengths))  # fmt: skip
    for number, (a, b, c) in enumerate(parts):
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[number]
        out, lse = plain(a[None], b[None], c[None], alibi_slopes=own, **flags)
        outs.append(out[0])
        all_lse.append(lse[0])
    rest = len(q) - sum(q_lengths)
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    all_lse.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(all_lse, dim=1)


LENGTHS = [
    ([5, 5, 5], [5, 5, 5]),
    ([3, 0, 7, 7, 1], [3, 0, 7, 7, 1]),
    ([4, 2, 2, 6], [9, 5, 5, 0]),
    ([0, 0], [3, 4]),
    ([1, 1, 1], [4, 9, 2]),
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_varlen_is_each_sequence_alone(flags: dict[str, Any], lengths: tuple[list[int], ...], spare: int) -> None:
    q_lengths, k_lengths = lengths
    flags = with_slopes(flags, len(q_lengths), 4)
    q, k, v = (
        t[0].detach().requires_grad_() for t in inputs(1, sum(q_lengths) + spare, sum(k_lengths) + spare, 4, 2, 8)
    )
    ends = ends_of(q_lengths), ends_of(k_lengths)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, *ends, max(q_lengths), max(k_lengths), **flags, return_attn_probs=True
    )
    expected, expected_lse = one_by_one(*(same := leaves_of([q, k, v])), q_lengths, k_lengths, **flags)
    assert_same(out, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")
    if out.requires_grad:
        grad = torch.randn_like(out)
        for actual, wanted in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, same, grad)):
            assert_same(actual, wanted, F64, "gradient")
    with torch.no_grad():
        again, lse, _ = fa.flash_attn_varlen_func(q, k, v, *ends, **flags, return_attn_probs=True)
    assert_same(again, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    groups=st.integers(1, 3),
)
def test_any_lengths_any_window(
    lengths: list[tuple[int, int]], causal: bool, window: tuple[int, int], groups: int
) -> None:
    q_lengths, k_lengths = [a for a, _ in lengths], [b for _, b in lengths]
    q, k, v = (t[0] for t in inputs(1, sum(q_lengths), sum(k_lengths), 2 * groups, 2, 4))
    with torch.no_grad():
        out, lse, _ = fa.flash_attn_varlen_func(
            q, k, v, ends_of(q_lengths), ends_of(k_lengths), causal=causal, window_size=window, return_attn_probs=True
        )
        expected, expected_lse = one_by_one(q, k, v, q_lengths, k_lengths, causal=causal, window_size=window)
    assert_same(out, expected, F64)
    assert_same(lse, expected_lse, F64, "lse")


def test_sequences_cannot_see_each_other() -> None:
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    ends = ends_of([4, 5])
    before = fa.flash_attn_varlen_func(q, k, v, ends, ends)
    k[4:], v[4:] = 1e30, 1e30
    assert torch.equal(fa.flash_attn_varlen_func(q, k, v, ends, ends)[:4], before[:4])


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_is_padded_to_the_longest(requires_grad: bool) -> None:
    lengths = [512, *[2] * 64]
    q, k, v = (torch.randn(sum(lengths), 1, 8, requires_grad=requires_grad) for _ in range(3))
    with Largest() as largest:
        out = fa.flash_attn_varlen_func(q, k, v, ends_of(lengths), ends_of(lengths))
        if requires_grad:
            out.sum().backward()
    assert largest.elements <= q.numel()


def test_neighbours_of_equal_lengths_are_one_call() -> None:
    q, k, v = (torch.randn(26, 2, 4) for _ in range(3))
    ends = ends_of([5, 5, 5, 3, 4, 4])
    with report.record() as seen:
        fa.flash_attn_varlen_func(q, k, v, ends, ends)
    assert seen.total == 3


def test_the_gradient_of_varlen_is_not_made_once_for_each_sequence() -> None:
    q, k, v = (torch.randn(64, 2, 4, requires_grad=True) for _ in range(3))
    ends = ends_of([1, 3] * 16)
    out = fa.flash_attn_varlen_func(q, k, v, ends, ends)
    names, todo, seen = [], [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(type(node).__name__)
        todo += [following for following, _ in node.next_functions]
    assert not [name for name in names if "Slice" in name]
    assert sum("Split" in name for name in names) == 3


def test_packed_varlen_layouts_are_the_same_call() -> None:
    q, k, v = (torch.randn(9, 2, 4, dtype=F64) for _ in range(3))
    ends = ends_of([4, 5])
    expected = fa.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)
    qkv = torch.stack([q, k, v], 1).requires_grad_()
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True)
    assert_same(out, expected, F64)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape
    kv = torch.stack([k, v], 1)
    assert_same(fa.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 5, 5, causal=True), expected, F64)


def test_varlen_reads_keys_from_pages() -> None:
    lengths, page = [7, 0, 12], 4
    q, k, v = (torch.randn(sum(lengths), 2, 4, dtype=F64) for _ in range(3))
    ends = ends_of(lengths)
    table = torch.randperm(9, dtype=torch.int32).view(3, 3)
    paged = torch.full((2, 9, page, 2, 4), 1e9, dtype=F64)
    for number, (first, last) in enumerate(itertools.pairwise(ends.tolist())):
        for token in range(last - first):
            place = int(table[number, token // page]), token % page
            paged[0][place], paged[1][place] = k[first + token], v[first + token]
    out = fa.flash_attn_varlen_func(q, *paged, ends, ends, 12, 12, causal=True, block_table=table)
    assert_same(out, fa.flash_attn_varlen_func(q, k, v, ends, ends, causal=True), F64)


@pytest.mark.parametrize(
    ("ends", "kind", "words"),
    [
        (torch.tensor([0, 4, 2]), ValueError, "cu_seqlens_q must start at 0 and never fall"),
        (torch.tensor([1, 4, 6]), ValueError, "must start at 0"),
        (torch.tensor([0, 4, 99]), ValueError, "end at most at the 6 tokens there are"),
        (torch.tensor([0.0, 4.0]), TypeError, "whole numbers"),
        ([0, 4], TypeError, "cu_seqlens_q must be a tensor"),
        (torch.tensor([[0, 4]]), ValueError, r"cu_seqlens_q must be \[B \+ 1\]"),
    ],
)
def test_wrong_lengths_are_named(ends: Any, kind: type[Exception], words: str) -> None:
    q = torch.ones(6, 2, 4)
    with pytest.raises(kind, match=words):
        fa.flash_attn_varlen_func(q, q, q, ends, ends)


# ---- the helpers that pack ------------------------------------------------------------------------------------------


def test_unpadding_and_padding_are_inverse() -> None:
    hidden = torch.randn(3, 5, 2, 4, dtype=F64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, ends, longest, used = fa.unpad_input(hidden, mask)
    assert tokens.shape == (6, 2, 4)
    assert ends.tolist() == [0, 2, 2, 6]
    assert ends.dtype == torch.int32
    assert (longest, used.tolist()) == (4, [2, 0, 4])
    back = fa.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, hidden * mask[:, :, None, None])
    (grad,) = torch.autograd.grad(back.sum(), hidden)
    assert torch.equal(grad, mask[:, :, None, None].expand_as(grad).to(F64))


def test_unused_tokens_have_a_place_and_take_no_part() -> None:
    mask, unused = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]])
    tokens, indices, ends, longest, used = fa.unpad_input(torch.arange(4.0)[None, :, None], mask, unused)
    assert tokens[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert (indices.tolist(), ends.tolist(), longest, used.tolist()) == ([0, 1, 2], [0, 3], 3, [2])


def test_rows_are_taken_and_put_with_gradients() -> None:
    rows = torch.randn(5, 3, dtype=F64, requires_grad=True)
    indices = torch.tensor([4, 0])
    taken = fa.index_first_axis(rows, indices)
    assert torch.equal(taken, rows[indices])
    put = fa.index_put_first_axis(taken, indices, 5)
    assert torch.equal(put[indices], taken)
    assert torch.autograd.grad(put.sum(), rows)[0].sum(1).tolist() == [3.0, 0.0, 0.0, 0.0, 3.0]
