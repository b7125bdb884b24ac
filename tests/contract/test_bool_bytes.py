"""Bool masks whose True is a byte other than 1 (``uint8_0_255.view(torch.bool)``, ``torch.frombuffer``) mean what the
same mask of zeros and ones means, bit by bit. ``test_fuzz.py`` has such masks on every route."""

from __future__ import annotations

import pytest
import torch
from attn_support.fused.cases import backward, forward
from attn_support.fused.emulation import GXX
from attn_support.table import ROUTES
from torch import Tensor

from pascal_attn_core import LazyMask, sdpa
from pascal_attn_core.attention_map import attention_map


def _odd(mask: Tensor) -> Tensor:
    """Return the same mask in the same layout with True stored as any byte from 1 to 255."""
    odd = torch.empty_like(mask)
    odd.view(torch.uint8).copy_(mask.to(torch.uint8) * torch.randint(1, 256, mask.shape, dtype=torch.uint8))
    assert torch.equal(odd, mask)
    assert odd.view(torch.uint8).max() > 1
    return odd


def test_a_rule_may_return_any_bytes() -> None:
    query = torch.randn(1, 2, 200, 16)
    mask = torch.rand(200, 200) > 0.4
    odd = _odd(mask)
    rules = [LazyMask((1, 1, 200, 200), lambda b, h, i, j, m=m: m[i, j], device="cpu") for m in (mask, odd)]
    for config in (ROUTES["tiled"], ROUTES["online"], ROUTES["small_tiles"], ROUTES["math"]):
        assert torch.equal(*(sdpa(query, query, query, rule, config=config) for rule in rules))


def test_the_attention_map_reads_any_byte_but_zero_as_true() -> None:
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
