"""One call over two to four processes gives what one process gives, gradients too; who is gone is named."""

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attn_support import fresh
from attn_support.parallel.processes import run_in
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core import AttentionConfig, UnsupportedAttention, parallel, sdpa
from pascal_attn_core.parallel import context_parallel_sdpa

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked"),
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]
F64 = torch.float64
#: name -> (query heads, key/value heads, options of the call, kind of mask)
CALLS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "plain": (4, 4, {}, ""),
    "GQA": (4, 2, {"enable_gqa": True}, ""),
    "one key/value head": (4, 1, {"enable_gqa": True}, ""),
    "causal": (4, 4, {"is_causal": True}, ""),
    "causal, GQA, scale": (4, 2, {"is_causal": True, "enable_gqa": True, "scale": 0.4}, ""),
    "padding, own columns": (4, 4, {}, "own columns"),
    "padding, all columns": (4, 4, {}, "all columns"),
    "padding per head, own columns": (4, 4, {}, "own columns per head"),
    "own rows": (4, 4, {}, "own rows"),
    "own rows, per head": (4, 4, {}, "own rows per head"),
    "all rows, per head": (4, 4, {}, "per head"),
    "float mask": (4, 2, {"enable_gqa": True}, "float"),
    "empty rows": (4, 4, {}, "empty rows"),
}


def mask_of(kind: str, tokens: int, own: slice) -> tuple[Tensor | None, Tensor | None]:
    """(the whole mask, what the process with the tokens ``own`` passes)."""
    draws = torch.Generator().manual_seed(3)
    if not kind:
        return None, None
    if kind == "float":
        mask = torch.randn(tokens, tokens, generator=draws, dtype=F64)
        return mask, mask
    heads = 4 if "per head" in kind else 1
    if "columns" in kind:
        padding = torch.rand(2, heads, 1, tokens, generator=draws) > 0.3
        padding[0, ..., -4:] = False
        return padding, padding[..., own] if "own" in kind else padding
    mask = torch.rand(2, heads, tokens, tokens, generator=draws) > 0.3
    if kind == "empty rows":
        mask[:, :, 2] = mask[:, :, -2] = False
    return mask, mask if kind == "per head" else mask[:, :, own]


def groups_of(how: str) -> dict[str, Any]:
    if how == "both":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ring", "ulysses"))
        return {name: mesh[name].get_group() for name in ("ring", "ulysses")}
    return {how: dist.group.WORLD}


def differences(rank: int, name: str, lengths: Sequence[int], groups: dict[str, Any]) -> list[float]:
    """Largest difference of out and of each gradient between this process's part and one process's answer."""
    heads, kv_heads, options, kind = CALLS[name]
    total, start = sum(lengths), sum(lengths[:rank])
    own = slice(start, start + lengths[rank])
    draws = torch.Generator().manual_seed(1)
    shapes = (heads, 16), (kv_heads, 16), (kv_heads, 8), (heads, 8)
    *tensors, grad = (torch.randn(2, h, total, d, generator=draws, dtype=F64) for h, d in shapes)
    whole_mask, mask = mask_of(kind, total, own)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = sdpa(*leaves, whole_mask, **options)
    expected = [out, *torch.autograd.grad(out, leaves, grad)]
    parts = [t[:, :, own].clone().requires_grad_() for t in tensors]
    found = context_parallel_sdpa(*parts, mask, **options, **groups, uneven=len(set(lengths)) > 1)
    answers = [found, *torch.autograd.grad(found, parts, grad[:, :, own])]
    if not all(answer.isfinite().all() for answer in answers):
        return [float("nan")] * 4
    return [float((a - b[:, :, own]).abs().max()) if a.numel() else 0.0 for a, b in zip(answers, expected)]


@pytest.mark.parametrize("tokens", some(["7 3 9", "1 5", "6 6", "6 6 6 6", "6 0", "1 1"], 6))
@fresh.alone
def test_every_call_gives_what_one_process_gives(tokens: str) -> None:
    """Two and three processes by a ring and by Ulysses, four by both; one may have a single token, or all of them."""
    lengths = [int(count) for count in tokens.split()]
    world = len(lengths)

    def work(rank: int) -> dict[str, Any]:
        found = {}
        for how in ["both"] if world == 4 else ["ring", "ulysses"]:
            groups = groups_of(how)
            for name, (_, kv_heads, _, kind) in CALLS.items():
                is_refused = how == "ulysses" and kv_heads < world == 3
                if not is_refused and not (kind == "empty rows" and sum(lengths) < 4):
                    found[how, name] = differences(rank, name, lengths, groups)
        return found

    answers = run_in(world, work)
    assert all(isinstance(answer, dict) and len(answer) >= len(CALLS) for answer in answers), answers
    wrong = [(rank, *each) for rank in range(world) for each in answers[rank].items() if not max(each[1]) < 1e-12]
    assert not wrong, wrong


