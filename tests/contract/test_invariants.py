"""These tests check what must hold for every call; a bool mask whose True is any byte means what one of ones means."""

import pytest
import torch
from attn_support.fused.cases import backward, forward
from attn_support.fused.emulation import GXX
from attn_support.oracle import assert_close, exact, plain
from attn_support.table import GROUPED, ROUTES, Case
from torch import Tensor

from pascal_attn_core import AttentionConfig, LazyMask, record, sdpa, sdpa_with_lse
from pascal_attn_core.attention_map import attention_map
from pascal_attn_core.reference import reference_sdpa

TILED = AttentionConfig(route="tiled")
ONLINE = AttentionConfig(route="tiled", softmax="online")
TILED_ROUTES = [route for route in ROUTES if ROUTES[route].route == "tiled"]


@pytest.mark.parametrize("route", TILED_ROUTES)
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_masked_keys_cannot_move_a_bit(route: str, is_float: bool, padding: bool) -> None:
    query, key, value = (torch.randn(2, 2, n, 8) for n in (70, 90, 90))
    allowed = torch.rand(2, 1, 1, 90) < 0.5 if padding else (torch.rand(70, 90) < 0.5) & (torch.arange(90) < 80)
    never = ~allowed.expand(2, 2, 70, 90).any(dim=-2)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf) if is_float else allowed
    out = sdpa(query, key, value, mask, config=ROUTES[route])
    value[never] = 1e30 if ROUTES[route].softmax == "online" else 1e15  # more is no longer provably bounded
    assert torch.equal(sdpa(query, key, value, mask, config=ROUTES[route]), out)


@pytest.mark.parametrize("route", TILED_ROUTES)
@pytest.mark.parametrize("poison", [1e30, torch.inf, -torch.inf, torch.nan])
def test_keys_forbidden_by_a_bool_mask_may_hold_anything(route: str, poison: float) -> None:
    query, key, value = (torch.randn(1, 2, n, 8) for n in (70, 90, 90))
    allowed = torch.rand(70, 90) < 0.7
    allowed[:, 17], allowed[:, 60:] = False, False
    clean = sdpa(query, key, value, allowed, config=ROUTES[route])
    key[:, :, 17] = poison
    key[:, :, 80:] = poison
    dirty = sdpa(query, key, value, allowed, config=ROUTES[route])
    torch.testing.assert_close(dirty, clean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("route", TILED_ROUTES)
def test_keys_after_the_diagonal_may_hold_anything(route: str) -> None:
    query, key, value = (torch.randn(1, 2, 90, 8) for _ in range(3))
    clean = sdpa(query, key, value, is_causal=True, config=ROUTES[route])[:, :, :60]
    key[:, :, 60:] = torch.nan
    value[:, :, 60:] = 1e30
    dirty = sdpa(query, key, value, is_causal=True, config=ROUTES[route])[:, :, :60]
    torch.testing.assert_close(dirty, clean, atol=1e-6, rtol=1e-5)


def test_the_output_is_laid_out_as_the_query_is() -> None:
    inputs, options = Case(**{**GROUPED.__dict__, "layout": "tokens_first"}).build()
    assert sdpa(*inputs, **options, config=TILED).transpose(1, 2).is_contiguous()
    assert sdpa(*(t if t is None else t.contiguous() for t in inputs), **options, config=TILED).is_contiguous()


def _bounded(*inputs: torch.Tensor | None, config: AttentionConfig = TILED) -> float:
    """The share of blocks whose scores are bounded before they are computed: they need no running maximum."""
    with record() as report:
        sdpa(*inputs, config=config)
    (stats,) = report.calls.values()
    return stats.bounded_blocks / stats.blocks


def test_which_blocks_are_bounded() -> None:
    query, key, value = (torch.randn(1, 2, 256, 16) for _ in range(3))
    assert _bounded(query, key, value) == 1
    assert _bounded(query, key, value, config=ONLINE) == 0
    assert _bounded(query * 1e3, key, value) == 0
    assert _bounded(query, key, value * 1e25) == 0
    one = query[:, :1].clone()
    one[:, :, 100] *= 1e3
    four_blocks = AttentionConfig(route="tiled", q_block=64, kv_block=64)
    assert _bounded(one, key[:, :1], value[:, :1], config=four_blocks) == 0.75
    key[0, 1, 3, 5] = torch.nan
    assert _bounded(query, key, value) <= 0.5


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 4.0, 6.0])
def test_bounded_and_online_agree(magnitude: float) -> None:
    """Up to the largest scores that the bound lets through."""
    query, key, value = (torch.randn(1, 2, 200, 16) for _ in range(3))
    inputs = [query * magnitude, key, value, None]
    assert bool(_bounded(*inputs)) == (magnitude < 6.0)
    oracle, similar = exact(inputs, {})[0], plain(inputs, {}, torch.float32)[0]
    assert_close(sdpa(*inputs, config=TILED), oracle, similar, "bounded", dtype=torch.float32)
    assert_close(sdpa(*inputs, config=ONLINE), oracle, similar, "online", dtype=torch.float32)


