"""The route ``fused`` on two devices, its kernels emulated on a CPU: the bits of one, and what happens where a kernel
cannot be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import RADEON_VII

from pascal_attn_core import AttentionConfig, record, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.routes import choose

ALONE = AttentionConfig(route="fused")
SHARED = replace(ALONE, devices=("cpu", "cpu"), share_from_tokens=1)
ONE_SM = replace(CARD, num_sms=1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("card", [ONE_SM, replace(RADEON_VII, num_sms=1)], ids=["NVIDIA", "AMD"])
def test_the_bits_are_those_of_one_device(card: DeviceInfo, options: dict, dtype: torch.dtype) -> None:
    groups = 1 if options else 2
    query, key, value = (torch.randn(2, heads, 190, 64).to(dtype) for heads in (3 * groups, 3, 3))
    mask = torch.randn(2, 6, 190, 190).to(dtype) if not options else None
    options = {**options, "enable_gqa": True}
    with emulated_card(info=card):
        expected = sdpa_with_lse(query, key, value, mask, **options, config=ALONE)
        with record() as report:
            found = sdpa_with_lse(query, key, value, mask, **options, config=SHARED)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    ((kind, stats),) = report.calls.items()
    assert kind.route == "several"
    assert "each part by fused" in kind.why
    assert stats.remarks == {}


def test_so_are_those_of_last_rows_with_their_keys_in_ranges() -> None:
    query, key = torch.randn(1, 2, 300, 40).half(), torch.randn(1, 2, 2600, 40).half()
    with emulated_card(info=replace(RADEON_VII, num_sms=2)):
        call = check_call(query, key, key)
        assert choose(call, ALONE).plan.tail is not None
        assert choose(call, SHARED).route == "several"
        expected, found = (sdpa_with_lse(query, key, key, config=c) for c in (ALONE, SHARED))
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_gradients_too() -> None:
    leaves = [torch.randn(1, 4, 150, 64, requires_grad=True) for _ in range(3)]
    with emulated_card(info=ONE_SM):
        found = [
            torch.autograd.grad(sdpa(*leaves, is_causal=True, config=config).square().sum(), leaves)
            for config in (ALONE, SHARED)
        ]
    assert all(map(torch.equal, *found))


def test_a_call_whose_keys_are_cut_stays_on_one_device() -> None:
    query, key = torch.randn(1, 4, 16, 64), torch.randn(1, 4, 2000, 64)
    with emulated_card():
        choice = choose(check_call(query, key, key), SHARED)
    assert (choice.route, choice.plan.splits > 0) == ("fused", True)
    assert choice.why.endswith("; on one device: the fused kernel cuts its keys to fill the device")
