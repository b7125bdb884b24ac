"""FlexAttention in tiles: against the definition in float64, against torch's own function, and its memory."""

import contextlib
import copy
import functools
import io
import itertools
import math
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.flex import applied, definition, scores_of
from attn_support.randomness import some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pascal_attn_core import AttentionConfig, UnsupportedAttention, patch_flex_attention, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.call.flex_rules import WINDOW, BlockRule, ScoreRule, Window, block_rule, known_of
from pascal_attn_core.flex import create_block_mask, flex_attention
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.tiled.rule_bytes import rule_bytes

flex = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

TOKENS, HEADS = 300, 4
SMALL_TILES = AttentionConfig(route="tiled", q_block=96, kv_block=80)  # their edges cut blocks of 64
BIAS = torch.randn(HEADS, 2 * TOKENS, generator=torch.Generator().manual_seed(0)).requires_grad_()
DOCUMENTS = torch.arange(TOKENS) * 4 // TOKENS
SHIFTS = torch.tensor([[3, 50, 0, 290], [7, 1, 120, 30]])


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + BIAS[h, i - j + TOKENS]


MASKS: dict[str, Callable | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 40,
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "of heads": lambda b, h, i, j: i - j >= SHIFTS[b][h],
    "empty rows": lambda b, h, i, j: (i >= 70) & (j < 130),
}
SCORE_MODS: dict[str, Callable | None] = {
    "none": None,
    "relative": relative,
    "alibi": lambda score, b, h, i, j: score + (j - i) * 0.1 * (h + 1),
    "softcap": lambda score, b, h, i, j: 20 * torch.tanh(score / 20),
    "forbids": lambda score, b, h, i, j: torch.where((i + j) % 3 == b, score, -math.inf),
}


def inputs(kv_heads: int = HEADS, tokens: int = TOKENS, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, tokens, 16, **options) for heads in (HEADS, kv_heads, kv_heads)]


def block_mask(mask_mod: Callable | None) -> Any:
    return mask_mod and create_block_mask(mask_mod, 2, HEADS, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=64)


@pytest.mark.parametrize("score_mod", ["none", "alibi"])
@pytest.mark.parametrize("mask", ["none", "causal", "empty rows"])
def test_what_is_returned_beside_the_output(mask: str, score_mod: str) -> None:
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    given = inputs(requires_grad=True)
    request = flex.AuxRequest(lse=mask == "causal", max_scores=True)
    _, found = flex_attention(*given, SCORE_MODS[score_mod], block_mask(MASKS[mask]), return_aux=request)
    scores = scores_of(*given[:2], SCORE_MODS[score_mod], MASKS[mask]).detach()
    torch.testing.assert_close(found.max_scores, scores.amax(-1), rtol=1e-5, atol=1e-5)  # without a gradient
    assert (found.lse is not None) == request.lse
    if found.lse is not None:
        torch.testing.assert_close(found.lse.detach(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(300, 300), (256, 130), (5, 700)])
@pytest.mark.parametrize("mask", ["causal", "window", "of heads"])
def test_the_blocks_are_those_of_torch(mask: str, sizes: tuple[int, int]) -> None:
    for block in (64, (128, 32)):
        ours = create_block_mask(MASKS[mask], 2, HEADS, *sizes, device="cpu", BLOCK_SIZE=block)
        theirs = flex.create_block_mask(MASKS[mask], 2, HEADS, *sizes, device="cpu", BLOCK_SIZE=block)
        assert (ours.shape, ours.BLOCK_SIZE) == (theirs.shape, theirs.BLOCK_SIZE)
        assert torch.equal(*(block_rule(m, (2, HEADS, *sizes)).states for m in (ours, theirs)))
        for counts in ("kv_num_blocks", "full_kv_num_blocks"):
            assert torch.equal(getattr(ours, counts), getattr(theirs, counts))


