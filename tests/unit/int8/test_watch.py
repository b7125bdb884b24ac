"""ErrorWatch: which calls are checked, and which rows of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from pascal_attn_core.int8.measure import SAMPLE_ROWS, relative_error, sample_of
from pascal_attn_core.int8.quantize import quantize_rows
from pascal_attn_core.int8.watch import ErrorWatch


def checked(watch: ErrorWatch, calls: int, rows: int = 64) -> list[int]:
    """The counts of those of the next calls that are checked."""
    return [watch.calls for _ in range(calls) if watch.check_now(rows)]


def test_checks_grow_rare_but_never_end() -> None:
    counts = checked(ErrorWatch(), 10_000)
    assert counts[:13] == [1, 2, 3, 10, 17, 24, 37, 50, 63, 82, 101, 120, 145]
    gaps = [after - before for before, after in itertools.pairwise(counts)]
    assert max(gaps) == gaps[-1] == 61
    assert len(checked(ErrorWatch(), 60)) == 8


@pytest.mark.parametrize("branches", range(1, 9))
def test_no_branch_of_a_step_is_left_out(branches: int) -> None:
    """From any call on, each of up to 8 calls per step is checked again before the count is a few times as large; each
    of 2 and 3 within as many checks as there are branches."""
    counts = checked(ErrorWatch(), 5000)
    for start in range(len(counts) - 60):
        window = counts[start : start + (branches if branches <= 3 else 5 * branches)]
        assert {count % branches for count in window} == set(range(branches)), (start, window)


def test_a_run_begins_again() -> None:
    watch = ErrorWatch()
    checked(watch, 30)
    watch.saw(0.3)
    watch.saw(0.1)
    assert (watch.calls, watch.latest, watch.largest) == (30, 0.1, 0.3)
    watch.restart()
    assert (watch.calls, watch.latest, watch.largest) == (0, None, None)
    assert checked(watch, 10) == [1, 2, 3, 10]


def test_a_new_size_is_checked_in_the_next_calls_and_an_old_one_is_not() -> None:
    watch = ErrorWatch()
    checked(watch, 30, rows=4096)
    assert checked(watch, 10, rows=1024) == [31, 32, 33, 40]
    assert checked(watch, 10, rows=4096) == [47]
    both = ErrorWatch()
    assert sum(both.check_now((77, 154)[call % 2]) for call in range(60)) <= 12, "sizes in turn are not new each time"
    text = ErrorWatch()
    assert sum(text.check_now(rows) for rows in range(1, 1000)) < 100, "nor is a text that grows by a word"


def test_the_rows_of_a_sample_stand_for_all() -> None:
    x = torch.randn(4096, 32)
    x[77] *= 1000
    before = torch.get_rng_state()
    rows, counts = sample_of(x, 128, seed=1)
    assert torch.equal(torch.get_rng_state(), before), "the user's random state is not touched"
    assert rows.shape[0] == len(counts) <= 128
    assert counts.sum().item() == pytest.approx(4096)
    assert counts[(rows == x[77]).all(dim=1)].tolist() == [1.0]
    assert not torch.equal(rows, sample_of(x, 128, seed=2).rows)
    few, counts = sample_of(x[:100].view(2, 50, 32), 128, seed=1)
    assert torch.equal(few, x[:100])
    assert (counts == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", ["one row", "a column of the picture", "odd rows"])
def test_the_error_of_a_sample_is_that_of_all_rows(odd: str, dtype: torch.dtype) -> None:
    """A few rows with an outlier channel of little weight: most of the error is theirs."""
    torch.manual_seed(0)
    x, weight = torch.randn(4096, 64), torch.randn(48, 64)
    weight[:, 0] /= 300
    picked = {"one row": [7], "a column of the picture": slice(63, None, 64), "odd rows": slice(1, None, 2)}[odd]
    x[picked, 0] *= 300
    x, matrix = x.to(dtype), quantize_rows(weight)
    whole = relative_error((x, torch.ones(4096, dtype=torch.float64)), weight, matrix)
    found = relative_error(sample_of(x, SAMPLE_ROWS, seed=3), weight, matrix)
    assert found == pytest.approx(whole, rel=0.15)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_an_error_without_bound(value: float) -> None:
    x, weight = torch.randn(64, 32), torch.randn(16, 32)
    sample = sample_of(x, SAMPLE_ROWS, seed=0)
    weight[3, 5] = value
    assert relative_error(sample, weight, quantize_rows(weight)) == float("inf")
