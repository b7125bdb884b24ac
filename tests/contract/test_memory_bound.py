"""O(N) memory, proven by counting every byte: a call takes what its plan says, and that is within the budget."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from attn_support.randomness import at_night, seeds
from attn_support.table import MASKS
from torch import Tensor

from pascal_attn_core import AttentionConfig, LazyMask, create_block_mask, flex_attention, sdpa
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.flash_attn import flash_attn_func
from pascal_attn_core.machine.device import device_info
from pascal_attn_core.observe.memory import Measurement, measure
from pascal_attn_core.routes.tiled import TiledRoute
from pascal_attn_core.tiled.plan import plan_call
from pascal_attn_core.tiled.tiles import TilePlan

MIB = 1 << 20
TILED = AttentionConfig(route="tiled")


def _inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[query, key, value] of (batch, heads, kv_heads, L, S, D, Dv)."""
    batch, heads, kv_heads, length, keys, width, width_v = shape
    sizes = ((heads, length, width), (kv_heads, keys, width), (kv_heads, keys, width_v))
    if device == "cpu":
        return [torch.randn(batch, *size).to(dtype) for size in sizes]
    return [torch.empty(batch, *size, dtype=dtype, device=device) for size in sizes]


def _plan(call: AttentionCall, config: AttentionConfig, *, backward: bool = False) -> TilePlan:
    return plan_call(call, device_info(call.query.device), config, backward=backward)


def _forward(call: AttentionCall, config: AttentionConfig, *, with_lse: bool = True) -> Measurement:
    return measure(lambda query: TiledRoute().forward(call, config, with_lse=with_lse)[: 1 + with_lse], call.query)


def _backward(call: AttentionCall, config: AttentionConfig) -> Measurement:
    """Return what a first pass by autograd takes: everything beyond the gradients themselves."""
    leaves = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    wanted = replace(call, query=leaves[0], key=leaves[1], value=leaves[2], needs_grad=True)
    out = TiledRoute().with_gradients(wanted, config, None).out
    return measure(lambda grad: torch.autograd.grad(out, leaves, grad), torch.ones_like(out))