def test_what_the_blocks_say_holds() -> None:
    """A block that is listed as full or not at all is not asked for, whatever mask_mod would say."""
    counts, full = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    asked: list[int] = []

    def never(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        asked.append(1)
        return i < 0

    blocks = flex.BlockMask.from_kv_blocks(counts * 0, full, counts, full, 150, never, seq_lengths=(TOKENS, TOKENS))
    given = inputs()
    asked.clear()
    out = flex_attention(*given, None, blocks, config=SMALL_TILES)
    expected = definition(*given, None, lambda b, h, i, j: i // 150 == j // 150)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert len(asked) <= 4  # which tensors it reads, whether batch and head, and how much memory it takes


@pytest.mark.parametrize("seed", range(12))
def test_any_lists_of_blocks(seed: int) -> None:
    """In any order, without full ones, empty rows, the same for all heads or batch elements, cut off by the length."""
    torch.manual_seed(seed)
    height, width = ((16, 48), (64, 20), (7, 128), (1000, 1000))[seed % 4]
    rows, columns, heads = -(-TOKENS // height), -(-TOKENS // width), (1, HEADS)[seed % 2]
    states = torch.randint(0, 3 if seed % 3 else 2, (2, heads, rows, columns)) * (torch.rand(rows, 1) >= 0.2)

    def listed(state: int) -> tuple[Tensor, Tensor]:
        key = (states != state) * 2 + torch.rand(states.shape)
        return (states == state).sum(-1, dtype=torch.int32), key.argsort(-1).int()

    full = listed(2) if seed % 3 else (None, None)
    own = MASKS["of heads"] if heads > 1 else MASKS["documents"]
    blocks = flex.BlockMask.from_kv_blocks(*listed(1), *full, (height, width), own, seq_lengths=(TOKENS, TOKENS))

    def meant(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        state = states[b, h if heads > 1 else h * 0, i // height, j // width]
        return (state == 2) | ((state == 1) & own(b, h, i, j))

    given = inputs()
    out, lse = flex_attention(*given, None, blocks, return_lse=True, config=SMALL_TILES)
    torch.testing.assert_close(out, definition(*given, None, meant)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(lse == -math.inf, ~applied(meant, lengths=(2, HEADS, TOKENS, TOKENS)).any(-1))


def test_what_changes_in_a_block_mask_counts() -> None:
    """Programs give a BlockMask another mask_mod (a cache that grows), write into what it reads, or other lists."""
    given, blocks = inputs(), block_mask(MASKS["causal"])

    def check(mask_mod: Callable) -> None:
        out = flex_attention(*given, None, blocks, config=SMALL_TILES)
        torch.testing.assert_close(out, definition(*given, None, mask_mod)[0], rtol=1e-5, atol=1e-5)

    check(lambda b, h, i, j: i >= j)
    blocks.mask_mod = lambda b, h, i, j: i > j
    check(lambda b, h, i, j: (i > j) | (i // 64 > j // 64))
    shift = torch.tensor(0)
    blocks.mask_mod = lambda b, h, i, j: i > j + shift
    check(lambda b, h, i, j: (i > j) | (i // 64 > j // 64))
    shift += 7
    check(lambda b, h, i, j: (i > j + 7) | ((i // 64 > j // 64) & (i < 256)))  # the last row of blocks is cut off
    shift -= 7
    blocks.full_kv_num_blocks.zero_()
    check(lambda b, h, i, j: (i > j) & ((i // 64 == j // 64) | (i >= 256)))


def test_a_block_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = flex.create_block_mask(
        lambda b, h, i, j: (i // 90 == j // 90) | (j < 3), None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=64
    )
    first = flex_attention(*inputs(), None, blocks, config=SMALL_TILES)
    monkeypatch.delattr(BlockRule, "_evaluate")
    assert torch.equal(flex_attention(*inputs(), None, blocks, config=SMALL_TILES), first)


class Shifted:
    """Masks that read one shift in different places, and ways to change it."""

    shift: Any = 10

    def __init__(self, kind: str):
        self.kind = kind
        with torch.inference_mode(kind == "inference"):
            self.shift = 10 if kind in ("number", "cell") else torch.tensor(10)

    def mask_mod(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + self.shift >= j

    def function(self) -> Callable:
        shift = self.shift

        def of_cell(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i + shift >= j

        def change() -> None:
            nonlocal shift
            shift = 110

        self.change_cell = change
        return of_cell if self.kind == "cell" else self.mask_mod

    def change(self) -> None:
        if self.kind == "data":
            self.shift.data.add_(100)
        elif self.kind in ("in place", "inference"):
            with torch.inference_mode(self.kind == "inference"):
                self.shift.add_(100)
        elif self.kind == "cell":
            self.change_cell()
        else:
            self.shift = 110 if self.kind == "number" else self.shift + 100


@pytest.mark.parametrize("kind", ["in place", "inference", "bound anew", "data", "number", "cell"])
def test_a_mask_used_twice_reads_what_is_there_now(kind: str) -> None:
    """As in decoding, where all blocks are partial and one offset moves."""
    shifted = Shifted(kind)
    mask_mod = shifted.function()
    number, indices = torch.full((1, 1, 1), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).view(1, 1, 1, 3)
    blocks = flex.BlockMask.from_kv_blocks(number, indices, None, None, 128, mask_mod, (4, 300))
    query, key = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 300, 16)
    for _ in range(2):
        out = flex_attention(query, key, key, block_mask=blocks)
        torch.testing.assert_close(out, definition(query, key, key, None, mask_mod)[0])
        shifted.change()


@pytest.mark.parametrize("make", [create_block_mask, flex.create_block_mask])
def test_a_mask_that_has_been_used_is_copied_and_saved(make: Callable) -> None:
    blocks = make(MASKS["causal"], None, None, TOKENS, TOKENS, device="cpu")
    out = flex_attention(*inputs(), None, blocks)
    module = torch.nn.Module()
    module.mask = blocks
    assert torch.equal(flex_attention(*inputs(), None, copy.deepcopy(module).mask), out)
    blocks.mask_mod = flex.noop_mask  # a lambda cannot be pickled, whoever made the mask
    flex_attention(*inputs(), None, blocks)
    pickle.dumps(blocks)
    torch.save(module, io.BytesIO())


def test_a_block_mask_ends_the_graph_that_is_compiled() -> None:
    query, key, value = inputs()
    blocks = create_block_mask(MASKS["of heads"], 2, HEADS, TOKENS, TOKENS, device="cpu")
    compiled = torch.compile(lambda query: sdpa(query, key, value, blocks) * 2, backend="eager")
    torch.testing.assert_close(compiled(query), sdpa(query, key, value, blocks) * 2)


@pytest.mark.parametrize(("length", "keys"), [(0, 20), (20, 0)])
def test_no_query_or_no_key(length: int, keys: int) -> None:
    query, key = torch.randn(1, 2, length, 16, requires_grad=True), torch.randn(1, 2, keys, 16)
    out, lse = flex_attention(query, key, key, SCORE_MODS["alibi"], return_lse=True)
    assert torch.equal(out, torch.zeros(1, 2, length, 16))
    assert torch.equal(lse, torch.full((1, 2, length), -math.inf))
    out.sum().backward()


class Learned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.1))
        self.unused = torch.nn.Parameter(torch.zeros(3))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + self.slope * (j - i)


@pytest.mark.parametrize("how", some(["attribute", "partial", "closure", "container", "intermediate"], 2))
def test_gradients_of_what_a_score_mod_reads(how: str) -> None:
    layer = Learned()
    slope: Tensor = layer.slope * 2 if how == "intermediate" else layer.slope
    box = {"slope": [slope]}

    def plain(slope: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slope * (j - i)

    mods: dict[str, Callable] = {
        "attribute": layer.score_mod,
        "partial": functools.partial(plain, slope),
        "closure": lambda *given: plain(slope, *given),
        "container": lambda *given: plain(box["slope"][0], *given),
        "intermediate": lambda *given: plain(slope, *given),
    }
    given = inputs()
    outs = (
        flex_attention(*given, mods[how], config=SMALL_TILES),
        definition(*(t.double() for t in given), mods[how], None)[0],
    )
    ours, exact = (torch.autograd.grad(out.square().sum(), layer.slope, retain_graph=True)[0] for out in outs)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    outs[0].sum().backward()
    assert layer.unused.grad is None  # nothing is computed for what is not read


READERS: dict[str, Callable[[Tensor], Callable]] = {
    "three indices": lambda t: lambda s, b, h, i, j: s + t[h, i, j],
    "one by one": lambda t: lambda s, b, h, i, j: s + t[h][i][j],
    "twice": lambda t: lambda s, b, h, i, j: s + t[h, i, j].tanh() * t[h, 0, 0],
    "indexed and whole": lambda t: lambda s, b, h, i, j: s + t[h, i, j] + t.mean(),
    "not a leaf": lambda t: (lambda u: lambda s, b, h, i, j: s + u[h, i, j])(t * 2),
    "in place": lambda t: lambda s, b, h, i, j: s.mul_(2).add_(t[h, i, j]),
}


@pytest.mark.parametrize("name", some(READERS, 2))
def test_gradients_of_a_table(name: str) -> None:
    table = torch.randn(HEADS, TOKENS, TOKENS, requires_grad=True)
    mod, given = READERS[name](table), inputs()
    plain = (lambda s, *at: mod(s.clone(), *at)) if name == "in place" else mod
    outs = flex_attention(*given, mod, config=SMALL_TILES), definition(*(t.double() for t in given), plain, None)[0]
    ours, exact = (torch.autograd.grad(out.square().sum(), table, retain_graph=True)[0] for out in outs)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_the_size_of_a_table_does_not_decide_the_tiles() -> None:
    """A table's dense gradient is the same in every tile, however small: 30 s of backward for [8, 512, 512] before."""
    found = []
    for size in (TOKENS, 8 * TOKENS):
        table = torch.randn(HEADS, size, requires_grad=True)
        call = check_call(*inputs(requires_grad=True))
        rule = ScoreRule(lambda s, b, h, i, j, table=table: s + table[h, i - j], call.query.new_empty(0))
        found.append(rule_bytes(replace(call, score_rule=rule), backward=True))
    assert found[0] == found[1]


def test_a_table_written_before_the_backward_pass_is_refused() -> None:
    table, given = torch.randn(HEADS), inputs(requires_grad=True)
    out = flex_attention(*given, lambda s, b, h, i, j: s * table[h])
    table.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the forward pass"):
        out.sum().backward()


def test_a_gradient_that_cannot_be_followed_is_refused() -> None:
    slope = torch.tensor(0.1, requires_grad=True)

    def hidden(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return score + slope * (j - i)

    with pytest.raises(TypeError, match="must read tensors that require gradients by torch's functions"):
        flex_attention(*inputs(), hidden)
    with pytest.raises(TypeError, match="score_mod must return a tensor, got tuple"):
        flex_attention(*inputs(), lambda *given: given)


@pytest.mark.parametrize(("mask", "score_mod"), some(itertools.product(["none", "window", "of heads"], SCORE_MODS), 5))
def test_memory(mask: str, score_mod: str) -> None:
    """Forward and gradients within the budget; the score matrix alone has 18 MiB."""
    mod, tokens = SCORE_MODS[score_mod], 1100
    if mod is relative or (mod is None and MASKS[mask] is None):
        pytest.skip("the tensor that it reads is for another length, or there is no rule")
    blocks = MASKS[mask] and create_block_mask(MASKS[mask], 2, HEADS, tokens, tokens, device="cpu")
    given, config = inputs(tokens=tokens, requires_grad=True), AttentionConfig(route="tiled", budget_mib=2.0)
    with torch.no_grad():
        forward = measure(lambda *t: flex_attention(*t, mod, blocks, config=config), *given)
    out = flex_attention(*given, mod, blocks, config=config)
    backward = measure(lambda grad: torch.autograd.grad(out, given, grad), torch.randn_like(out))
    assert max(forward.extra_bytes, backward.extra_bytes) <= 2 << 20


def test_tiles_that_are_skipped_are_not_computed() -> None:
    query, key, value = inputs(tokens=2048)
    blocks = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 100, None, None, 2048, 2048, device="cpu")
    expected = flex_attention(query, key, value, None, blocks, config=SMALL_TILES)[:, :, :512]
    value[:, :, 1024:] = math.nan  # which even a weight of zero would spread
    out = flex_attention(query, key, value, None, blocks, config=SMALL_TILES)
    torch.testing.assert_close(out[:, :, :512], expected)


WINDOWS: dict[str, tuple[Callable, tuple[int, int], Window | None]] = {
    "causal": (lambda b, h, i, j: i >= j, (300, 300), Window((-1, 0), "upper_left")),
    "window": (lambda b, h, i, j: (i - j).abs() <= 40, (300, 300), Window((40, 40), "upper_left")),
    "causal window": (lambda b, h, i, j: (i >= j) & (i - j < 9), (300, 170), None),  # the last queries see no key
    "of a cache": (lambda b, h, i, j: i + 100 >= j, (20, 120), Window((-1, 100), "upper_left")),
    "behind a cache": (lambda b, h, i, j: i + 100 >= j + 120, (120, 20), None),
    "ahead of a cache": (lambda b, h, i, j: i + 30 >= j, (20, 120), Window((-1, 30), "upper_left")),
    "everything": (lambda b, h, i, j: i >= 0, (300, 170), Window((-1, -1), "upper_left")),
    "strictly causal": (lambda b, h, i, j: i > j, (300, 300), None),  # the first query sees no key
    "all but one": (lambda b, h, i, j: (i >= j) & ((i != 200) | (j != 3)), (300, 300), None),
    "one more": (lambda b, h, i, j: (i >= j) | ((i == 200) & (j == 201)), (300, 300), None),
    "of heads": (lambda b, h, i, j: i - j >= SHIFTS[b][h], (300, 300), None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_mask_that_is_a_window_is_known_as_one(name: str) -> None:
    """Read from every element, so that any route may take it."""
    mask_mod, (length, keys), expected = WINDOWS[name]
    blocks = create_block_mask(mask_mod, 2, HEADS, length, keys, device="cpu", BLOCK_SIZE=32)
    assert known_of(blocks).get(WINDOW) == expected
    query = torch.randn(2, HEADS, length, 16)
    key, value = torch.randn(2, 2, HEADS, keys, 16)
    exact = definition(query.double(), key.double(), value.double(), None, mask_mod)[0]
    for out in (sdpa(query, key, value, blocks), flex_attention(query, key, value, block_mask=blocks)):
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_in_the_place_of_torchs_functions() -> None:
    before, ours = (flex.flex_attention, flex.create_block_mask), create_block_mask
    user = types.ModuleType("a_module_that_imported_it_by_name")
    user.attend, sys.modules[user.__name__] = flex.flex_attention, user  # type: ignore[attr-defined]
    user.compiled = torch.compile(flex.flex_attention)  # type: ignore[attr-defined]
    user.ours = create_block_mask  # type: ignore[attr-defined]
    given = inputs(tokens=1100)
    try:
        with patch_flex_attention(AttentionConfig(budget_mib=2.0)) as patch:
            assert patch.sites >= 3
            assert user.attend is user.compiled is flex.flex_attention
            used = measure(lambda: flex.create_block_mask(MASKS["window"], None, None, 1100, 1100, device="cpu"))
            assert used.peak_bytes < 4 << 20
            assert measure(lambda *t: user.attend(*t, block_mask=used.out), *given).extra_bytes <= 2 << 20
            attend = functools.partial(user.attend, score_mod=SCORE_MODS["alibi"], block_mask=used.out)
            compiled = torch.compile(lambda *t: attend(*t).cos(), backend="eager")
            torch.testing.assert_close(compiled(*given), attend(*given).cos())
            assert measure(compiled, *given).extra_bytes <= (2 << 20) + given[0].nbytes  # and what cos() is of
    finally:
        del sys.modules[user.__name__]
    assert (flex.flex_attention, flex.create_block_mask) == before
    assert user.attend is before[0]
    assert user.compiled._torchdynamo_orig_callable is before[0]
    assert user.ours is create_block_mask is ours


BROKEN = flex.BlockMask.from_kv_blocks(
    torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), None, None, 200,
    lambda b, h, i, j: i - j, seq_lengths=(200, 200),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"score_mod": 3}, TypeError, "score_mod must be a function"),
        ({"block_mask": torch.ones(200, 200)}, TypeError, "block_mask must be a BlockMask or None, got Tensor"),
        ({"block_mask": block_mask(MASKS["causal"])}, ValueError, "must be made for"),
        ({"enable_gqa": False}, ValueError, "heads"),
        ({"block_mask": BROKEN[:1]}, RuntimeError, "sliced BlockMask"),
        ({"block_mask": BROKEN}, TypeError, "mask_mod must return a bool, got torch.int64"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    query, key, value = inputs(2, tokens=200)
    with pytest.raises(error, match=words):
        flex_attention(query, key, value, **{"enable_gqa": True, **change})


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_data_there_are_shapes(kind: str) -> None:
    mode = FakeTensorMode() if kind == "fake" else contextlib.nullcontext()
    device = "meta" if kind == "meta" else "cpu"
    with mode:
        blocks = create_block_mask(MASKS["causal"], 2, HEADS, 9000, 9000, device=device)
        query = torch.empty(2, HEADS, 9000, 16, device=device, requires_grad=True)
        out, lse = flex_attention(query, query, query, SCORE_MODS["alibi"], blocks, return_lse=True)
    assert (out.shape, lse.shape, out.requires_grad) == (query.shape, query.shape[:3], True)
    assert blocks.kv_num_blocks.device.type == device


def test_options_of_a_block_mask() -> None:
    make = functools.partial(create_block_mask, MASKS["causal"], device="cpu")
    with pytest.raises(TypeError, match="separate_full_block"):
        make(None, None, 70, 70, separate_full_block=False)
    with pytest.raises(ValueError, match="compute_dq_write_order must be False"):
        make(None, None, 70, 70, compute_dq_write_order=True)
    assert make(0, None, 70, 70).shape == (0, 1, 70, 70)
    assert make(None, None, 70, 0).shape == (1, 1, 70, 0)
    with torch.inference_mode():
        assert not make(None, None, 70, 70).kv_num_blocks.is_inference()


@pytest.mark.parametrize("route", ["torch", "math"])
def test_other_routes_say_why_not(route: str) -> None:
    with pytest.raises(UnsupportedAttention, match="score_mod"):
        flex_attention(*inputs(), SCORE_MODS["alibi"], config=AttentionConfig(route=route))