#: the same for all keys that take part, so that blocks may be bounded
SHARED_BIAS = torch.where(torch.arange(256) < 200, 3.5, -torch.inf)[None, None, None]


@pytest.mark.parametrize("options", [{"attn_mask": SHARED_BIAS}, {"sinks": torch.tensor([100.0, 1.0])}], ids=list)
def test_a_bias_that_all_keys_share_and_a_large_sink_are_in_the_lse(options: dict) -> None:
    query, key, value = (torch.randn(1, 2, 256, 16) for _ in range(3))
    found = sdpa_with_lse(query, key, value, config=TILED, **options)
    wide = {name: t.double() for name, t in options.items()}
    expected = reference_sdpa(query.double(), key.double(), value.double(), **wide)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.xfail(strict=True, reason="sums are divided at the end: they overflow a factor S below the largest float")
def test_values_at_the_largest_float_do_not_overflow() -> None:
    query, key = (torch.randn(1, 1, n, 8) for n in (70, 100))
    out = sdpa(query, key, torch.full((1, 1, 100, 8), 3e38), config=TILED)
    assert out.isfinite().all()


@pytest.mark.parametrize("route", ["auto", "tiled", "math"])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32])
def test_autocast_gives_the_dtype_and_answer_of_torch(route: str, mask_dtype: torch.dtype | None) -> None:
    query, key, value = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8).bfloat16(), torch.randn(1, 2, 70, 8)
    mask = None if mask_dtype is None else (torch.rand(70, 70) < 0.5).to(mask_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        out = sdpa(query, key, value, mask, config=ROUTES[route])
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("route", ["tiled", "online", "small_tiles"])
@pytest.mark.parametrize("size", [1e15, 1e19, 1e20, 1e25, 1e30, 1e36])
def test_large_values_do_not_overflow(route: str, size: float) -> None:
    query, key = (torch.randn(1, 1, n, 8) for n in (70, 100))
    value = torch.rand(1, 1, 100, 8) * size
    out = sdpa(query, key, value, config=ROUTES[route])
    oracle, similar = exact([query, key, value], {})[0], plain([query, key, value], {}, torch.float32)[0]
    assert_close(out, oracle, similar, "out", dtype=torch.float32)


def _odd(mask: Tensor) -> Tensor:
    """Return the same mask in the same layout with True stored as any byte from 1 to 255."""
    odd = torch.empty_like(mask)
    odd.view(torch.uint8).copy_(mask.to(torch.uint8) * torch.randint(1, 256, mask.shape, dtype=torch.uint8))
    assert torch.equal(odd, mask)
    assert odd.view(torch.uint8).max() > 1
    return odd


def test_rules_may_return_any_bytes_and_the_attention_map_reads_all_but_zero_as_true() -> None:
    query = torch.randn(1, 2, 200, 16)
    mask = torch.rand(200, 200) > 0.4
    odd = _odd(mask)
    rules = [LazyMask((1, 1, 200, 200), lambda b, h, i, j, m=m: m[i, j], device="cpu") for m in (mask, odd)]
    for config in (ROUTES["tiled"], ROUTES["online"], ROUTES["small_tiles"], ROUTES["math"]):
        assert torch.equal(*(sdpa(query, query, query, rule, config=config) for rule in rules))
    query, mask = torch.randn(1, 2, 600, 16), torch.rand(600, 600) > 0.4
    assert torch.equal(*(attention_map(query, query, rows=range(20), attn_mask=m) for m in (mask, _odd(mask))))


@pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
@pytest.mark.parametrize("parts", [False, True])
def test_the_cuda_kernels_read_any_byte_but_zero_as_true(parts: bool) -> None:
    inputs = [torch.randn(1, 2, n, 40) for n in (70, 300, 300)]
    mask = torch.rand(1, 2, 70, 300) > 0.5
    mask[:, :, :, 128:200] = False
    results = [forward([*inputs, m], {}, parts=parts) for m in (mask, _odd(mask))]
    assert torch.equal(results[0].out, results[1].out)
    assert torch.equal(results[0].lse, results[1].lse)
    if not parts:
        grad_out = torch.randn(1, 2, 70, 40)
        grads = [backward(result, grad_out) for result in results]
        assert all(torch.equal(a, b) for a, b in zip(*grads))