def _random_call(seed: int, device: str) -> tuple[AttentionCall, AttentionConfig]:
    """A call of any kind that the route tiled takes, the long ones of many tiles."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, kv_heads = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3))
    shape = (rng.choice((1, 2, 3)), groups * kv_heads, kv_heads, rng.choice((1, 17, 200, 600)),
             rng.choice((1, 65, 400, 1700)), rng.choice((8, 40, 64)), rng.choice((8, 40)))  # fmt: skip
    dtype = rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64))
    tensors = _inputs(shape, device, dtype)
    if rng.random() < 0.4:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    if rng.random() < 0.15:
        tensors = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors]
    options: dict = {"enable_gqa": True, "dropout_p": rng.choice((0.0, 0.0, 0.3))}
    options |= rng.choice(({}, {"is_causal": True}, {"is_causal": True, "alignment": "lower_right"},
                           {"window": (rng.choice((0, 60, 500)), 30)}))  # fmt: skip
    mask = None
    if rng.random() < 0.6:
        full = (*shape[:2], *shape[3:5])
        kinds = [kind for kind in MASKS if "everywhere" not in kind and "[B, H, L, S]" not in kind]
        mask = MASKS[rng.choice(kinds)](full, dtype, torch.Generator().manual_seed(seed))
        mask = None if mask is None else mask.to(device)
    call = check_call(*tensors, mask, **options)
    budgets = (None, 1, 0.5, 0.25) if call.num_scores < 1 << 22 else (None, 4, 2)  # small tiles of much work are slow
    return call, AttentionConfig(route="tiled", budget_mib=rng.choice(budgets))


@pytest.mark.parametrize(("seed", "device"), [(seed, ("cpu", "meta")[seed % 2]) for seed in seeds(20)])
def test_the_forward_pass_takes_no_byte_more_than_planned(seed: int, device: str) -> None:
    call, config = _random_call(seed, device)
    plan = _plan(call, config)
    assert plan.extra_bytes <= (4.0 if config.budget_mib is None else config.budget_mib) * MIB
    measured = _forward(call, config, with_lse=seed % 2 == 0)
    assert measured.extra_bytes <= plan.extra_bytes


@pytest.mark.parametrize(("seed", "device"), [(seed, ("cpu", "meta")[seed % 2]) for seed in seeds(15)])
def test_the_backward_pass_takes_no_byte_more_than_planned(seed: int, device: str) -> None:
    call, config = _random_call(seed, device)
    plan = _plan(call, config, backward=True)
    assert plan.extra_bytes <= (6.5 if config.budget_mib is None else config.budget_mib) * MIB
    measured = _backward(call, config)
    # The budget leaves out the sums of 16-bit gradients in float32.
    sums = plan.units * call.seq_len_kv * (call.head_dim + call.head_dim_v) * 4 * (call.query.element_size() == 2)
    assert measured.extra_bytes <= plan.extra_bytes + sums


def _score_mods(heads: int, length: int, keys: int) -> dict[str, Callable | None]:
    """Rules as models have them. Tensors that they read are learned."""
    distances = torch.randn(heads, length + keys, requires_grad=True)
    of_keys = torch.randn(keys, requires_grad=True)
    return {
        "none": None,
        "alibi": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / heads)),
        "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
        "distances": lambda s, b, h, i, j: s + distances[h, i - j + keys],
        "of keys": lambda s, b, h, i, j: s * torch.sigmoid(of_keys[j]),
        "many steps": lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, s.sin().cos() * s.exp().log1p(), s),
    }


def _mask_mods(heads: int, length: int, keys: int) -> dict[str, Callable | None]:
    documents, shifts = torch.arange(max(length, keys)) // 290, torch.arange(heads) * 100
    near = lambda i, j, step: (i // step % 40 - j // step % 40).abs() <= 7  # noqa: E731
    return {
        "none": None,
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i - j).abs() <= 300,
        "documents": lambda b, h, i, j: documents[i] == documents[j],
        "dilated": lambda b, h, i, j: (i - j) % 3 == 0,
        "of heads": lambda b, h, i, j: i - j >= shifts[h],
        "neighbourhood": lambda b, h, i, j: near(i, j, 1) & near(i, j, 40),
    }


@pytest.mark.parametrize("own", [False, True])
def test_what_the_rule_of_a_lazy_mask_takes_counts(own: bool) -> None:
    """ALiBi of flash-attn, and a mask with a rule of its own that takes many steps."""
    heads = 8
    leaves = [torch.randn(1, heads, 900, 40) for _ in range(3)]

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() % (h + 3)).double().sin().cos().float()

    def attend(*given: Tensor) -> Tensor:
        if own:
            return sdpa(*given, LazyMask((1, heads, 900, 900), rule, device="cpu"))
        return flash_attn_func(*(t.transpose(1, 2) for t in given), alibi_slopes=torch.ones(heads))

    assert measure(attend, *leaves).extra_bytes <= 4 * MIB
    leaves = [t.requires_grad_() for t in leaves]
    out = attend(*leaves)
    found = measure(lambda grad: torch.autograd.grad(out, leaves, grad), torch.ones_like(out))
    assert found.extra_bytes <= 6.5 * MIB


@at_night
@pytest.mark.parametrize("seed", seeds(30))
def test_large_calls_with_rules_keep_the_default_budget_in_both_passes(seed: int) -> None:
    """Beside it there are the float32 sums of 16-bit gradients, and what a gradient of a tensor that a rule reads takes
    whatever the tile."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, kv_heads = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3))
    heads, length, keys, width = groups * kv_heads, *(rng.randrange(600, 1600) for _ in "LS"), rng.choice((40, 64, 128))
    dtype = rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    leaves = _inputs((1, heads, kv_heads, length, keys, width, width), "cpu", dtype)
    if rng.random() < 0.4:
        leaves = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
    score_mod = rng.choice([*_score_mods(heads, length, keys).values()])
    mask_mod = rng.choice([*_mask_mods(heads, length, keys).values()])
    block = rng.choice((64, 128, (48, 128), 300))
    blocks = mask_mod and create_block_mask(mask_mod, None, heads, length, keys, device="cpu", BLOCK_SIZE=block)
    attend = lambda *given: flex_attention(*given, score_mod, blocks, enable_gqa=True)  # noqa: E731
    assert measure(attend, *leaves).extra_bytes <= 4 * MIB
    leaves = [t.requires_grad_() for t in leaves]
    out = attend(*leaves)
    found = measure(lambda grad: torch.autograd.grad(out, leaves, grad), torch.ones_like(out)).extra_bytes
    sums = sum(t.numel() for t in leaves[1:]) * 4 if dtype in (torch.float16, torch.bfloat16) else 0
    learned = 2 * 4 * heads * (length + keys)
    assert found <= 6.5 * MIB + sums + learned


