"""The rules of torch's own tests of FlexAttention and of the models that use it, with gradients, against float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from attn_support.flex import definition
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core import AttentionConfig, create_block_mask, flex_attention

flex = pytest.importorskip("torch.nn.attention.flex_attention")

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 190, 16  # a picture of 16 columns; a length that no block size divides
FRAME = 48  # tokens of a frame of 3 x 16
INF = math.inf


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


OF_HEADS, OF_BATCH, OF_ROWS, OF_KEYS = _drawn(HEADS), _drawn(BATCH), _drawn(TOKENS), _drawn(TOKENS)
MATRIX, ALL, DISTANCES = _drawn(TOKENS, TOKENS), _drawn(BATCH, HEADS, TOKENS, TOKENS), _drawn(HEADS, 2 * TOKENS)
SHIFTS = torch.tensor([[3, 50, 0, 180], [7, 1, 120, 30]])
LENGTHS, DOCUMENTS = torch.tensor([60, 130]), torch.arange(TOKENS) // 37
NABLA = torch.rand(BATCH, HEADS, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.3  # of blocks of 8 x 8


def _alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def _near(i: Tensor, j: Tensor, axes: tuple[tuple[int, int, int], ...]) -> Tensor:
    """A neighbourhood that keeps its size at the borders, as NATTEN's. axes: (tokens to the next, length, reach)."""
    keep = i == i
    for step, length, reach in axes:
        of_query, of_key = i // step % length, j // step % length
        keep = keep & ((of_query.clamp(reach, length - 1 - reach) - of_key).abs() <= reach)
    return keep


SCORE_MODS: dict[str, Callable] = {
    "times two": lambda s, b, h, i, j: s * 2,
    "squared": lambda s, b, h, i, j: s * s,
    "constant": lambda s, b, h, i, j: torch.zeros_like(s),
    "trigonometric": lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b),
    "two branches": lambda s, b, h, i, j: torch.cos(s) * torch.sin(s) + torch.tan(b),
    "silu": lambda s, b, h, i, j: torch.nn.functional.silu(s),
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -INF),
    "inverse causal": lambda s, b, h, i, j: torch.where(i <= j, s, -INF),
    "relative": lambda s, b, h, i, j: s + (i - j),
    "relative causal": lambda s, b, h, i, j: torch.where(i >= j, s + (i - j), -INF),
    "every other key": lambda s, b, h, i, j: torch.where(j % 2 == 0, s, -INF),
    "alibi": _alibi,
    "softcap of alibi": lambda s, b, h, i, j: 5 * torch.tanh(_alibi(s, b, h, i, j) / 5),
    "a factor of heads": lambda s, b, h, i, j: s * OF_HEADS[h],
    "all indices": lambda s, b, h, i, j: s + OF_BATCH[b] + OF_HEADS[h] + OF_ROWS[i] * OF_KEYS[j],
    "index by index": lambda s, b, h, i, j: s + MATRIX[i][j],
    "a bias for everything": lambda s, b, h, i, j: s + ALL[b, h, i, j],
    "learned distances": lambda s, b, h, i, j: s + DISTANCES[h, i - j + TOKENS],
    "padding": lambda s, b, h, i, j: torch.where(j < LENGTHS[b], s, -INF),
}
MASK_MODS: dict[str, Callable] = {
    "noop": flex.noop_mask,
    "causal": lambda b, h, i, j: i >= j,
    "inverse causal": lambda b, h, i, j: i <= j,
    "prefix": flex.or_masks(lambda b, h, i, j: j < LENGTHS[b], lambda b, h, i, j: i >= j),
    "causal documents": flex.and_masks(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], lambda b, h, i, j: i >= j),
    "every other head": lambda b, h, i, j: (h % 2 == 1) | (i >= j),
    "dilated": lambda b, h, i, j: (i - j) % 3 == 0,
    "window": lambda b, h, i, j: (i - j).abs() <= 40,
    "of heads": lambda b, h, i, j: i - j >= SHIFTS[b][h],  # with index tensors that broadcast it would mean another
    "empty rows": lambda b, h, i, j: (i >= 70) & (j < 130),
    "natten 2-D": lambda b, h, i, j: _near(i, j, ((1, WIDTH, 3), (WIDTH, 12, 2))),
    "natten 3-D (LTX-2)": lambda b, h, i, j: _near(i, j, ((1, WIDTH, 3), (WIDTH, 3, 1), (FRAME, 4, 1))),
    "NABLA (Kandinsky)": lambda b, h, i, j: NABLA[b, h, i // 8, j // 8] | (i // 8 == j // 8),
    "nothing": lambda b, h, i, j: i < 0,
}
LEAVES = (OF_HEADS, OF_BATCH, OF_ROWS, OF_KEYS, MATRIX, ALL, DISTANCES)
LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": lambda heads, d: torch.randn(BATCH, heads, TOKENS, d),
    "tokens first": lambda heads, d: torch.randn(BATCH, TOKENS, heads, d).transpose(1, 2),
    "columns of more": lambda heads, d: torch.randn(BATCH, heads, TOKENS, d + 3)[..., 1 : d + 1],
    "one batch element": lambda heads, d: torch.randn(1, heads, TOKENS, d).expand(BATCH, -1, -1, -1),
}
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SMALL_TILES = AttentionConfig(route="tiled", q_block=48, kv_block=70)
RULES = (
    [(s, "noop") for s in SCORE_MODS] + [("", m) for m in MASK_MODS] + [*zip(SCORE_MODS, itertools.cycle(MASK_MODS))]
)


@pytest.mark.parametrize(("rule", "dtype"), some(itertools.product(RULES, TOLERANCES), 8), ids=str)
def test_rules(rule: tuple[str, str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    score, mask = rule
    number = RULES.index((score, mask))
    layout, kv_heads = list(LAYOUTS.values())[number % 4], (4, 2, 1)[number % 3]
    given = [layout(heads, d).to(dtype).requires_grad_() for heads, d in ((HEADS, 24), (kv_heads, 24), (kv_heads, 16))]
    block = (32, 64, (16, 48), 128)[number // 2 % 4]
    score_mod, mask_mod = SCORE_MODS.get(score), MASK_MODS[mask]
    blocks = create_block_mask(mask_mod, BATCH, HEADS, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=block)
    scale, config = (None, 0.3)[number // 3 % 2], SMALL_TILES if number % 2 else None
    out, lse = flex_attention(*given, score_mod, blocks, scale, enable_gqa=True, return_lse=True, config=config)
    exact, exact_lse, rows = definition(*(t.double() for t in given), score_mod, mask_mod, scale)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[rows].double(), exact_lse[rows], rtol=tolerance, atol=tolerance)
    assert bool((lse[~rows] == -INF).all())
    leaves, grads = [*given, *LEAVES], (torch.randn_like(out), torch.randn_like(lse) * rows)
    ours = torch.autograd.grad((out, lse.where(rows, 0)), leaves, grads, allow_unused=True)
    exact_lse = exact_lse + 0 * exact.sum()  # which a constant score_mod cuts off
    theirs = torch.autograd.grad((exact, exact_lse), leaves, [g.double() for g in grads], allow_unused=True)
    sizes = [e.norm() for e in theirs if e is not None]
    for own, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            assert own is not None
            assert (own - expected).norm() <= max(5 * tolerance, 2e-6) * max(expected.norm(), 0.01 * max(sizes))
