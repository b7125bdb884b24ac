"""Kernels of head_dim 64 and 128, lengths beside a tile's edge, and offsets beyond 2^31 elements."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, backward, check_forward, check_gradients, forward, sized
from attn_support.fused.emulation import emulate
from attn_support.fused.far import address_space
from attn_support.oracle import exact
from attn_support.table import Case
from torch import Tensor

from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.fields import MOST_STRIDE
from pascal_attn_core.fused.launch.forward import forward_launches
from pascal_attn_core.fused.launch.plan import plan_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.reference import reference_sdpa

FLOAT32, FLOAT16 = torch.float32, torch.float16


def _case(dtype: torch.dtype, dim: int, queries: int, keys: int, *how: str, **options: Any) -> Case:
    """Two query heads for each key head, of which there are two, or two batch elements with one."""
    batch, heads = (2, (2, 1)) if keys % 4 == 0 else (1, (4, 2))
    return sized(dtype, dim, queries, keys, *how, batch=batch, heads=heads, **options)


# 66 = 64 + 2 queries; 62 keys before a tile's edge; tiles are 128 x 64, 64 x 128 and 64 x 64.
CASES = [
    _case(FLOAT32, 64, 66, 200, "none", "tokens_first", window=(9, -1)),
    _case(FLOAT32, 64, 66, 128, dim_v=48, **LOWER_RIGHT),
    _case(FLOAT32, 64, 130, 190, "none", "sliced", is_causal=True, window=(20, 0)),
    _case(FLOAT32, 64, 66, 190, "bool some rows empty", "expanded"),
    _case(FLOAT32, 64, 66, 190, "bool [B, 1, 1, S]", "every_second_token", **LOWER_RIGHT),
    _case(FLOAT32, 64, 66, 190, "bool blocks", window=(30, 70)),
    _case(FLOAT32, 64, 66, 128, "float [1, H, L, S]", **LOWER_RIGHT),
    _case(FLOAT32, 64, 66, 126, "-finfo.max some rows"),
    _case(FLOAT32, 64, 66, 126, "float columns first", "sliced", scale=-0.7),
    _case(FLOAT16, 64, 66, 128, **LOWER_RIGHT),
    _case(FLOAT32, 128, 66, 200, "none", "sliced", window=(9, -1)),
    _case(FLOAT32, 128, 66, 254, **LOWER_RIGHT),
    _case(FLOAT16, 128, 66, 190, "none", "tokens_first", window=(-1, 3), alignment="lower_right"),
    _case(FLOAT16, 128, 66, 190, "bool [B, H, L, S]", dim_v=96, is_causal=True),
    _case(FLOAT16, 128, 66, 254, "bool expanded", window=(62, 62)),
    _case(FLOAT16, 128, 66, 130, "bool nothing allowed"),
]
FEW_QUERIES = [_case(FLOAT32, 64, 3, 330, "none", "sliced", **LOWER_RIGHT), _case(FLOAT16, 128, 9, 398)]


@pytest.mark.parametrize("case", CASES + FEW_QUERIES, ids=lambda case: case.name)
def test_shipped_tiles_give_the_answer_of_the_definition(case: Case) -> None:
    variant = check_forward(case, parts=case in FEW_QUERIES).plan.forward
    assert (variant.kind == "split") == (case in FEW_QUERIES)
    assert (variant.head_dim, variant.padded) == (case.query[-1], case.query[-1] != case.value[-1])


@pytest.mark.parametrize(
    "case",
    [
        _case(FLOAT32, 64, 66, 128, "none", "sliced", **LOWER_RIGHT),
        _case(FLOAT32, 64, 66, 200, window=(9, -1)),
        _case(FLOAT32, 128, 66, 190, window=(20, 0)),
        _case(FLOAT16, 64, 66, 126, "bool some rows empty"),
    ],
    ids=lambda case: case.name,
)
def test_their_gradients_are_those_of_the_definition(case: Case) -> None:
    result = forward(*case.build())
    assert not result.plan.gradients[0].padded
    for with_lse in (False, True):
        check_gradients(result, case, with_lse=with_lse)


def _check(inputs: list[Tensor | None]) -> None:
    small = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in inputs]
    result, expected = forward(inputs, {}), exact(small, {})[0]
    torch.testing.assert_close(result.out.double(), expected, atol=2e-3, rtol=2e-3)


def test_batch_elements_may_lie_far_apart() -> None:
    far = 1 << 32
    memory = address_space(far + (1 << 16), FLOAT16)
    inputs = [memory.as_strided((2, 1, 70, 64), (far, 64, 64, 1), first) for first in (0, 8192, 16384)]
    for t in inputs:
        t.copy_(torch.randn(t.shape))
    _check([*inputs, None])


def test_tokens_may_lie_far_apart() -> None:
    step = MOST_STRIDE - 64
    memory = address_space(129 * step, FLOAT16)
    key = memory.as_strided((1, 1, 129, 64), (0, 0, step, 1))
    key.copy_(torch.randn(key.shape))
    _check([torch.randn(1, 1, 8, 64).half(), key, key, None])


@pytest.mark.parametrize("is_row", [False, True])
def test_a_masks_elements_may_lie_far_apart(is_row: bool) -> None:
    step = (1 << 25) - 64
    memory = address_space(129 * step, torch.bool)
    mask = memory.as_strided((128, 9), (step, 1)) if is_row else memory.as_strided((9, 128), (1, step))
    mask.copy_(torch.rand(mask.shape) < 0.7)
    query, key = (torch.randn(1, 1, n, 128).half() for n in mask.shape)
    assert not call_reasons(check_call(query, key, key, mask))
    _check([query, key, key, mask])
    result = forward([query, key, key, mask], {})
    grad_out = torch.randn(query.shape).half()
    near = forward([query, key, key, mask.contiguous()], {})
    assert all(torch.equal(a, b) for a, b in zip(backward(result, grad_out), backward(near, grad_out)))


@pytest.mark.parametrize("step", [1 << 25, 1 << 32])
def test_a_masks_elements_that_lie_too_far_apart_are_refused(step: int) -> None:
    memory = address_space(9 * step, torch.bool)
    query = torch.randn(1, 1, 9, 64)
    for strides in ((step, 1), (1, step)):
        reasons = call_reasons(check_call(query, query, query, memory.as_strided((9, 9), strides)))
        assert reasons == ["the strides of attn_mask are too large"]
    for shape in ((9, 1), (1, 9)):  # a stride that nothing steps by
        mask = memory.as_strided(shape, (step, 1) if shape[0] == 1 else (1, step))
        assert call_reasons(check_call(query, query, query, mask)) == []


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "causal"])
def test_long_launches_in_parts_give_the_same_bits(options: dict[str, Any]) -> None:
    """A launch that would take too long is cut along its tiles and its batch elements: here into single ones."""
    inputs, _ = _case(FLOAT32, 64, 270, 132).build()
    options = {"enable_gqa": True, **options}

    def cut(launches: Iterable[Launch], **how: Any) -> int:
        pieces = [part for launch in launches for part in parts(launch, 1)]
        tiles.update(part.params.first_tile for part in pieces if hasattr(part.params, "first_tile"))
        return emulate(reversed(pieces) if len({part.function for part in pieces}) == 1 else pieces, **how)

    tiles: set[int] = set()
    whole, pieces = forward(inputs, options), forward(inputs, options, run=cut)
    assert torch.equal(whole.out, pieces.out)
    assert torch.equal(whole.lse, pieces.lse)
    assert tiles == {0, 1, 2}
    grad_out = torch.randn_like(whole.out)
    for mine, other in zip(backward(whole, grad_out), backward(whole, grad_out, run=cut)):
        assert torch.equal(mine, other)
    assert tiles == {0, 1, 2, 3, 4}


def test_parts_may_have_many_rows() -> None:
    """One block of a call with 2^31 - 1 batch elements, which share their numbers."""
    batches, dim = (1 << 31) - 1, 4
    query, key = torch.randn(1, 1, 1, dim), torch.randn(1, 1, 300, dim)
    call = check_call(query, key, key)
    plan = plan_call(call, 1000)
    assert plan.splits > 1
    (launch, _) = forward_launches(call, plan, torch.empty_like(query))
    rows = plan.splits * batches
    out, largest, sums = (address_space(rows * n, FLOAT32) for n in (dim, 1, 1))
    params = launch.params
    params.part_out, params.part_max, params.part_sums = (t.data_ptr() for t in (out, largest, sums))
    params.batches, params.first_batch = batches, 7
    emulate([launch])
    at = [split * batches + 7 for split in range(plan.splits)]
    log_sums = largest[at] * torch.log(torch.tensor(2.0)) + sums[at].log()
    weights = (log_sums - log_sums.logsumexp(0)).exp() / sums[at]
    found = (weights[:, None] * torch.stack([out[i * dim : (i + 1) * dim] for i in at])).sum(0)
    torch.testing.assert_close(found, reference_sdpa(query, key, key)[0].view(dim), atol=1e-5, rtol=1e-5)