@pytest.mark.parametrize("masked", [False, True])
def test_the_plan_is_not_far_above_what_is_taken(masked: bool) -> None:
    """A plan that asks for too much would waste the budget."""
    query, key, value = _inputs((1, 4, 4, 2048, 2048, 64, 64), "meta")
    call = check_call(query, key, value, torch.ones(2048, 2048, dtype=torch.bool, device="meta") if masked else None)
    assert _plan(call, TILED).extra_bytes < 1.1 * _forward(call, TILED).extra_bytes + 4096


#: [1, 32, 2048, 64] over 8 key/value heads: expanded K and V alone would be 34 MB, the scores 512 MiB
HEADLINE = (1, 32, 8, 2048, 2048, 64, 64)


@pytest.mark.parametrize(
    ("shape", "forward", "options"),
    [
        (HEADLINE, 3.1e6, {"enable_gqa": True}),
        ((1, 1, 1, 2048, 2048, 64, 64), 4 * MIB, {"is_causal": True}),
        ((1, 1, 1, 4096, 4096, 64, 64), 4 * MIB, {"is_causal": True}),
    ],
)
def test_neither_grouped_heads_nor_longer_sequences_take_more(shape: tuple, forward: float, options: dict) -> None:
    call = check_call(*_inputs(shape, "meta"), **options)
    for measured, most in ((_forward(call, TILED, with_lse=False), forward), (_backward(call, TILED), 6.5 * MIB)):
        assert measured.extra_bytes <= most
        assert measured.largest_tensor_bytes <= most


def test_values_that_are_read_are_within_the_budget_too() -> None:
    """Masks and norms of real tensors are looked at; each look is planned."""
    query, key, value = _inputs((4, 2, 2, 128, 6000, 16, 16), "cpu")
    generator = torch.Generator().manual_seed(0)
    for kind in ("bool [B, 1, 1, S]", "bool padding", "-inf padding", "-1e4 padding", "float [B, 1, 1, S]"):
        mask = MASKS[kind]((4, 2, 128, 6000), torch.float32, generator)
        call = check_call(query, key, value, mask)
        for config in (TILED, AttentionConfig(route="tiled", budget_mib=1)):
            plan = _plan(call, config)
            assert _forward(call, config).extra_bytes <= plan.extra_bytes, kind


@pytest.mark.parametrize("route", ["auto", "tiled"])
def test_keys_and_values_are_never_expanded(route: str) -> None:
    query, key, value = _inputs((2, 16, 2, 64, 2048, 64, 64), "cpu")
    config = AttentionConfig(route=route, math_limit_mib=0)
    expanded = query.shape[1] * key.shape[2] * key.shape[3] * 4 * 2
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.to(dtype) for t in (query, key, value)]
        measured = measure(lambda *t: sdpa(*t, enable_gqa=True, config=config), *inputs)
        assert measured.largest_tensor_bytes < expanded / 4
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = sdpa(*leaves, enable_gqa=True, config=TILED)
    measured = measure(lambda grad: torch.autograd.grad(out, leaves, grad), torch.ones_like(out))
    assert measured.largest_tensor_bytes < expanded / 4


