"""The route on AMD's cards as a user meets it: real plans and source, behind the stand-in for the HIP runtime."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused import device as cards
from attn_support.fused.cases import LOWER_RIGHT, sized
from attn_support.fused.hip import OVERRIDDEN, RADEON_VII, RX_5700, RX_6800, RX_7600, HipStandIn
from attn_support.fused.packed import each_alone
from attn_support.oracle import cast
from attn_support.randomness import some
from attn_support.table import Case

from pascal_attn_core import AttentionConfig, explain, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.flash_attn import flash_attn_varlen_func
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import choose, timing, torch_kernel
from pascal_attn_core.routes.timing import Timings

CPU = torch.device("cpu")
AUTO = AttentionConfig(math_limit_mib=0)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.fixture(params=[RADEON_VII, RX_5700, RX_6800, OVERRIDDEN], ids=lambda info: f"{info.arch}-is-{info.known_arch}")
def card(request: pytest.FixtureRequest):
    with cards.fresh_card(HipStandIn(request.param, cards.execute), cards.always_faster) as kernels:
        yield kernels


@pytest.fixture
def no_torch_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch on these cards: no fused kernel takes any call."""
    monkeypatch.setattr(torch_kernel, "fused_takes", lambda *_: False)


def _calls(dtype: torch.dtype) -> list[Case]:
    two = functools.partial(sized, dtype, heads=(2, 2))
    return [
        two(64, 150, 200, window=(40, 0)),
        sized(dtype, 64, 150, 200, heads=(2, 1), **LOWER_RIGHT),
        two(64, 150, 200, "bool [L, S]"),
        two(64, 150, 200, "float [L, S]"),
        two(64, 3, 200),
        two(44, 150, 200),
    ]


@pytest.mark.parametrize(
    "case", some((case for dtype in _TOLERANCE for case in _calls(dtype)), 18), ids=lambda case: case.name
)
def test_answers_and_gradients_are_those_of_the_definition(card, no_torch_kernel, case: Case) -> None:
    inputs, options = case.build()
    leaves = [t.requires_grad_() for t in inputs[:3]]
    with record() as report:
        out = sdpa(*inputs, config=AUTO, **options)
    assert report.routes() == {"fused": 1}
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    wide = [cast(t, torch.float64) for t in inputs]
    expected = reference_sdpa(*wide, **options)[0]
    limit = _TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), wide[:3])):
        assert (ours.double() - theirs).abs().max() <= 4 * limit * theirs.abs().max()
    assert {launch.variant.arch for launch in card.queued} == {card.arch}


def test_sequences_of_different_lengths_are_one_launch(card: cards.CardKernels, no_torch_kernel: None) -> None:
    tokens, ends = torch.randn(90, 2, 64).half(), torch.tensor([0, 30, 90], dtype=torch.int32)
    out = flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, 60, 60, causal=True)
    assert [bool(launch.params.cu_q) for launch in card.queued].count(True) == 1
    expected, _ = each_alone(*[tokens.transpose(0, 1)[None].float()] * 3, [30, 60], [30, 60], is_causal=True)
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), atol=1e-2, rtol=1e-2)


def test_the_last_rows_have_their_keys_in_ranges_where_that_kernel_is_right() -> None:
    """Elsewhere the kernel of the other rows computes them too, in the very call in which that is found out."""
    query, key = torch.randn(1, 2, 300, 40).half(), torch.randn(1, 2, 2600, 40).half()
    expected = reference_sdpa(query.double(), key.double(), key.double())[0]
    fused, info = AttentionConfig(route="fused"), replace(RADEON_VII, num_sms=2)

    def without_ranges(launch: Launch) -> None:
        if launch.function != "pa_forward_ranges":
            cards.execute(launch)

    for run, functions in (
        (cards.execute, ["pa_forward", "pa_forward_ranges", "pa_combine"]),
        (without_ranges, ["pa_forward"]),
    ):
        with cards.fresh_card(HipStandIn(info, run)) as kernels:
            for _ in range(2):
                out = sdpa(query, key, key, config=fused)
                assert [launch.function for launch in kernels.queued][-len(functions) :] == functions
                torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
            call = check_call(query, key, key)
            assert (choose(call, fused).plan.tail is None) == (run is not cards.execute)


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 150, 64) for _ in range(3)]


@pytest.mark.parametrize(("ours", "route"), [(1.0, "fused"), (3.0, "tiled")])
def test_it_is_taken_where_it_is_faster_than_torchs_math(no_torch_kernel, tmp_path, ours: float, route: str) -> None:
    asked: list[int] = []

    def clock(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
        asked.append(len(attempts))
        cards.passing_time(attempts, device)  # both really run
        return [ours, 2.0]

    with cards.fresh_card(HipStandIn(RADEON_VII, cards.execute), clock, lambda: tmp_path):
        text = explain(*_inputs(), config=AUTO)
        assert text.startswith(f"route {route}: torch has no fused kernel for this call on this device")
        assert f"timed on this card at {ours / 2:.2f} of the time of torch's math attention" in text.splitlines()[0]
        assert (cards.route_of(*_inputs(), config=AUTO), asked) == (route, [2])
    with cards.fresh_card(HipStandIn(RADEON_VII, cards.execute), clock, lambda: tmp_path):
        assert explain(*_inputs(), config=AUTO).startswith(f"route {route}")
        (found,) = runtime_of(CPU).part(Timings).ratios("plain").values()
        assert (found, asked) == (ours / 2, [2])  # from the disk


@pytest.mark.parametrize(
    ("plain", "over_math", "route"), [(2.0, 0.5, "fused-tensor"), (0.5, 0.5, "fused"), (2.0, 1.5, "tiled")]
)
def test_matrix_units_are_taken_where_they_are_faster_than_our_other_kernel_and_torchs_math(
    no_torch_kernel: None, plain: float, over_math: float, route: str
) -> None:
    answers = iter([[1.0, plain], [over_math, 1.0], [over_math, 1.0]])
    query = torch.randn(1, 2, 150, 64).bfloat16()
    with cards.fresh_card(HipStandIn(RX_7600, cards.execute), lambda *_: next(answers), kind=cards.UncheckedKernels):
        text = explain(query, query, query, config=AUTO)
        assert text.startswith(f"route {route}"), text
        assert f"timed on this card at {over_math:.2f} of the time of torch's math attention" in text
        assert cards.route_of(query, query, query, config=AUTO) == route


def test_a_torch_that_cannot_compute_it_does_not_fail_our_call(no_torch_kernel: None, monkeypatch) -> None:
    fails = Mock(side_effect=RuntimeError("HIP error: invalid device function"))
    monkeypatch.setattr(timing, "torch_sdpa", fails)
    with cards.fresh_card(HipStandIn(RADEON_VII, cards.execute), cards.passing_time), record() as report:
        inputs = _inputs()
        out = sdpa(*inputs, config=AUTO)
        assert report.routes() == {"fused": 1}
        assert list(runtime_of(CPU).part(Timings).known.values()) == [None]
    torch.testing.assert_close(out, reference_sdpa(*inputs)[0], atol=1e-4, rtol=1e-4)
