"""The error that is promised stays the error: a layer in 8 bits is measured again while it runs."""

import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pascal_attn_core.int8 import patch_linear_int8
from pascal_attn_core.int8.binding import Int8Binding
from pascal_attn_core.int8.measure import SAMPLE_ROWS, Sample, parts_of, relative_error, sample_of
from pascal_attn_core.int8.watch import ErrorWatch
from pascal_attn_core.reference.int8_rows import quantize_rows

WIDTH = 64
LIMIT = 0.05


def linear(width: int = WIDTH) -> nn.Sequential:
    """A layer whose first input channel has little weight, as trained models have where activations are massive."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, WIDTH)).eval().requires_grad_(False)
    model[0].weight[:, 0] /= 300
    return model


def massive(x: Tensor) -> Tensor:
    return torch.cat((x[..., :1] * 300, x[..., 1:]), dim=-1)


def error_of(model: nn.Sequential, weight: Tensor, x: Tensor) -> float:
    exact = F.linear(x, weight)
    return ((model(x) - model[0].bias - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("branches", "branch"), [(count, branch) for count in (1, 2, 3, 4) for branch in range(count)])
@pytest.mark.parametrize("since", [1, 6, 11])
def test_outliers_in_one_branch_of_guidance_are_seen(branches: int, branch: int, since: int) -> None:
    """A model is called once per branch and step, for 60 steps; from a step on, one branch has an outlier channel."""
    model = linear(20)  # no rotation divides 20 columns by more than 4
    weight = model[0].weight.clone()
    patch = patch_linear_int8(model, include="0", max_error=LIMIT)
    wrong = 0
    for step in range(60):
        for each in range(branches):
            x = torch.randn(80, 20)
            wrong += error_of(model, weight, massive(x) if each == branch and step >= since else x) > LIMIT
    (line,) = patch.report().lines
    assert line.state == "refused"
    assert "above 5.00%" in line.why
    assert wrong <= (6 if branches < 4 else 20) + since, "steps until it was seen"


@pytest.mark.parametrize(
    ("shape", "parts"), [((5, 9, 20), 5), ((20, 9, 20), 2), ((18, 9, 20), 6), ((160, 20), 2), ((9, 20), 3), ((20,), 1)]
)
def test_branches_of_guidance_in_one_call_are_judged_one_by_one(shape: tuple[int, ...], parts: int) -> None:
    assert parts_of(torch.empty(shape)) == parts


def test_a_layer_above_the_limit_is_rotated_if_that_helps(caplog: pytest.LogCaptureFixture) -> None:
    model = linear(256)
    weight, x = model[0].weight.clone(), torch.randn(100, 256)
    patch = patch_linear_int8(model, include="0", max_error=LIMIT)
    model(x)
    assert patch.report().lines[0].rotation == 0
    x[:, 0] *= 30
    assert error_of(model, weight, x) < LIMIT, "the call in which it is found, too"
    (line,) = patch.report().lines
    assert (line.state, line.rotation, line.why) == ("on", 256, "")
    assert line.error == line.latest < LIMIT
    assert not caplog.records
    assert torch.equal(model.state_dict()["0.weight"], weight)
    patch.remove()
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("weights", ["keep", "host", "free"])
def test_otherwise_it_goes_back_to_float_at_once_with_one_warning(weights: str, caplog) -> None:
    model = linear()
    parameter, x = model[0].weight, torch.randn(50, WIDTH)
    x[:, 2::2] *= 1000  # half of the channels: a rotation does not help
    model[0].weight[:, 2::2] /= 1000
    expected, plain = model(x), torch.randn(50, WIDTH)
    plain[:, 2::2] = 0
    patch = patch_linear_int8(model, include="0", max_error=0.02, weights=weights)
    model(plain)
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        for _ in range(8):
            out = model(x)
    (line,) = patch.report().lines
    assert line.error > 0.02
    assert line.why.endswith("in call 2 is above 2.00%")
    assert len(caplog.records) == 1
    if weights == "free":
        assert line.state == "on", "there is nothing to go back to"
    else:
        assert line.state == "refused"
        assert torch.equal(out, expected)
        assert model[0].weight is parameter
        assert not model[0]._state_dict_hooks


def test_each_run_is_measured_by_itself() -> None:
    """A host says when a run begins: its first calls are measured, and the report has its errors only."""
    model = linear()
    binding = Int8Binding(max_error=1.0)
    binding.attach(model)
    x = torch.randn(50, WIDTH)
    for _ in range(20):
        model(massive(x))
    (first,) = binding.report(model).lines
    binding.restart()
    model(x)
    (line,) = binding.report(model).lines
    assert (line.calls, line.error) == (1, line.latest)
    assert line.error < 0.1 * first.error
    model(massive(x))
    (line,) = binding.report(model).lines
    assert line.error == line.latest == pytest.approx(first.error)
    for _ in range(8):
        model(x)
    (line,) = binding.report(model).lines
    assert line.latest < 0.1 * line.error
    assert f"error {line.error:.2%} (last {line.latest:.2%})" in binding.report(model).text()


def checked(watch: ErrorWatch, calls: int, rows: int = 64) -> list[int]:
    """The counts of those of the next calls that are checked."""
    x = torch.empty(rows, 1)
    return [watch.calls for _ in range(calls) if watch.check_now(x)]


def test_checks_grow_rare_but_never_end() -> None:
    counts = checked(ErrorWatch(), 10_000)
    assert counts[:13] == [1, 2, 3, 8, 13, 18, 29, 40, 51, 68, 85, 102, 119]
    gaps = [after - before for before, after in itertools.pairwise(counts)]
    assert max(gaps) == gaps[-1] == 17
    assert len(checked(ErrorWatch(), 60)) == 9


@pytest.mark.parametrize("branches", range(1, 9))
def test_no_branch_of_a_step_is_left_out(branches: int) -> None:
    """Each of up to 8 calls per step is checked again, in any run and from any call on; of 2 or 3 at once."""
    watch = ErrorWatch()
    for _ in range(5):
        counts = checked(watch, 5000)
        watch.restart()
        for start in range(len(counts) - 60):
            some = branches + 2 * (start < 3) if branches <= 3 else 5 * branches
            assert {count % branches for count in counts[start : start + some]} == set(range(branches)), (start, counts)


def test_late_steps_are_checked_too() -> None:
    """One of the last five steps of a run is checked, and each of the first 18 in five runs."""
    watch, seen = ErrorWatch(), set()
    for _ in range(5):
        counts = checked(watch, 18)
        assert all(any(end - 5 < count <= end for count in counts) for end in range(8, 19))
        seen.update(counts)
        watch.restart()
    assert seen == set(range(1, 19))


def test_a_new_size_is_checked_in_the_next_calls_and_an_old_one_is_not() -> None:
    watch = ErrorWatch()
    checked(watch, 30, rows=4096)
    assert checked(watch, 10, rows=1024) == [31, 32, 33, 38]
    assert checked(watch, 10, rows=4096) == [43, 48]
    both = ErrorWatch()
    assert sum(len(checked(both, 1, (77, 154)[call % 2])) for call in range(60)) <= 12, (
        "sizes in turn are not new each time"
    )
    text = ErrorWatch()
    assert sum(len(checked(text, 1, rows)) for rows in range(1, 1000)) < 120, "nor is a text that grows by a word"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", ["one row", "a column of the picture", "odd rows"])
def test_the_error_of_a_sample_is_that_of_all_rows(odd: str, dtype: torch.dtype) -> None:
    """A few rows with an outlier channel of little weight: most of the error is theirs."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4096, 64), torch.randn(48, 64)
    weight[:, 0] /= 300
    picked = {"one row": [7], "a column of the picture": slice(63, None, 64), "odd rows": slice(1, None, 2)}[odd]
    x[0, picked, 0] *= 300
    x, matrix = x.to(dtype), quantize_rows(weight)
    whole = relative_error(Sample(x[0], torch.ones(4096, 1, dtype=torch.float64)), weight, matrix).error
    found = relative_error(sample_of(x, SAMPLE_ROWS, seed=3), weight, matrix).error
    assert found == pytest.approx(whole, rel=0.15)