@pytest.mark.parametrize("kind", ["none", "bool", "float", "other float", "bfloat16"])
def test_whatever_route_is_chosen_the_default_takes_four_megabytes_on_a_cpu(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    mask = {
        "bool": lambda: torch.rand(1024, 1024) < 0.5,
        "float": lambda: torch.randn(1024, 1024),
        "other float": lambda: torch.randn(1024, 1024, dtype=torch.float64),
    }.get(kind, lambda: None)()
    assert measure(sdpa, *_inputs((1, 8, 8, 1024, 1024, 64, 64), "cpu", dtype), mask).extra_bytes <= 4 * MIB


def test_copies_of_the_inputs_take_more_only_where_no_budget_is_given() -> None:
    qkv = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in _inputs((1, 8, 8, 1024, 1024, 64, 64), "cpu")]
    lse_bytes = 8 * 1024 * 4  # of torch's kernel
    assert measure(sdpa, *qkv).extra_bytes <= sum(t.nbytes for t in qkv) + lse_bytes
    assert measure(lambda *t: sdpa(*t, config=AttentionConfig(budget_mib=4)), *qkv).extra_bytes <= 4 * MIB


def _allocated(function: Callable[[], object]) -> int:
    """The peak of torch's own allocator: what its kernels copy inside themselves counts too."""
    with torch.profiler.profile(profile_memory=True) as trace:
        kept = function()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del kept
    return max(accumulate(sizes))


MASKS_NOT_CONTIGUOUS: dict[str, Callable[[int, int], Tensor]] = {
    "T5's position bias": lambda h, n: torch.randn(n, n, h).permute(2, 0, 1)[None],
    "transposed": lambda h, n: torch.randn(1, 1, n, n).mT,
    "every second column": lambda h, n: torch.zeros(n, 2 * n)[:, ::2],
    "bool, transposed": lambda h, n: (torch.rand(n, n) > 0.3).mT,
    "bool, permuted": lambda h, n: (torch.rand(n, n, h) > 0.3).permute(2, 0, 1)[None],
}


@pytest.mark.parametrize("name", MASKS_NOT_CONTIGUOUS)
def test_a_mask_that_torchs_kernel_would_copy_whole_is_not_copied_whole(name: str) -> None:
    heads, length = 4, 1500
    query, key, value = _inputs((1, heads, heads, length, length, 16, 16), "cpu")
    mask = MASKS_NOT_CONTIGUOUS[name](heads, length)
    with torch.no_grad():
        assert _allocated(lambda: sdpa(query, key, value, mask)) - query.nbytes <= 4 * MIB
    out = sdpa(query.requires_grad_(), key, value, mask)
    grad = torch.ones_like(out)
    assert _allocated(lambda: torch.autograd.grad(out, query, grad)) - query.nbytes <= 8 * MIB


def test_neither_a_rule_nor_the_scores_of_keys_with_one_dimension_more_are_stored_whole() -> None:
    tokens = 4096
    query, key, value = (torch.randn(1, 1, tokens, 8) for _ in range(3))
    rule = LazyMask((1, 1, tokens, tokens), lambda b, h, i, j: (i // 512) == (j // 512), device="cpu")
    measured = measure(lambda q, k, v: sdpa(q, k, v, rule), query, key, value)
    assert measured.largest_tensor_bytes <= tokens * tokens // 8  # as bool the whole would be tokens * tokens
    query, key = torch.randn(1, 1, 2000, 8), torch.randn(1, 1, 1, 2000, 8)
    assert measure(sdpa, query, key, key).extra_bytes <= 4 * MIB
