"""The route ``fused`` through the public functions, its kernels emulated on a CPU, also shared by two devices."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_support.fused.cases import is_split, takes
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD, T4, V100
from attn_support.fused.hip import RADEON_VII
from attn_support.fused.modes import deterministic as poisoned_memory
from attn_support.oracle import assert_attention, assert_gradients, gradients
from attn_support.randomness import some
from attn_support.table import GRADIENT_TABLE, TABLE, Case
from torch import Tensor
from torch.autograd import forward_ad

from pascal_attn_core import AttentionConfig, UnsupportedAttention, record, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.call.flex_rules import block_rule
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.routes import choose

FUSED, INT8 = AttentionConfig(route="fused"), AttentionConfig(route="fused-int8")


@pytest.fixture(autouse=True)
def queued() -> Iterator[list[Launch]]:
    with emulated_card() as kernels:
        yield kernels.queued


# On one multiprocessor few rows alone are a reason to cut the keys into parts: the table takes both kernels.
ONE_SM = replace(CARD, num_sms=1)
TAKEN = [case for case in TABLE if takes(case)]


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("case", some(TAKEN, 11), ids=lambda case: case.name)
def test_every_call_gets_the_answer_of_the_definition(case: Case) -> None:
    inputs, options = case.build()
    with emulated_card(info=ONE_SM) as kernels, poisoned_memory():
        out, lse = sdpa_with_lse(*inputs, **options, config=FUSED)
    assert_attention(out, lse, inputs, options, case.dtype)
    assert kernels.queued


@pytest.mark.parametrize("case", [case for case in TABLE if not takes(case)], ids=lambda case: case.name)
def test_a_call_that_it_does_not_take_is_refused_with_the_reason(case: Case, queued: list[Launch]) -> None:
    inputs, options = case.build()
    reason = re.escape(call_reasons(check_call(*inputs, **options))[0])
    for attend in (sdpa, sdpa_with_lse):
        with pytest.raises(UnsupportedAttention, match=f"route 'fused' cannot take this call.*{reason}"):
            attend(*inputs, **options, config=FUSED)
    assert not queued


def test_the_table_takes_both_kernels() -> None:
    assert min(sum(map(is_split, TAKEN)), sum(not is_split(case) for case in TAKEN)) > 100


@pytest.mark.parametrize("case", some((case for case in GRADIENT_TABLE if takes(case)), 20), ids=lambda case: case.name)
def test_gradients_come_in_the_shapes_of_the_inputs(case: Case) -> None:
    inputs, options = case.build(requires_grad=True)
    if len(inputs) > 3 and inputs[3] is not None:
        inputs[3] = inputs[3].detach()

    def backward(grad_out: Tensor, _: object) -> list[Tensor]:
        with poisoned_memory():
            ours = sdpa_with_lse(*inputs, **options, config=FUSED)
            found = gradients(ours.out, inputs[:3], grad_out, ours.lse)
        assert [grad.shape for grad in found] == [t.shape for t in inputs[:3]]
        return found

    assert_gradients(backward, inputs, options, case.dtype, with_lse=True)


CROSS, SELF = ((2, 2, 1024, 64), (2, 1, 21, 64)), ((1, 2, 530, 64), (1, 2, 570, 64))


@pytest.mark.parametrize(
    ("card", "shapes", "options", "grids"),
    [
        (CARD, CROSS, {}, [(16, 2, 2), (1, 1, 4), (1, 1, 4)]),
        (CARD, ((2, 2, 21, 64), (2, 1, 1024, 64)), {}, [(1, 2, 4), (1, 2, 4), (16, 1, 2)]),
        (T4, CROSS, {}, [(4, 2, 2), (1, 1, 4), (1, 1, 4)]),
        (T4, SELF, {}, [(3, 2, 2), (3, 2, 2)]),
        (T4, SELF, {"is_causal": True}, [(3, 2, 2), (3, 2, 2)]),
        (V100, SELF, {"window": (200, 100), "alignment": "lower_right"}, [(3, 2, 2), (3, 2, 2)]),
    ],
)
def test_gradients_of_few_blocks_are_summed_in_ranges(card: DeviceInfo, shapes, options: dict, grids: list) -> None:
    dtype, options = torch.float32 if card == CARD else torch.float16, {"enable_gqa": True, **options}
    query, key, value = _leaves(shapes[0], (1, *shapes[1][1:]), shapes[1], dtype=dtype)  # the key broadcasts
    inputs = [query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), key, value]
    config = AttentionConfig(route="fused" if card == CARD else "fused-tensor")

    def backward(grad_out: Tensor, _: object) -> list[Tensor]:
        with poisoned_memory():
            once, again = (gradients(sdpa(*inputs, **options, config=config), inputs, grad_out) for _ in range(2))
        assert all(map(torch.equal, once, again))
        return again

    with emulated_card(info=card) as kernels:
        assert_gradients(backward, inputs, options, dtype)
    found = [launch.grid for launch in kernels.queued if "_grad" in launch.function]
    assert found == 2 * grids


def test_tangents_and_gradients_of_gradients_go_on_in_tiles() -> None:
    (leaf,) = _leaves((1, 2, 70, 64))
    tangent, found = torch.randn_like(leaf), []
    for config in (FUSED, AttentionConfig(route="math")):
        out = sdpa(leaf, leaf, leaf, config=config, is_causal=True)
        (plain,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        assert torch.equal(grad, plain)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf.detach(), tangent)
            rate = forward_ad.unpack_dual(sdpa(dual, dual, dual, config=config, is_causal=True)).tangent
        found.append((rate, *torch.autograd.grad((grad * tangent).sum(), leaf)))
    for ours, expected in zip(*found):
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


SHIFTS = torch.tensor([[3, 50, 0, 290], [7, 1, 120, 30]])
BLOCK_MASKS = {
    "window": lambda b, h, i, j: (i - j).abs() <= 40 + h,
    "documents": lambda b, h, i, j: i // (70 + b) == j // (70 + b),
    "of heads": lambda b, h, i, j: i - j >= SHIFTS[b][h],
    "rows without keys": lambda b, h, i, j: (i >= 130) & (j + h < 130),
}


@pytest.mark.parametrize(("route", "dtype"), [("fused", torch.float32), ("fused-tensor", torch.float16)])
@pytest.mark.parametrize(("name", "rows"), some([*((name, 96) for name in BLOCK_MASKS), ("of heads", 300)], 4))
def test_block_masks_in_bands_of_rows(name: str, route: str, dtype: torch.dtype, rows: int) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    blocks = flex.create_block_mask(BLOCK_MASKS[name], 2, 4, 230, 250, device="cpu", BLOCK_SIZE=32)
    inputs = _leaves((2, 4, 230, 32), (2, 2, 250, 32), (2, 2, 250, 32), dtype=dtype)
    mask = flex.create_mask(BLOCK_MASKS[name], 2, 4, 230, 250, device="cpu")
    budget_mib = 2 * rows * 250 * block_rule(blocks, mask.shape).num_masks / 2**20
    options, config = {"enable_gqa": True}, AttentionConfig(route=route, budget_mib=budget_mib)

    def backward(grad_out: Tensor, _: object) -> list[Tensor]:
        with poisoned_memory():
            ours = sdpa_with_lse(*inputs, blocks, **options, config=config)
            assert_attention(ours.out, ours.lse, [*inputs, mask], options, dtype)
            return gradients(ours.out, inputs, grad_out, ours.lse)

    with emulated_card(info=T4 if dtype == torch.float16 else CARD) as kernels:
        assert_gradients(backward, [*inputs, mask], options, dtype, with_lse=True)
    assert {launch.variant.on_tensor_cores for launch in kernels.queued} == {dtype == torch.float16}


@pytest.mark.parametrize("route", ["fused", "fused-tensor"])
def test_a_block_mask_takes_no_more_than_the_budget(route: str) -> None:
    """The bool mask of this call alone would take 2.7 MiB. A row of blocks beyond the budget is not for the kernels."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    blocks = flex.create_block_mask(BLOCK_MASKS["of heads"], 2, 4, 600, 590, device="cpu", BLOCK_SIZE=64)
    inputs = [torch.randn(2, heads, n, 32).half() for heads, n in ((4, 600), (2, 590), (2, 590))]
    config = AttentionConfig(route=route, budget_mib=2.0)
    with emulated_card(info=T4):
        used = measure(lambda *t: sdpa(*t, blocks, enable_gqa=True, config=config), *inputs)
        assert used.extra_bytes <= 2 << 20
        with pytest.raises(UnsupportedAttention, match=r"a row of blocks of its BlockMask takes .* MiB"):
            sdpa(*inputs, blocks, enable_gqa=True, config=replace(config, budget_mib=0.1))


