"""The mask object says what the host's own mask tensor says, and stores nothing of its size; some drawn at random."""

import inspect
import random
from typing import Any

import pytest
import torch
from attn_support.randomness import seeds
from attn_support.tiny_models import packed_mask, plain
from torch import Tensor
from transformers import masking_utils

from pascal_attn_core.transformers import make_hf_attention_fn
from pascal_attn_core.transformers.mask import HostMask, pascal_mask
from pascal_attn_core.transformers.pattern import Pattern, read_pattern

WINDOW = 4
OFFSETS = [(0, 9, 9, 0), (5, 4, 9, 0), (5, 4, 16, 0), (0, 9, 16, 0), (11, 3, 6, 8), (3, 1, 4, 0), (6, 1, 16, 0)]


def chunked(batch: int = 2) -> Any:
    make = masking_utils.chunked_causal_mask_function
    return make(WINDOW, torch.tensor([2, 0])[:batch]) if len(inspect.signature(make).parameters) > 1 else make(WINDOW)


def packed(lengths: tuple[int, ...] = (4, 2, 3), inner: Any = None) -> Any:
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].expand(2, -1)
    inner = masking_utils.causal_mask_function if inner is None else inner
    if not hasattr(masking_utils, "packed_sequence_mask_function"):
        pytest.skip("this Transformers does not know packed sequences")
    return packed_mask(inner, positions, sequences)


def own(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query * 3 + key * 5 + batch) % 7 < 4


def stock(function: Any, q_offset: int, q_length: int, kv_length: int, kv_offset: int, **options: Any) -> Tensor:
    """The host's tensor for the same arguments."""
    positions: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
    if "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters:
        positions = {"cache_position": torch.arange(q_offset, q_offset + q_length)}
    return masking_utils.sdpa_mask(
        batch_size=2, kv_length=kv_length, kv_offset=kv_offset, mask_function=function, allow_is_causal_skip=False,
        **positions, **options,
    )  # fmt: skip


def ours(function: Any, q_offset: int, q_length: int, kv_length: int, kv_offset: int, **options: Any) -> Any:
    return pascal_mask(
        2, q_length, kv_length, q_offset, kv_offset, function, **{"allow_is_causal_skip": True, **options}
    )


def as_tensor(mask: Any, q_length: int, kv_length: int) -> Tensor:
    """Return what a mask says; None = everything."""
    if mask is None:
        return torch.ones(2, 1, q_length, kv_length, dtype=torch.bool)
    return (mask.dense() if isinstance(mask, HostMask) else mask).expand(2, 1, q_length, kv_length)


FUNCTIONS = {
    "causal": lambda: masking_utils.causal_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(WINDOW),
    "chunked": chunked,
    "own and causal": lambda: masking_utils.and_masks(masking_utils.causal_mask_function, own),
    "own or causal": lambda: masking_utils.or_masks(masking_utils.causal_mask_function, own),
}
CUSTOM = ("own and causal", "own or causal")


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_says_what_the_host_s_mask_says(name: str, padded: bool, offsets: tuple[int, int, int, int]) -> None:
    function, (q_offset, q_length, kv_length, _) = FUNCTIONS[name](), offsets
    options: dict[str, Any] = {"use_vmap": name in CUSTOM}
    if padded:
        options["attention_mask"] = torch.ones(2, q_offset + q_length, dtype=torch.bool)
        options["attention_mask"][0, :2] = False
    expected = stock(function, *offsets, **options).expand(2, 1, q_length, kv_length)
    found = as_tensor(ours(function, *offsets, **options), q_length, kv_length)
    # A host without a mask for its keys' end relies on the causal rule, and so do we: compare what is there.
    assert torch.equal(found, expected)


@pytest.mark.parametrize("inner", ["causal", "window"])
def test_packed_sequences_become_a_band_and_same_sequence(inner: str) -> None:
    function = packed(inner=FUNCTIONS[inner]())
    assert torch.equal(as_tensor(ours(function, 0, 9, 9, 0), 9, 9), stock(function, 0, 9, 9, 0).expand(2, 1, 9, 9))
    pattern = read_pattern(function)
    assert (pattern.left, pattern.right) == (None if inner == "causal" else WINDOW - 1, 0)
    assert len(pattern.rest) == 1


def test_known_functions_are_taken_apart() -> None:
    assert read_pattern(masking_utils.causal_mask_function) == Pattern(None, 0)
    assert read_pattern(masking_utils.sliding_window_causal_mask_function(9)) == Pattern(8, 0)
    assert read_pattern(own) == Pattern(None, None, (own,))
    pattern = read_pattern(chunked())
    assert (pattern.left, pattern.right, len(pattern.rest)) == (WINDOW - 1, 0, 1)
    both = masking_utils.or_masks(masking_utils.causal_mask_function, own)
    assert read_pattern(both) == Pattern(None, None, (both,))


@pytest.mark.skipif(
    not hasattr(masking_utils, "sliding_window_bidirectional_mask_function"), reason="not in this Transformers"
)
def test_bidirectional_masks() -> None:
    window = masking_utils.sliding_window_bidirectional_mask_function(3)
    assert read_pattern(window) == Pattern(3, 3)
    assert torch.equal(as_tensor(ours(window, 0, 9, 9, 0), 9, 9), stock(window, 0, 9, 9, 0).expand(2, 1, 9, 9))
    everything = masking_utils.bidirectional_mask_function
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert ours(everything, 0, 9, 9, 0, **skip) is None
    assert ours(everything, 0, 9, 9, 0, allow_is_causal_skip=False).dense().all()
    padding = torch.tensor([[True] * 7 + [False] * 2, [True] * 9])
    found = ours(everything, 0, 9, 9, 0, attention_mask=padding, **skip)
    assert torch.equal(found.dense(), padding[:, None, None].expand(2, 1, 9, 9))
    assert ours(everything, 0, 9, 9, 0, attention_mask=torch.ones(2, 9), **skip) is None


def test_a_window_that_means_something_else_is_called_as_it_is() -> None:
    def sliding_window_overlay(sliding_window: int) -> Any:
        def inner_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return key > query - sliding_window - 1  # one key more than today

        return inner_mask

    function = sliding_window_overlay(4)
    function.__module__, function.__qualname__ = "transformers.masking_utils", "sliding_window_overlay.<locals>.f"
    assert read_pattern(function) == Pattern(None, None, (function,))


def test_whatever_else_a_model_does_to_it_gives_the_tensor(caplog: pytest.LogCaptureFixture) -> None:
    mask = ours(chunked(), 0, 9, 9, 0)
    dense = mask.dense()
    assert torch.equal(mask.masked_fill(dense, False), torch.zeros_like(dense))
    assert torch.equal(mask[:, 0], dense[:, 0])
    assert torch.equal(mask & dense, dense)
    assert torch.equal(dense & mask, dense)
    assert torch.equal(~mask, ~dense)
    assert torch.equal(mask == 0, ~dense)
    assert torch.equal(mask.to(torch.float32), dense.float())
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, dense], dim=-1), torch.cat([dense, dense], dim=-1))
    assert "L*S" in caplog.text


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
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
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
