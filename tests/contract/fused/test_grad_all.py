"""All gradients in one kernel of five products, emulated on a CPU, against the definition in float64."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from attn_support.fused.cases import Emulated, backward, forward
from attn_support.fused.emulation import GXX, Deadlock, LeftOut, each_left_out, emulate
from attn_support.fused.packed import each_alone, ends_of
from attn_support.oracle import assert_gradients, assert_gradients_close, cast, gradients, plain_dtype
from attn_support.table import LAYOUTS, MASKS
from torch import Tensor

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.packed import packed_launches
from pascal_attn_core.fused.launch.plan import Packed, Plan, variants_of
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LOWER_RIGHT = {"is_causal": True, "alignment": "lower_right"}
Numbers = list[Tensor | None]


def _inputs(
    dtype: torch.dtype, dim: int, queries: int, keys: int, mask: str = "none", layout: str = "contiguous"
) -> Numbers:
    """Two query heads for each key head, of which there are two; value lies otherwise than key."""
    generator = torch.Generator().manual_seed(queries + keys)

    def numbers(heads: int, tokens: int, layout: str) -> Tensor:
        return LAYOUTS[layout](torch.randn((1, heads, tokens, dim), generator=generator).to(dtype))

    tensors = numbers(4, queries, layout), numbers(2, keys, layout), numbers(2, keys, "contiguous")
    return [*tensors, MASKS[mask]((1, 4, queries, keys), dtype, generator)]


def _forward(inputs: Numbers, options: dict[str, Any]) -> Emulated:
    """The forward pass, with a plan of one kernel for all gradients."""
    result = forward(inputs, options)
    result.plan = result.plan._replace(gradients=(variants_of(result.call).grad_all,))
    return result


def _check(inputs: Numbers, options: dict[str, Any], *, with_lse: bool = False, **how: Any) -> Emulated:
    options = {"enable_gqa": True, **options}
    result = _forward(inputs, options)
    dtype = result.call.query.dtype
    assert_gradients(functools.partial(backward, result, **how), inputs, options, dtype, with_lse=with_lse)
    return result


# Tiles are 64 x 64, with head_dim 128 of 64 keys and 128 queries.
CASES: list[tuple[torch.dtype, int, int, int, str, str, dict[str, Any]]] = [
    (FLOAT32, 64, 66, 128, "none", "sliced", LOWER_RIGHT),
    (FLOAT32, 64, 130, 200, "none", "tokens_first", {"window": (9, -1)}),
    (FLOAT32, 64, 66, 190, "none", "contiguous", {"window": (20, 0)}),
    (FLOAT16, 64, 66, 126, "bool some rows empty", "contiguous", {}),
    (FLOAT32, 64, 66, 190, "bool blocks", "contiguous", {"window": (30, 70)}),
    (BFLOAT16, 64, 130, 66, "float [1, H, L, S]", "contiguous", LOWER_RIGHT),
    (FLOAT32, 64, 66, 126, "float columns first", "sliced", {"scale": -0.7}),
    (FLOAT32, 36, 70, 66, "none", "contiguous", LOWER_RIGHT),
    (FLOAT16, 80, 66, 130, "none", "contiguous", LOWER_RIGHT),
    (FLOAT32, 76, 130, 66, "bool expanded", "contiguous", {}),
    (FLOAT16, 60, 66, 70, "-finfo.max some rows", "contiguous", {}),
    (FLOAT32, 128, 130, 66, "none", "contiguous", {"window": (20, 0)}),
    (FLOAT16, 128, 66, 190, "bool [B, H, L, S]", "contiguous", {"is_causal": True}),
    (FLOAT32, 120, 70, 66, "float [1, H, L, S]", "contiguous", {}),
    (FLOAT32, 40, 66, 130, "none", "contiguous", LOWER_RIGHT),
    (FLOAT16, 124, 66, 70, "bool expanded", "contiguous", {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)).replace("torch.", ""))
def test_gradients_are_those_of_the_definition(case: tuple[Any, ...]) -> None:
    *sizes, rules = case
    _check(_inputs(*sizes), rules, with_lse=sizes[2] == 66)


def test_long_float32_sums_are_moved_on_the_way() -> None:
    result = _check(_inputs(FLOAT32, 40, 1300, 70), {})
    assert result.plan.gradients[0].flush_tiles * result.plan.gradients[0].geometry.cols < 1300


def test_launches_in_parts_add_to_the_same_sums() -> None:
    inputs = _inputs(FLOAT16, 64, 130, 132)

    def cut(launches: Iterable[Launch], **how: Any) -> int:
        pieces = [part for launch in launches for part in parts(launch, 1)]
        tiles.update(part.params.first_tile for part in pieces if part.function == "pa_grad_all")
        return emulate(pieces, **how)

    tiles: set[int] = set()
    _check(inputs, {"is_causal": True}, run=cut)
    assert tiles == {0, 1, 2}


def test_the_order_of_blocks_moves_only_the_last_bits() -> None:
    inputs = _inputs(FLOAT32, 64, 70, 330)
    result, grad_out = _forward(inputs, {"enable_gqa": True}), torch.randn(1, 4, 70, 64)

    def backwards(launches: Iterable[Launch], **how: Any) -> int:
        delta, launch = launches
        return emulate([delta, *reversed(parts(launch, 1))], **how)

    forwards, other = backward(result, grad_out), backward(result, grad_out, run=backwards)
    assert not torch.equal(forwards[0], other[0])
    torch.testing.assert_close(forwards[0], other[0], atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(forwards[1:], other[1:]))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_packed_sequences_get_the_gradients_they_have_alone(dtype: torch.dtype) -> None:
    lengths = [5, 130, 0, 1, 77], [9, 200, 30, 1, 0]
    query, key, value, _ = _inputs(dtype, 64, sum(lengths[0]), sum(lengths[1]))
    rule = {"is_causal": True, "alignment": "lower_right"}
    packed = Packed.of(*map(ends_of, lengths), torch.device("cpu"), lower_right=True)
    call = check_call(query, key, value, enable_gqa=True, is_causal=True, alignment="upper_left")
    plan = Plan(variants_of(call).forward, 0, (variants_of(call).grad_all,), packed)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:-1], torch.nan)
    emulate(packed_launches(forward_launches(call, plan, out, lse), packed))
    grad_out = torch.randn_like(out)
    grads = tuple(torch.full_like(t, torch.nan) for t in (query, key, value))
    launches = backward_launches(call, plan, grad_out, out, lse, None, None, grads)
    emulate(packed_launches(launches, packed))
    wide, narrow = (
        [cast(t, d).requires_grad_() for t in (query, key, value)]
        for d in (torch.float64, plain_dtype(dtype, as_torch=True))
    )
    (oracle, exact_lse), (similar, _) = (each_alone(*some, *lengths, **rule) for some in (wide, narrow))
    answers = [gradients(o, some, grad_out.to(o.dtype)) for o, some in ((oracle, wide), (similar, narrow))]
    assert_gradients_close(list(grads), *answers, exact_lse.detach(), dtype)


# ---- wrong sources must be noticed -----------------------------------------------------------------------------------

WRONG = 1e-2


class _Sample(NamedTuple):
    result: Emulated
    grad_out: Tensor
    expected: list[Tensor]


@functools.cache
def _sample(head_dim: int, queries: int, keys: int) -> _Sample:
    inputs = _inputs(FLOAT32, head_dim, queries, keys)
    wide = [cast(t, torch.float64).requires_grad_() for t in inputs[:3]]
    out, _ = reference_sdpa(*wide, enable_gqa=True, is_causal=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    result = _forward(inputs, {"enable_gqa": True, "is_causal": True})
    return _Sample(result, grad_out, gradients(out, wide, grad_out.double()))


def _error(sample: _Sample, text: str | LeftOut | None) -> float:
    mutated = None if text is None else {"grad_all": text}
    try:
        found = backward(sample.result, sample.grad_out, mutated=mutated)
    except Deadlock:
        return float("inf")
    errors = torch.stack([(a - e).abs().max() for a, e in zip(found, sample.expected, strict=True)])
    return errors.nan_to_num(nan=torch.inf).max().item()


def _worst(text: str | LeftOut | None) -> float:
    """The largest error of calls that between them notice every barrier, or the first that leaves no doubt."""
    worst = 0.0
    for sizes in ((64, 130, 70), (40, 130, 70), (128, 140, 70)):
        worst = max(worst, _error(_sample(*sizes), text))
        if worst > WRONG:
            break
    return worst


def test_a_kernel_without_any_one_barrier_is_wrong() -> None:
    assert _worst(None) < 1e-3
    for mutant, line in each_left_out(
        source("grad_all"), re.finditer(r"__sync(?:threads|warp)\(\);", source("grad_all"))
    ):
        assert _worst(mutant) > WRONG, line


MUTANTS = {
    "keys in the next group's place": ("(((key_group) & 1) << 2)", "(((key_group) & 1) << 3)"),
    "one buffer of K": ("ks = Ks + buffer * PA_VC * PA_D", "ks = Ks + 0 * buffer"),
    "K of the tile's first part only": ("load_moving(ry, y, r0 + PA_VC, keys", "load_moving(ry, y, r0, keys"),
    "keys behind the last one": ("product_queries(dQ, dS, keys, rows,", "product_queries(dQ, dS, keys, rows + 1,"),
    "sums not scaled": ("O[AT_ONCE * g + i][j] * factor", "O[AT_ONCE * g + i][j]"),
    "sums of another warp's rows": ("const int first = t.tid / 32 * (128 / PA_TX)", "const int first = 0"),
    "later sums replace earlier ones": ("atomicAdd(row + c * 32, own[", "row[c * 32] = (own["),
    "one head of a group": ("h < (hk + 1) * p.group; ++h", "h <= hk * p.group; ++h"),
    "sums of one head": ("h * p.sums_h + col0 * p.sums_s;", "hk * p.sums_h + col0 * p.sums_s;"),
    "delta of another sign": ("(dP[i][j] - delta)", "(dP[i][j] + delta)"),
    "dV not complete": ("product_cols(dV, S, grads, cols", "product_cols(dV, S, grads, cols - 1"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_source_is_noticed(name: str) -> None:
    right, wrong = MUTANTS[name]
    text = source("grad_all")
    assert text.count(right) == 1
    assert _worst(text.replace(right, wrong)) > WRONG
