"""The int8 mode against its own documented bound, in the emulation."""

from __future__ import annotations

import pytest
import torch
from attn_support.fused.emulation import GXX, emulate
from attn_support.oracle import exact, int8_bound

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.plan import plan_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.routes import route_names

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
# Normal numbers: what 8 bits of Q and K cost (fp16 attention itself errs by 3e-4).
TYPICAL = 1.5e-2


def _run(inputs: list, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    call = check_call(*inputs, **options)
    out = torch.full(call.out_shape, float("nan"), dtype=call.query.dtype)
    emulate(int8_launches(call, plan_call(call, 1, int8=True), out))
    return out.double(), exact(inputs, options)[0]


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_the_error_stays_below_the_bound_and_is_typically_a_percent(
    head_dim: int, dtype: torch.dtype, mask: str
) -> None:
    query, key, value = (torch.randn(1, h, n, head_dim).to(dtype) for h, n in ((4, 130), (2, 300), (2, 300)))
    masks = {"none": None, "bool": torch.rand(130, 300) < 0.7, "float": torch.randn(130, 300).to(dtype)}
    options = {"enable_gqa": True, "is_causal": mask == "bool"}
    out, oracle = _run([query, key, value, masks[mask]], options)
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    bound = int8_bound(query, *repeated, head_dim**-0.5)
    assert ((out - oracle).abs().amax(dim=-1) <= bound).all()
    print(f"\nint8: relative error {(out - oracle).norm() / oracle.norm():.1e}")
    assert (out - oracle).norm() <= TYPICAL * oracle.norm()


def test_a_common_part_of_all_keys_costs_no_exactness() -> None:
    query, key, value = (torch.randn(1, 1, n, 64) for n in (70, 200, 200))
    out, oracle = _run([query, key + 30 * torch.randn(64), value, None], {})
    assert (out - oracle).norm() <= TYPICAL * oracle.norm()


def test_zero_rows_and_zero_keys_are_no_division_by_zero() -> None:
    query, value = torch.zeros(1, 1, 70, 64), torch.randn(1, 1, 90, 64)
    out, oracle = _run([query, torch.ones(1, 1, 90, 64), value, None], {})
    torch.testing.assert_close(out, oracle, atol=1e-6, rtol=1e-5)


def test_it_is_never_chosen_unasked_and_refuses_what_it_cannot_do() -> None:
    assert "fused-int8" not in route_names()
    assert AttentionConfig(route="fused-int8").route == "fused-int8"
    tensor = torch.zeros(1, 1, 8, 64, requires_grad=True)
    call = check_call(tensor, tensor, tensor, scale=-1.0)
    assert call_reasons(call, int8=True, with_lse=True) == [
        "the int8 mode has no gradients",
        "the int8 mode does not return lse",
        "the int8 mode needs a positive scale, got -1",
    ]
