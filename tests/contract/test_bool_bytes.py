"""Bool masks whose True is a byte other than 1 (``uint8_0_255.view(torch.bool)``, ``torch.frombuffer``) mean what the
same mask of zeros and ones means, bit by bit, on every route and in the kernels."""

from __future__ import annotations

import pytest
import torch
from attn_support.fused.cases import backward, forward
from attn_support.fused.emulation import GXX
from torch import Tensor

import pascal_attn_core.sdpa_patch as switch
from pascal_attn_core import AttentionConfig, LazyMask, sdpa
from pascal_attn_core.attention_map import attention_map

ROUTES = {
    "auto": AttentionConfig(),
    "auto, long": AttentionConfig(math_limit_mib=0),
    "bounded": AttentionConfig(route="tiled"),
    "online": AttentionConfig(route="tiled", softmax="online"),
    "untrimmed": AttentionConfig(route="tiled", trim_masks=False),
    "small tiles": AttentionConfig(route="tiled", q_block=48, kv_block=80),
    "torch": AttentionConfig(route="torch"),
    "math": AttentionConfig(route="math", math_limit_mib=100),
}


def _odd(mask: Tensor) -> Tensor:
    """The same mask, in the same layout, with True stored as any byte from 1 to 255."""
    odd = torch.empty_like(mask)
    odd.view(torch.uint8).copy_(mask.to(torch.uint8) * torch.randint(1, 256, mask.shape, dtype=torch.uint8))
    assert torch.equal(odd, mask)
    assert odd.view(torch.uint8).max() > 1
    return odd


def _masks() -> dict[str, Tensor]:
    some = torch.rand(2, 4, 200, 260) > 0.4
    some[:, :, 7] = False
    padding = torch.ones(2, 1, 1, 260, dtype=torch.bool)
    padding[0, ..., 170:], padding[1, ..., :90] = False, False
    holes = padding & (torch.rand(2, 1, 1, 260) > 0.2)
    blocks = torch.zeros(200, 260, dtype=torch.bool)
    blocks[:100, :130], blocks[100:, 130:] = True, True
    return {
        "per head": some,
        "per token": some[0, 0],
        "transposed": some[:, 0].mT.contiguous().mT[:, None],
        "padding": padding,
        "padding with holes": holes,
        "blocks": blocks,
    }


@pytest.mark.torch_2_5
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", _masks())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_route_reads_any_byte_but_zero_as_true(route: str, kind: str, dtype: torch.dtype) -> None:
    mask = _masks()[kind]
    for kv_heads, needs_grad in ((4, False), (2, True)):
        leaves = [torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, 200), (kv_heads, 260), (kv_heads, 260))]
        results = []
        for given in (mask, _odd(mask)):
            tensors = [t.detach().requires_grad_(needs_grad) for t in leaves]
            out = sdpa(*tensors, given, enable_gqa=True, config=ROUTES[route])
            grads = torch.autograd.grad(out.square().sum(), tensors) if needs_grad else ()
            results.append((out.detach(), *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results))
        assert results[0][0].isfinite().all()


def test_a_rule_may_return_any_bytes() -> None:
    query = torch.randn(1, 2, 200, 16)
    mask = torch.rand(200, 200) > 0.4
    odd = _odd(mask)
    rules = [LazyMask((1, 1, 200, 200), lambda b, h, i, j, m=m: m[i, j], device="cpu") for m in (mask, odd)]
    for config in (ROUTES["bounded"], ROUTES["online"], ROUTES["small tiles"], ROUTES["math"]):
        assert torch.equal(*(sdpa(query, query, query, rule, config=config) for rule in rules))


def test_what_reads_masks_beside_the_routes() -> None:
    query, mask = torch.randn(1, 2, 600, 16), torch.rand(600, 600) > 0.4
    odd = _odd(mask)
    maps = [attention_map(query, query, rows=range(20), attn_mask=m) for m in (mask, odd)]
    assert torch.equal(*maps)
    with switch.patch_sdpa():
        outs = [torch.nn.functional.scaled_dot_product_attention(query, query, query, m) for m in (mask, odd)]
    assert torch.equal(*outs)


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