SHARED = replace(FUSED, devices=("cpu", "cpu"), share_from_tokens=1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("card", [ONE_SM, replace(RADEON_VII, num_sms=1)], ids=["NVIDIA", "AMD"])
def test_the_bits_are_those_of_one_device(card: DeviceInfo, options: dict, dtype: torch.dtype) -> None:
    groups = 1 if options else 2
    query, key, value = (torch.randn(2, heads, 190, 64).to(dtype) for heads in (3 * groups, 3, 3))
    mask = torch.randn(2, 6, 190, 190).to(dtype) if not options else None
    options = {**options, "enable_gqa": True}
    with emulated_card(info=card):
        expected = sdpa(query, key, value, mask, **options, config=FUSED)
        with record() as report:
            found = sdpa(query, key, value, mask, **options, config=SHARED)
    assert torch.equal(found, expected)
    ((kind, stats),) = report.calls.items()
    assert kind.route == "several"
    assert "each part by fused" in kind.why
    assert stats.remarks == {}


def test_a_call_whose_keys_are_cut_stays_on_one_device() -> None:
    query, key = torch.randn(1, 4, 16, 64), torch.randn(1, 4, 2000, 64)
    with emulated_card():
        choice = choose(check_call(query, key, key), SHARED)
    assert (choice.route, choice.plan.splits > 0) == ("fused", True)
    assert choice.why.endswith("; on one device: the fused kernel cuts its keys to fill the device")
