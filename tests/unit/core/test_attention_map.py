"""Softmax rows to look at, and the tiles that a layer's rule leaves out."""

import pytest
import torch
from attn_support.randomness import examples
from hypothesis import given
from hypothesis import strategies as st

from pascal_attn_core.attention_map import attention_map
from pascal_attn_core.call.lazy_mask import LazyMask
from pascal_attn_core.layers import SelfAttention
from pascal_attn_core.reference import reference_sdpa

F64 = torch.float64


BOOL = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) < 0.6
BIAS = torch.randn(7, 9, dtype=F64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (2, 1)},
        {"window": (3, -1), "is_causal": True, "alignment": "lower_right"},
        {"attn_mask": BOOL},
        {"attn_mask": BOOL[:, :, :1], "is_causal": True},
        {"attn_mask": BIAS, "scale": 0.2},
        {"attn_mask": BIAS[0]},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rows_are_those_of_the_whole_map(options: dict, kv_heads: int) -> None:
    query, key = torch.randn(2, 4, 7, 8, dtype=F64), torch.randn(2, kv_heads, 9, 8, dtype=F64)
    rows = [0, 6, 3, -1, 3]
    found = attention_map(query, key, rows=rows, enable_gqa=True, **options)
    one_hot = torch.eye(9, dtype=F64).expand(2, kv_heads, 9, 9)
    torch.testing.assert_close(found, reference_sdpa(query, key, one_hot, enable_gqa=True, **options)[0][:, :, rows])


def test_softcap_sinks_and_lazy_masks_mean_what_they_mean_in_sdpa() -> None:
    query, key, sinks = (torch.randn(*shape, dtype=F64) for shape in ((1, 4, 5, 8), (1, 2, 6, 8), (4,)))
    scores = query @ key.repeat_interleave(2, 1).transpose(-2, -1) * 8**-0.5
    distance = torch.arange(5)[:, None] - torch.arange(6)
    scores = 2.0 * torch.tanh(scores / 2.0) - 0.1 * distance.abs()
    logits = torch.cat([scores, sinks[:, None, None].expand(1, 4, 5, 1)], dim=-1)
    lazy = LazyMask((1, 1, 5, 6), lambda b, h, q, k: -0.1 * (q - k).abs(), device="cpu", dtype=F64)
    found = attention_map(query, key, rows=[4, 0], enable_gqa=True, softcap=2.0, sinks=sinks, attn_mask=lazy)
    torch.testing.assert_close(found, logits.softmax(-1)[:, :, [4, 0], :-1], rtol=1e-6, atol=1e-6)
    found = attention_map(query[0, 0], query[0, 0], rows=[2], sinks=sinks[:1])
    one_head = query[:1, :1]
    torch.testing.assert_close(found, attention_map(one_head, one_head, rows=[2], sinks=sinks[:1])[0, 0])


def lazy(shape: tuple[int, int, int, int], rule=lambda b, h, q, k: q >= k) -> LazyMask:
    return LazyMask(shape, rule, device="cpu")


def test_the_full_matrix_is_never_made() -> None:
    query, key = torch.randn(1, 2, 100_000, 4), torch.randn(1, 2, 100_000, 4)
    found = attention_map(query, key, rows=[99_999], is_causal=True)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 1))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"rows": [5]}, ValueError, r"rows must be from -5 to 4, got \[5\]"),
        ({"rows": [0.5]}, TypeError, "rows must be whole numbers"),
        ({"rows": slice(0, 3)}, TypeError, "rows must be whole numbers in one dimension"),
        ({"rows": 3}, TypeError, "rows must be whole numbers in one dimension"),
        ({"key": torch.ones(1, 2, 5, 3)}, ValueError, "head_dim"),
        ({"attn_mask": lazy((1, 1, 5, 5), lambda b, h, q, k: q - k)}, TypeError, "rule of a LazyMask must return"),
        ({"attn_mask": lazy((1, 1, 5, 5), lambda b, h, q, k: q > k[..., 1:])}, ValueError, "what broadcasts to"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_wrong_arguments_are_named(change: dict, kind: type[Exception], words: str) -> None:
    arguments = {"query": torch.ones(1, 2, 5, 4), "key": torch.ones(1, 2, 5, 4), "rows": [0]} | change
    with pytest.raises(kind, match=words):
        attention_map(**arguments)


@examples(200)
@given(length=st.integers(1, 24), causal=st.booleans(), window=st.none() | st.integers(1, 9), block=st.integers(1, 9))
def test_the_tiles_that_a_layer_leaves_out_are_those_that_counting_finds(length, causal, window, block: int) -> None:
    layer = SelfAttention(4, 1, causal=causal, window_size=window)
    seen = attention_map(*torch.ones(2, 1, length, 4), rows=range(length), **layer._band())[0] > 0
    tiles = [part.any() for rows in seen.split(block) for part in rows.split(block, dim=1)]
    found = layer.get_causal_efficiency(length, block)
    assert (found["total_blocks"], found["computed_blocks"]) == (len(tiles), sum(tiles))
    assert found["compute_savings_percent"] == pytest.approx(100 - 100 * sum(tiles) / len(tiles))
