"""Masks, offsets of caches, padding, biases, sinks and softcap drawn at random: what the host's mask tensor gives."""

import random
from typing import Any

import pytest
import torch
from attn_support.randomness import seeds

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from attn_support.tiny_models import packed_mask, plain
from transformers import masking_utils

from pascal_attn_core.transformers import make_hf_attention_fn
from pascal_attn_core.transformers.mask import pascal_mask

BATCH = 2


def mask_function(draw: random.Random, kind: str, window: int, tokens: int) -> Any:
    if kind == "packed":
        lengths = [draw.randint(1, tokens) for _ in range(tokens)]
        starts = torch.tensor(lengths).cumsum(0)
        sequences = torch.searchsorted(starts, torch.arange(tokens), right=True).expand(BATCH, -1)
        first = torch.cat([torch.zeros(1, dtype=torch.long), starts])[sequences]
        inner = masking_utils.sliding_window_causal_mask_function(window)
        return packed_mask(inner, torch.arange(tokens) - first, sequences)
    return {
        "causal": lambda: masking_utils.causal_mask_function,
        "window": lambda: masking_utils.sliding_window_causal_mask_function(window),
        "chunked": lambda: masking_utils.chunked_causal_mask_function(window, torch.randint(0, 4, (BATCH,))),
        "bidirectional": lambda: masking_utils.bidirectional_mask_function,
        "both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(window),
        "custom": lambda: masking_utils.or_masks(
            masking_utils.causal_mask_function, lambda b, h, q, k: (q * 7 + k * 3 + b) % 11 == 0
        ),
    }[kind]()


def drawn_padding(draw: random.Random, tokens: int) -> torch.Tensor | None:
    if draw.random() >= 0.6:
        return None
    padding, size = torch.ones(BATCH, tokens, dtype=torch.bool), draw.randint(1, tokens)
    padding[0, slice(0, size) if draw.random() < 0.7 else slice(-size, None)] = False
    return padding


@pytest.mark.parametrize("kind", ["causal", "window", "chunked", "packed", "bidirectional", "both sides", "custom"])
@pytest.mark.parametrize("seed", seeds(4))
def test_outputs_and_gradients_are_those_of_the_mask_tensor(kind: str, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    tokens, past, window = draw.choice([1, 2, 7, 40, 130]), draw.choice([0, 0, 3, 64]), draw.choice([1, 5, 33, 200])
    kv_offset = draw.choice([0, 0, max(0, past - window + 1)])
    keys = past + tokens - kv_offset + draw.choice([0, 0, 20])
    if kind == "packed":
        past, kv_offset, keys = 0, 0, tokens
    function, vmap = mask_function(draw, kind, window, tokens), kind == "custom"
    padding = drawn_padding(draw, past + tokens)
    causal = kind not in ("bidirectional", "both sides")
    where = (BATCH, tokens, keys, draw.choice([past, torch.tensor(past)]), kv_offset, function, padding)
    skip = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
    mask = pascal_mask(*where, **skip, use_vmap=vmap)
    allowed = masking_utils.sdpa_mask(*where, allow_is_causal_skip=False, use_vmap=vmap)

    shapes = [(BATCH, 4, tokens, 8), (BATCH, 2, keys, 8), (BATCH, 2, keys, 8)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    shared = torch.randn(4, requires_grad=True)  # by all queries
    by_query = torch.randn(BATCH, 4, tokens, 1, requires_grad=True)
    sinks, of_host = draw.choice(
        [({}, None), ({}, None), ({"s_aux": shared}, shared.view(1, 4, 1, 1)), ({"sinks": by_query}, by_query)]
    )
    bias = torch.randn(1, 4, tokens, keys, requires_grad=True) if draw.random() < 0.3 else None
    softcap = draw.choice([None, None, 3.0])
    attention, module = make_hf_attention_fn(draw.choice(["auto", 3, 16, 64])), torch.nn.Module()
    module.is_causal = causal
    ours, weights = attention(module, *tensors, mask, **sinks, softcap=softcap, position_bias=bias)
    stock = plain(tensors, allowed, bias, softcap=softcap, sinks=of_host)
    assert weights is None
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-4)
    leaves = [*tensors, *sinks.values(), *([] if bias is None else [bias])]
    upstream = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(stock, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