@fresh.alone
def test_autocast_gives_the_dtype_that_it_gives_in_one_process() -> None:
    def work(rank: int) -> list[torch.dtype]:
        query = torch.randn(1, 4, 6, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [context_parallel_sdpa(*[query] * 3, **{how: dist.group.WORLD}).dtype for how in ("ring", "ulysses")]

    assert run_in(2, work) == [[torch.bfloat16, torch.bfloat16]] * 2


@fresh.alone
def test_no_process_holds_the_keys_of_more_than_two() -> None:
    from pascal_attn_core import measure_memory

    def work(rank: int) -> float:
        query, key, value = torch.randn(1, 2, 8, 32), torch.randn(1, 2, 4096, 32), torch.randn(1, 2, 4096, 32)
        with torch.no_grad(), measure_memory("cpu") as peak:
            context_parallel_sdpa(query, key, value, ring=dist.group.WORLD)
        return peak.peak_bytes / (key.nbytes + value.nbytes)

    with measure_memory("cpu"):
        torch.ones(8).sum()  # what it imports, once for all processes
    answers = run_in(4, work)
    assert max(answers) < 2.5, answers  # those that leave and those that arrive; all of them would be 4


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
@fresh.alone
def test_the_others_end_with_an_error_that_says_where(how: str) -> None:
    def work(rank: int) -> str:
        tensors = [torch.randn(1, 2, 64, 32).requires_grad_() for _ in range(3)]
        context_parallel_sdpa(*tensors, ring=dist.group.WORLD)
        if rank == 1:
            if how == "dies":
                os._exit(1)
            if how == "hangs":
                time.sleep(12)
            raise ValueError("of its own")
        began = time.monotonic()
        try:
            context_parallel_sdpa(*tensors, ring=dist.group.WORLD).sum().backward()
        except RuntimeError as error:
            return f"{time.monotonic() - began:.0f} s: {error}"
        return "no error"

    first, second, third = run_in(3, work, seconds=8)
    for answer in (first, third):
        assert int(answer.partition(" s")[0]) <= 16, answer
        assert "failed on rank" in answer, answer
    assert second is None if how == "dies" else "of its own" in second


@fresh.alone
def test_what_does_not_fit_is_refused_on_all_processes_and_leaves_the_group_whole() -> None:
    query = torch.randn(1, 4, 6, 8)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    def work(rank: int) -> list[str]:
        ring: dict[str, Any] = {"ring": dist.group.WORLD}
        short, one_head = query[:, :, 1:], query[:, :1]
        others = [dist.new_group([each]) for each in range(2)][1 - rank]
        own_columns = ones(1, 1, 6, 6) if rank else ones(1, 1, 1, 6)
        some, three, uneven = ones(1, 1, 1, 6) if rank else None, (query,) * 3, {**ring, "uneven": True}
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("is_causal needs as many keys as queries", (query, short, short), {**ring, "is_causal": True}),
            ("must hold the columns of all 12 keys, or one row", (query, query, query, ones(1, 1, 6, 6)), ring),
            ("12, 6 or 1 columns here", (query, query, query, ones(1, 1, 1, 5)), ring),
            ("be of one kind on all processes", (*three, own_columns), uneven),
            ("be of one kind on all processes", (*three, some), uneven),
            ("attn_mask must not require a gradient", (query, query, query, torch.zeros(12, requires_grad=True)), ring),
            ("got 3 query and 1 key/value heads", (query[:, :3], one_head, one_head),
             {"ulysses": dist.group.WORLD, "enable_gqa": True}),
            ("must have the same batch and heads", (query, one_head, query), ring),
            ("query must be [B, heads, tokens, head_dim]", (query[0], query[0], query[0]), ring),
            ("must have only this process in common", (query, query, query), {**ring, "ulysses": dist.group.WORLD}),
            ("ring must be a group of this process", (query, query, query), {"ring": others}),
            ("lse", (query, query, query), {**ring, "config": AttentionConfig(route="math")}),
        ]  # fmt: skip
        wrong = []
        for expected, tensors, options in calls:
            try:
                context_parallel_sdpa(*tensors, **options)
            except (ValueError, UnsupportedAttention) as error:
                wrong += [] if expected in str(error) else [f"{expected}: {error}"]
            else:
                wrong.append(f"{expected}: taken")
            context_parallel_sdpa(query, query, query, **ring)  # the group is whole
        return wrong

    answers = run_in(2, work, seconds=8)
    assert answers == [[], []], answers


@fresh.alone
def test_a_computation_that_fails_leaves_the_group_whole() -> None:
    def work(rank: int) -> float:
        tensors = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
        for computed in ("sdpa_with_lse", "sdpa_backward"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel, computed, lambda *args, **kwargs: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    context_parallel_sdpa(*tensors, ring=dist.group.WORLD).sum().backward()
        return differences(rank, "plain", (6, 6), groups_of("ring"))[0]

    assert all(isinstance(answer, float) and answer < 1e-12 for answer in run_in(2, work, seconds=8))


@fresh.alone
def test_a_graph_of_the_gradients_may_be_made_but_not_differentiated() -> None:
    def work(rank: int) -> str:
        query = torch.randn(1, 2, 6, 8, requires_grad=True)
        out = context_parallel_sdpa(query, query, query, ring=dist.group.WORLD)
        (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        with pytest.raises(RuntimeError, match=r"gradients of gradients .* keys of several processes; compute it"):
            grad.sum().backward()
        return "refused"

    assert run_in(2, work) == ["refused", "refused"]
