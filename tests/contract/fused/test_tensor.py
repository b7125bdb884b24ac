"""The route ``fused-tensor`` through the public functions, its kernels emulated on a CPU: on a T4 and on a V100."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, sized
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD, T4, V100
from attn_support.fused.hip import RX_6800, RX_7600, RX_9070
from attn_support.fused.modes import deterministic as poisoned_memory
from attn_support.fused.packed import each_alone, ends_of
from attn_support.oracle import assert_close, assert_gradients, exact, gradients, plain
from attn_support.randomness import some
from attn_support.table import TABLE, Case
from torch import Tensor

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa, sdpa_backward, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.fused.launch import plan
from pascal_attn_core.fused.launch.select import tensor_reasons
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes.timing import Times

TENSOR = AttentionConfig(route="fused-tensor")


_HALVES = [replace(case, dtype=torch.float16) for case in TABLE if case.dtype not in (torch.bfloat16, torch.float64)]
_BUILT = [(case, *case.build()) for case in _HALVES]
TAKEN = [case for case, tensors, how in _BUILT if not tensor_reasons(check_call(*tensors, **how), T4.capability)]


def _with_rounded_probs(inputs: list[Tensor | None], options: dict[str, Any]) -> Tensor:
    """The output of plain attention in float32 whose probabilities, of which the largest of a row is 1, are rounded to
    the dtype of the values before they meet them: what torch's fused kernels do with float16 and bfloat16."""
    query, key, value, mask = inputs
    assert key is not None
    assert value is not None
    one_by_one = torch.eye(key.shape[-2]).expand(*value.shape[:-1], key.shape[-2])
    probs = plain([query, key, one_by_one, mask], options, torch.float32)[0]
    largest = probs.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    wide = value.float()
    if wide.dim() > 2:
        wide = wide.repeat_interleave(probs.shape[-3] // wide.shape[-3], -3)
    return ((probs / largest).to(value.dtype).float() @ wide) * largest


def _check(inputs: list[Tensor | None], options: dict[str, Any]) -> None:
    with poisoned_memory():
        out, lse = sdpa_with_lse(*inputs, **options, config=TENSOR)  # type: ignore[arg-type]
    oracle, oracle_lse = exact(inputs, options)
    similar_lse = plain(inputs, options, torch.float32)[1]
    assert_close(out, oracle, _with_rounded_probs(inputs, options), "out", dtype=out.dtype)
    assert_close(lse, oracle_lse, similar_lse, "lse", dtype=out.dtype)


_CALLS = [(case, is_full) for is_full, every in ((False, 60), (True, 90)) for case in some(TAKEN, every)]


@pytest.mark.parametrize(("case", "is_full"), _CALLS, ids=lambda value: getattr(value, "name", value))
def test_every_call_gets_the_answer_of_the_definition(case: Case, is_full: bool, card: DeviceInfo) -> None:
    """On one multiprocessor there is nothing to be won by small tiles, unless most of a large one would be empty."""
    with emulated_card(info=replace(card, num_sms=1) if is_full else card) as kernels:
        _check(*case.build())
    assert {launch.variant.on_tensor_cores for launch in kernels.queued} == {True}


# Two query heads share a key head. Tiles are of 256, 128 or 64 rows and 32 or 64 keys.
_case = functools.partial(sized, torch.float16, heads=(2, 1))
SIZES = [
    _case(64, 500, 200, **LOWER_RIGHT),
    _case(64, 250, 190, "bool blocks", window=(30, 70)),
    _case(64, 200, 2300, "bool some rows empty", window=(400, 300)),  # more than 32 tiles of keys
    _case(64, 200, 126, "float columns first", scale=-0.7),
    _case(64, 200, 190, "bool expanded", softcap=3.0),
    _case(128, 250, 254, **LOWER_RIGHT),
    _case(128, 200, 190, "bool [B, H, L, S]", is_causal=True),
    _case(128, 200, 1100, "bool [B, 1, 1, S]", window=(-1, 62)),
    _case(128, 200, 190, "-finfo.max some rows", dim_v=64),
    _case(128, 66, 130, "bool nothing allowed"),
    _case(96, 200, 140, "float [1, H, L, S]", **LOWER_RIGHT),
    _case(80, 200, 140, "bool [1, 1, L, 1]"),
    _case(40, 200, 140, window=(9, -1)),
    _case(32, 200, 140, "float32 mask", softcap=20.0),
    _case(48, 200, 140, dim_v=80, softcap=20.0, scale=-0.2),
    _case(100, 70, 70, "bool padding on the left"),
    _case(4, 70, 70, dim_v=12, **LOWER_RIGHT),
]


@pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "small"])
@pytest.mark.parametrize("case", some(SIZES, 13), ids=lambda case: case.name)
def test_every_geometry_is_right(case: Case, is_wide: bool, card: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are small on a card of many multiprocessors."""
    if is_wide:
        monkeypatch.setattr(plan, "_SMALL_SPEED", 1e-3)
    with emulated_card(info=replace(card, num_sms=1 if is_wide else 1000)) as kernels:
        _check(*case.build())
    kinds = {launch.variant.is_small for launch in kernels.queued}
    if is_wide or (case.query[-2] >= 200 and case.query[-1] == 64):
        assert kinds == {not is_wide}


@pytest.mark.parametrize("info", [RX_7600, RX_9070], ids=lambda info: info.arch)
@pytest.mark.parametrize("case", some([case for case in SIZES if case.query[-1] != 40], 10), ids=lambda case: case.name)
def test_bfloat16_on_amds_matrix_units(case: Case, info: DeviceInfo) -> None:
    """gfx12 has other fragments than gfx11."""
    with emulated_card(info=replace(info, num_sms=1)) as kernels:
        _check(*replace(case, dtype=torch.bfloat16).build())
    assert {(v.kind.partition("_")[0], v.dtype) for v in (x.variant for x in kernels.queued)} == {("wmma", "bfloat16")}


@pytest.mark.parametrize(
    ("mask", "softcap"), some([("float [L, S]", 5.0), ("none", 5.0), ("none", None), ("float [L, S]", None)], 4)
)
def test_sinks_are_one_more_key_without_a_value(card: DeviceInfo, mask: str, softcap: float | None) -> None:
    # that of the third head is larger than any score, the first takes no part
    sinks = torch.tensor([-torch.inf, 0.5, 40.0, -3.0])
    inputs, options = sized(torch.float16, 64, 70, 2000, mask, softcap=softcap, sinks=sinks).build()
    for num_sms in (1, 1000):
        with emulated_card(info=replace(card, num_sms=num_sms)) as kernels:
            out, lse = sdpa_with_lse(*inputs, **options, config=TENSOR)  # type: ignore[arg-type]
        oracle, oracle_lse = exact(inputs, options)
        torch.testing.assert_close(out.double(), oracle, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse.double(), oracle_lse, atol=1e-5, rtol=1e-5)
        assert any("combine" in launch.function for launch in kernels.queued) == (num_sms > 1)


def test_the_error_is_that_of_rounding_the_probabilities(card: DeviceInfo) -> None:
    """As of torch's fused kernels for float16, whose sums are float32 too."""
    for gain in (1.0, 3.0, 10.0):
        torch.manual_seed(3)
        query, key, value = (torch.randn(1, 2, n, 64).half() for n in (150, 700, 700))
        inputs = [query * gain, key, value, None]
        with emulated_card(info=card):
            out = sdpa(*inputs, config=TENSOR)  # type: ignore[arg-type]
        oracle = exact(inputs, {})[0]
        of_rounding = _with_rounded_probs(inputs, {}).half()
        ours, theirs = ((o.double() - oracle).norm() / oracle.norm() for o in (out, of_rounding))
        assert ours <= 1.02 * theirs, gain


@pytest.mark.parametrize(
    ("strides", "is_padded"),
    [((5600, 2800, 68, 1, 4), True), ((5760, 2880, 72, 1, 8), False), ((0, 2560, 8, 1, 0), False)],
    ids=["8 bytes", "16 bytes", "rows that overlap and a batch that repeats"],
)
def test_rows_are_read_as_they_lie(card: DeviceInfo, strides: tuple[int, ...], is_padded: bool) -> None:
    """Rows that begin at multiples of 8 bytes take the kernel that reads so many at a time."""
    *steps, first = strides
    numbers = torch.randn(3, 20000).half()
    inputs = [
        some.as_strided((3, 2, n, 64), steps, some.storage_offset() + first) for some, n in zip(numbers, (37, 40, 40))
    ]
    with emulated_card(info=card) as kernels:
        out = sdpa(*inputs, config=TENSOR)
        plain_out = sdpa(*(t.contiguous() for t in inputs), config=TENSOR)
    assert [launch.variant.padded for launch in kernels.queued] == [is_padded, False]
    assert torch.equal(out, plain_out)


def test_masked_keys_cannot_move_a_bit_and_tiles_that_a_mask_forbids_are_not_read(card: DeviceInfo) -> None:
    query, key = (torch.randn(1, 1, n, 64).half() for n in (256, 1024))
    mask = torch.zeros(256, 1024, dtype=torch.bool)
    mask[:, 300:420] = torch.rand(256, 120) < 0.6
    mask[:, 307:420:9] = False
    poisoned = key.clone()
    poisoned[:, :, 307:420:9] = 6e4
    poisoned[:, :, :256] = poisoned[:, :, 448:] = float("nan")
    with emulated_card(info=replace(card, num_sms=1)):
        clean = sdpa(query, key, key, mask, config=TENSOR)
        assert torch.equal(clean, sdpa(query, poisoned, poisoned, mask, config=TENSOR))


def test_small_tiles_meet_no_keys_beyond_their_diagonal(card: DeviceInfo) -> None:
    """A forbidden key's probability is zero, but zero times NaN is none: tiles beyond are not multiplied at all."""
    query, key, value = (torch.randn(1, 1, 256, 64).half() for _ in range(3))
    poisoned = value.clone()
    poisoned[:, :, 64:] = float("nan")
    with emulated_card(info=replace(card, num_sms=1000)) as kernels:
        clean = sdpa(query, key, value, is_causal=True, config=TENSOR)
        out = sdpa(query, key, poisoned, is_causal=True, config=TENSOR)
    assert {launch.variant.is_small for launch in kernels.queued} == {True}
    assert torch.equal(out[:, :, :64], clean[:, :, :64])
    assert out[:, :, 64:].isnan().all()


def test_gradients_are_those_of_the_definition(card: DeviceInfo) -> None:
    inputs, options = sized(torch.float16, 64, 70, 70, is_causal=True).build(requires_grad=True)
    with emulated_card(info=card) as kernels:
        out = sdpa(*inputs, **options, config=TENSOR)
        assert_gradients(lambda grad_out, _: gradients(out, inputs[:3], grad_out), inputs, options, torch.float16)
    backward = [launch for launch in kernels.queued if launch.variant.is_gradient]
    assert {launch.variant.on_tensor_cores for launch in backward} == {card.kind == "cuda"}


def _assert_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, one, other in zip(("query", "key", "value", "sinks"), found, expected):
        error = (one - other).abs().max() / other.abs().max()
        assert error < 4e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("mask", some(["bool blocks", "none", "float [L, S]"], 3))
def test_parts_of_the_keys_give_their_parts_of_the_gradients(card: DeviceInfo, mask: str) -> None:
    """As ring attention does it, from the results of all keys."""
    *inputs, bias = sized(torch.float16, 64, 70, 96, mask).build()[0]
    grad_out, grad_lse = torch.randn(1, 4, 70, 64).half(), torch.randn(1, 4, 70)
    wide = [t.double().requires_grad_() for t in inputs]
    wide_bias = bias.double() if bias is not None and bias.dtype != torch.bool else bias
    out, lse = reference_sdpa(*wide, wide_bias, enable_gqa=True)
    expected = torch.autograd.grad([out, lse], wide, [grad_out.double(), grad_lse.double()])
    given = out.detach().half(), lse.detach().float()
    with emulated_card(info=card, times=Times(2.0, 3.0)) as kernels:
        parts = [
            sdpa_backward(
                grad_out, inputs[0], *(t[..., keys, :] for t in inputs[1:]), *given,
                None if bias is None else bias.expand(1, 4, 70, 96)[..., keys], enable_gqa=True, grad_lse=grad_lse,
            )
            for keys in (slice(0, 40), slice(40, 96))
        ]  # fmt: skip
    assert {launch.variant.on_tensor_cores for launch in kernels.queued} == {card.kind == "cuda"}
    found = parts[0][0].double() + parts[1][0].double(), *(torch.cat(pair, -2) for pair in list(zip(*parts))[1:])
    _assert_alike(found, expected)


@pytest.mark.parametrize(
    ("mask", "softcap"), some([("none", 3.0), ("none", None), ("float [L, S]", 3.0), ("float [L, S]", None)], 3)
)
def test_softcap_and_sinks_have_gradients(card: DeviceInfo, mask: str, softcap: float | None) -> None:
    """That of the sinks too, of which the second is larger than any score and the third takes no part."""
    if softcap and card.kind == "hip":
        pytest.skip("AMD's gradient kernels have no softcap: tiles compute those")
    (*tensors, bias), options = sized(torch.float16, 64, 70, 100, mask, is_causal=True, softcap=softcap).build()
    sinks, grad_out = torch.tensor([0.5, 40.0, -torch.inf, -1.0]), torch.randn(1, 4, 70, 64).half()

    def answers(dtype: torch.dtype, attend: Any) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (*tensors, sinks)]
        out, lse = attend(*leaves[:3], None if bias is None else bias.to(dtype), sinks=leaves[3], **options)
        found = torch.autograd.grad([out, lse], leaves, [grad_out.to(dtype), torch.ones_like(lse)])
        return [gradient.double() for gradient in found]

    with emulated_card(info=card) as kernels:
        found = answers(torch.float16, functools.partial(sdpa_with_lse, config=TENSOR))
    _assert_alike(found, answers(torch.float64, reference_sdpa))
    assert found[3][2] == 0
    backward = {launch.variant.kind for launch in kernels.queued if launch.variant.is_gradient}
    assert {"capped" in kind for kind in backward} == {softcap is not None}


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_different_lengths_take_one_launch(card: DeviceInfo, causal: bool) -> None:
    lengths = [300, 1, 0, 70], [200, 90, 20, 70]
    three = [torch.randn(sum(lengths[i]), heads, 64).half() for i, heads in ((0, 4), (1, 2), (1, 2))]
    ends = [torch.tensor(ends_of(each)).int() for each in lengths]
    with emulated_card(info=card, times=Times(2.0, 3.0)) as kernels:
        out = flash_attn_varlen_func(*three, *ends, 300, 200, causal=causal)
    assert [launch.variant.kind.partition("_")[2] for launch in kernels.queued] == ["packed"]
    wide = (t[None].transpose(1, 2).double() for t in three)
    expected, _ = each_alone(*wide, *lengths, is_causal=causal, alignment="lower_right")
    torch.testing.assert_close(out.double(), expected[0].transpose(0, 1), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("reason", "dtype", "head_dim", "options", "info"),
    [
        ("the kernel on tensor cores takes float16, got torch.bfloat16", torch.bfloat16, 64, {}, T4),
        ("the kernel on tensor cores takes float16, got torch.float32", torch.float32, 64, {}, T4),
        ("takes float16 and bfloat16, got torch.float32", torch.float32, 64, {}, RX_7600),
        ("the fused kernel has no dropout", torch.float16, 64, {"dropout_p": 0.5}, T4),
        ("head_dim 264 > 256", torch.float16, 264, {}, T4),
        ("head_dim must be a multiple of 4, got 30 and 30", torch.float16, 30, {}, T4),
        ("head_dim 192 > 128", torch.float16, 192, {}, V100),
        ("head_dim 192 > 128", torch.float16, 192, {}, RX_9070),
        ("tensor cores need compute capability 7.0, got 6.1", torch.float16, 192, {}, CARD),
        ("AMD's matrix units need gfx11 or gfx12, got gfx1030", torch.float16, 64, {}, RX_6800),
    ],
)
def test_a_call_that_it_does_not_take_is_refused_with_the_reason(
    reason: str, dtype: torch.dtype, head_dim: int, options: dict[str, Any], info: DeviceInfo
) -> None:
    query = torch.randn(1, 2, 40, head_dim).to(dtype)
    with emulated_card(info=info) as kernels, pytest.raises(UnsupportedAttention, match=re.escape(reason)):
        sdpa(query, query, query, **options, config=TENSOR)
    assert not kernels.queued


def test_the_bits_of_a_mask_stay_within_the_budget() -> None:
    query = torch.randn(1, 1, 1024, 64).half()
    mask = torch.ones(1024, 1024, dtype=torch.bool)
    tight = AttentionConfig(route="fused-tensor", budget_mib=0.1)
    with emulated_card(info=T4), pytest.raises(UnsupportedAttention, match="the bits of attn_mask take"):
        sdpa(query, query, query, mask, config=tight)
