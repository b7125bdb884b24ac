"""The fused kernels on a CPU: kernels that the calls of the table in ``test_route`` would not take.

Threads run in random order, shared memory and every output start as NaN, and a barrier that some threads never reach
is an error.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, backward, check_forward, forward, is_split, sized, takes
from attn_support.fused.emulation import emulate
from attn_support.oracle import assert_attention, exact, plain
from attn_support.randomness import some
from attn_support.table import TABLE, Case

from pascal_attn_core.fused.code.source import HEAD_DIMS
from pascal_attn_core.fused.launch.plan import table_dim

WHOLE = [case for case in TABLE if takes(case) and not is_split(case)]


@pytest.mark.parametrize("case", some(WHOLE, 11), ids=lambda case: case.name)
def test_keys_in_parts_give_the_same_answer(case: Case) -> None:
    case = replace(case, key=(*case.key[:-2], 300, case.key[-1]), value=(*case.value[:-2], 300, case.value[-1]))
    check_forward(case, parts=True)


# float16 and bfloat16 have the same geometry.
_NARROW = itertools.cycle((torch.float16, torch.bfloat16))
_WIDTHS = (*HEAD_DIMS, 36, 52, 100, 300)
_PAIRS = [(d, t) for d in _WIDTHS for t in (torch.float32, next(_NARROW))]


@pytest.mark.parametrize(("head_dim", "dtype"), some(_PAIRS, 9))
def test_every_head_dim_has_a_kernel(head_dim: int, dtype: torch.dtype) -> None:
    check_forward(sized(dtype, head_dim, 131, 140, heads=(2, 1), is_causal=True))


# One that adds nothing, one like the scores, one larger than all of them, one smaller.
SINKS = torch.tensor([-torch.inf, 0.5, 40.0, -3.0])
BOTH: dict[str, Any] = {"softcap": 3.0, "sinks": SINKS}
EMPTY = "bool some rows empty"
CAPPED = [
    (torch.float32, (64, 70, 200), "none", BOTH),
    (torch.float32, (64, 70, 200), "none", {"softcap": 5.0}),
    (torch.float32, (64, 70, 1200), "none", {"sinks": SINKS}),
    (torch.float32, (64, 70, 200), EMPTY, BOTH),
    (torch.float32, (60, 70, 130), "float [1, H, L, S]", BOTH),
    (torch.float16, (128, 70, 200), EMPTY, BOTH),
    (torch.bfloat16, (40, 70, 200), "none", {"softcap": 20.0, "scale": -0.3}),
    # The keys of few queries are cut into parts, and the sink is one of them.
    (torch.float32, (64, 3, 330), "none", BOTH),
    (torch.float16, (128, 3, 330), "-inf some rows empty", BOTH),
    (torch.float32, (64, 5, 90), EMPTY, BOTH),
]
# On AMD's cards pairs of float16 first, in tiles and in parts.
_ON_AMD = [(arch, dtype, (dim, *sizes), *how) for dtype, (dim, *_), *how in some([CAPPED[5], *CAPPED[:7:3]], 2)
           for arch in ("gfx906", "gfx1010") for sizes in ((70, 200), (3, 330))]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes", "mask", "how"), [*(("", *case) for case in some(CAPPED, 2)), *some(_ON_AMD, 2)]
)
def test_scores_have_a_cap_and_rows_a_sink(
    arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], mask: str, how: dict[str, Any]
) -> None:
    parts = sizes[1] < 70
    result = check_forward(sized(dtype, *sizes, mask, **LOWER_RIGHT, **how), arch=arch, parts=parts)
    assert result.plan.forward.kind == ("capped_split" if parts else "capped")


@pytest.mark.parametrize(
    ("head_dim", "keys", "masked", "bound"), [(128, 16384, False, 8e-7), (512, 4096, True, 1.1e-6)]
)
def test_long_float32_sums_are_as_exact_as_plain_attention(
    head_dim: int, keys: int, masked: bool, bound: float
) -> None:
    """A single float32 sum over the keys errs by 2.4e-6 and 1.4e-6 here."""
    query, key, value = (torch.randn(1, 1, n, head_dim) for n in (64, keys, keys))
    mask = torch.ones(keys, dtype=torch.bool) if masked else None
    result = forward([query, key, value, mask], {})
    oracle = exact([query, key, value, mask], {})[0]
    by_torch = plain([query, key, value, mask], {}, torch.float32)[0]
    error, of_plain = ((out.double() - oracle).norm() / oracle.norm() for out in (result.out, by_torch))
    print(f"\n{keys:,} keys, float32: relative error {error:.1e}, plain attention {of_plain:.1e}")
    assert error < bound


# Geometries with 8 and 16 lanes along a row, 4 and 8 rows of a thread, and columns that are no whole float4.
_FLUSHED = [(64, None), (40, None), (128, None), (512, None), (64, "float"), (80, "bool"), (52, None)]


@pytest.mark.parametrize(
    ("head_dim", "mask_kind", "arch"), [*((*how, "") for how in _FLUSHED), (64, None, "gfx906"), (64, None, "gfx1030")]
)
def test_flushed_sums_keep_up_with_the_maximum_of_their_row(head_dim: int, mask_kind: str | None, arch: str) -> None:
    """The maximum of each row rises after each flush, and some rows have their first key after the first one."""
    query, key, value = (torch.randn(1, 1, n, head_dim) for n in (70, 1300, 1300))
    query *= torch.linspace(0.2, 2.0, 70)[torch.randperm(70)][:, None]
    key *= (torch.arange(1300) // 512 + 1.0)[:, None]
    mask = None
    if mask_kind:
        mask = torch.ones(70, 1300, dtype=torch.bool)
        mask[::3, :600] = False
        mask[5] = False
    if mask_kind == "float":
        mask = torch.randn(70, 1300).masked_fill_(~mask, -torch.inf)
    inputs = [query, key, value, mask]
    result = forward(inputs, {}, arch=arch)
    assert result.plan.forward.flush_tiles
    assert_attention(result.out, result.lse, inputs, {}, torch.float32)


def test_a_masked_key_cannot_move_a_bit() -> None:
    query, key, value = (torch.randn(1, 2, n, 64) for n in (70, 200, 200))
    mask = torch.rand(70, 200) < 0.6
    mask[:, 7::9] = False
    poisoned_key, poisoned_value = key.clone(), value.clone()
    poisoned_key[:, :, 7::9] = 1e15
    poisoned_value[:, :, 7::9] = 1e30
    clean = forward([query, key, value, mask], {}).out
    assert torch.equal(clean, forward([query, poisoned_key, poisoned_value, mask], {}).out)


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
def test_tiles_that_a_mask_forbids_are_skipped(mask_kind: str) -> None:
    query, key, value = (torch.randn(1, 1, n, 64) for n in (128, 1024, 1024))
    barriers: list[int] = []
    for allowed in (slice(300, 420), slice(None)):
        mask = torch.zeros(128, 1024, dtype=torch.bool)
        mask[:, allowed] = True
        bias = mask if mask_kind == "bool" else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        forward([query, key, value, bias], {}, run=lambda launches: barriers.append(emulate(launches)) or 0)
    assert barriers[0] < 0.4 * barriers[1]


def test_gradients_are_the_same_bits_every_time() -> None:
    query, key, value = (torch.randn(1, h, 200, 64) for h in (4, 2, 2))
    result = forward([query, key, value, None], {"enable_gqa": True})
    grad_out = torch.randn_like(query)
    assert all(map(torch.equal, *(backward(result, grad_out, seed=seed) for seed in (1, 2))))


def test_every_head_dim_up_to_the_last_has_a_place_in_the_table() -> None:
    assert [table_dim(d, 1) for d in (1, 33, 129, 512)] == [32, 40, 160, 512]
    assert table_dim(513, 1) is None
