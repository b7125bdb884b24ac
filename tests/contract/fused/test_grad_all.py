"""All gradients in one kernel of five products, emulated on a CPU, against the definition in float64."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, Emulated, at_once, backward, check_gradients, forward, sized
from attn_support.fused.emulation import RACES, Deadlock, LeftOut, Race, each_left_out, emulate
from attn_support.fused.packed import definitions, ends_of
from attn_support.oracle import assert_gradients_close, gradients
from attn_support.randomness import some
from attn_support.table import Case

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.backward import backward_launches
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.packed import packed_launches
from pascal_attn_core.fused.launch.plan import Packed, Plan, variant_of
from pascal_attn_core.fused.trust.kernels import parts

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def _check(case: Case, **how: Any) -> Emulated:
    result = at_once(forward(*case.build()))
    check_gradients(result, case, **how)
    return result


# Tiles are 64 x 64, with head_dim 128 of 64 keys and 128 queries.
CASES = [
    sized(FLOAT32, 64, 66, 128, layout="sliced", **LOWER_RIGHT),
    sized(FLOAT32, 64, 130, 200, layout="tokens_first", window=(9, -1)),
    sized(FLOAT32, 64, 66, 190, window=(20, 0)),
    sized(FLOAT16, 64, 66, 126, "bool some rows empty"),
    sized(FLOAT32, 64, 66, 190, "bool blocks", window=(30, 70)),
    sized(BFLOAT16, 64, 130, 66, "float [1, H, L, S]", **LOWER_RIGHT),
    sized(FLOAT32, 64, 66, 126, "float columns first", "sliced", scale=-0.7),
    sized(FLOAT32, 36, 70, 66, **LOWER_RIGHT),
    sized(FLOAT16, 80, 66, 130, **LOWER_RIGHT),
    sized(FLOAT32, 76, 130, 66, "bool expanded", dim_v=60),
    sized(FLOAT16, 60, 66, 70, "-finfo.max some rows"),
    sized(FLOAT32, 128, 130, 66, window=(20, 0)),
    sized(FLOAT16, 128, 66, 190, "bool [B, H, L, S]", is_causal=True),
    sized(FLOAT32, 120, 70, 66, "float [1, H, L, S]"),
    sized(FLOAT32, 40, 66, 130, **LOWER_RIGHT),
    sized(FLOAT16, 124, 66, 70, "bool expanded"),
]


@pytest.mark.parametrize("case", some(CASES, 2), ids=lambda case: case.name)
def test_gradients_are_those_of_the_definition(case: Case) -> None:
    _check(case, with_lse=case.query[-2] == 66)


def test_long_float32_sums_are_moved_on_the_way() -> None:
    result = _check(sized(FLOAT32, 40, 1300, 70))
    assert result.plan.gradients[0].flush_tiles * result.plan.gradients[0].geometry.cols < 1300


def test_launches_in_parts_add_to_the_same_sums() -> None:
    def cut(launches: Iterable[Launch], **how: Any) -> int:
        pieces = [part for launch in launches for part in parts(launch, 1)]
        tiles.update(part.params.first_tile for part in pieces if part.function == "pa_grad_all")
        return emulate(pieces, **how)

    tiles: set[int] = set()
    _check(sized(FLOAT16, 64, 130, 132, is_causal=True), run=cut)
    assert tiles == {0, 1, 2}


def test_the_order_of_blocks_changes_no_bit() -> None:
    result, grad_out = at_once(forward(*sized(FLOAT32, 64, 70, 330).build())), torch.randn(1, 4, 70, 64)

    def backwards(launches: Iterable[Launch], **how: Any) -> int:
        delta, launch = launches
        return emulate([delta, *reversed(parts(launch, 1))], seed=2)

    forwards, other = backward(result, grad_out), backward(result, grad_out, run=backwards)
    assert all(torch.equal(a, b) for a, b in zip(forwards, other))


# What hands the sums of a tile of queries on from one block to the next.
_HANDS_ON = re.compile(
    r"(?<=    )__threadfence\(\);|(?:if \(t\.tid == 0\) )?(?:wait_for|pass)_turn\(turn_of[^;]*;"
    r"|__syncthreads\(\);(?=  // its (?:turn has come|sums are there))"
)


@functools.cache
def _with_an_empty_tile() -> tuple[Emulated, torch.Tensor]:
    """Return a call of three tiles of keys whose first query tile does not see the second one."""
    query, key, value = (torch.randn(1, 1, n, 64) for n in (70, 192, 192))
    mask = torch.ones(70, 192, dtype=torch.bool)
    mask[:64, 64:128] = False
    return at_once(forward([query, key, value, mask], {})), torch.randn(1, 1, 70, 64)


def _is_noticed(text: str | LeftOut, seeds: Iterable[int]) -> bool:
    result, grad_out = _with_an_empty_tile()
    try:
        for seed in seeds:
            how = {"seed": seed, "mutated": {"grad_all": text}, "flags": RACES}
            backward(result, grad_out, run=lambda launches, how=how: emulate(launches, **how))
    except (Race, Deadlock):
        return True
    return False


def test_blocks_add_one_after_the_other_and_none_waits_for_ever() -> None:
    """By PTX's memory model, whatever has happened here."""
    text = source("grad_all").replace("volatile T*", "T*")  # those of results are no counters
    assert not _is_noticed(text, range(3))
    mutants = list(each_left_out(text, _HANDS_ON.finditer(text)))
    assert len(mutants) == 8
    for mutant, line in mutants:
        assert _is_noticed(mutant, range(1, 17)), line


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_packed_sequences_get_the_gradients_they_have_alone(dtype: torch.dtype) -> None:
    lengths = [5, 130, 0, 1, 77], [9, 200, 30, 1, 0]
    query, key, value, _ = sized(dtype, 64, sum(lengths[0]), sum(lengths[1])).build()[0]
    packed = Packed.of(*map(ends_of, lengths), torch.device("cpu"), lower_right=True)
    call = check_call(query, key, value, enable_gqa=True, is_causal=True, alignment="upper_left")
    plan = Plan(variant_of(call, "forward"), 0, (variant_of(call, "grad_all"),), packed)
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:-1], torch.nan)
    emulate(packed_launches(forward_launches(call, plan, out, lse), packed))
    grad_out = torch.randn_like(out)
    grads = tuple(torch.full_like(t, torch.nan) for t in (query, key, value))
    launches = backward_launches(call, plan, grad_out, out, lse, None, None, grads)
    emulate(packed_launches(launches, packed))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    (wide, (oracle, exact_lse)), _, (narrow, (similar, _)) = definitions(leaves, lengths, dtype, **LOWER_RIGHT)
    answers = [gradients(o, some, grad_out.to(o.dtype)) for o, some in ((oracle, wide), (similar, narrow))]
    assert_gradients_close(list(grads), *answers, exact_lse.detach(), dtype)
