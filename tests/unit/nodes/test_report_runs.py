"""The records that the report is made of: when a run begins and ends, what is kept of it, and how it is measured."""

from __future__ import annotations

import pytest
import torch
from attn_support.comfy.runs import RUNS, kind, part, run
from attn_support.comfy.stub import make_engine, stub_host  # noqa: F401

ENGINE, METER = part("nodes.engine.engine"), part("nodes.engine.meter")


@pytest.fixture
def engine(stub_host):  # noqa: F811
    """An engine that takes every call, on a host that computes on the CPU."""
    return make_engine()


def attend(engine, tokens=64, **options):
    query = torch.randn(1, 2, tokens, 16)
    return engine.attend(query, query, query, place=RUNS.Place("double 0"), **options)


def test_a_run_is_over_when_its_outermost_sampling_is(engine):
    engine.begin()
    engine.begin()
    attend(engine)
    assert engine.end() is None
    assert engine.is_running
    finished = engine.end()
    assert finished.finished
    assert finished.count() == 1
    assert not engine.is_running
    assert RUNS.remembered() == [finished]


def test_calls_outside_of_a_sampling_are_a_run_that_the_next_one_ends(engine):
    attend(engine)
    stray = RUNS.remembered()[0]
    assert not stray.finished
    engine.begin()
    assert stray.finished
    assert engine.end() is not stray
    assert len(RUNS.remembered()) == 2


def test_a_run_that_fails_says_what_ended_it(engine):
    def sampling():
        engine.begin()
        try:
            attend(engine)
            raise KeyboardInterrupt
        finally:
            assert engine.failure == "KeyboardInterrupt"
            engine.end()

    with pytest.raises(KeyboardInterrupt):
        sampling()
    (finished,) = RUNS.remembered()
    assert finished.finished
    assert finished.notes == ["ended early by KeyboardInterrupt: the figures cover the time until then"]


def test_a_run_inside_the_handling_of_an_older_error_has_not_failed(engine):
    try:
        raise MemoryError
    except MemoryError:
        engine.begin()
        attend(engine)
        assert engine.end().notes == []


def test_the_sample_is_of_the_largest_call_that_can_be_sampled(engine):
    engine.begin()
    attend(engine, 32)
    attend(engine, 64)
    attend(engine, 128, options=part("pascal_attn_core.call").Options(is_causal=True))
    attend(engine, 48)
    assert engine.end().sample.kind.query == (1, 2, 64, 16)


def test_a_new_run_of_the_same_model_drops_the_old_sample(engine):
    for _ in range(2):
        engine.begin()
        attend(engine)
        engine.end()
    assert [entry.sample is None for entry in RUNS.remembered()] == [True, False]


def test_calls_are_timed_and_their_memory_is_known(engine):
    engine.begin()
    attend(engine, 256)
    ((_, tally),) = engine.end().tallies.items()
    assert tally.elapsed_ms > 0
    assert tally.extra_bytes is not None


def test_the_peak_of_a_run_is_that_of_its_fullest_device(engine, monkeypatch):
    monkeypatch.setattr(ENGINE, "peak_of_run", lambda device: {"cpu": 5, "cuda:1": 9}[str(device)])
    engine.begin().saw_device(torch.device("cuda:1"))
    assert engine.end().peak_bytes == 9


class Clock:
    """A CUDA event by hand: over or not, at a time."""

    def __init__(self, ms, over=True):
        self.ms, self.over = ms, over

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True

    def elapsed_time(self, end):
        return end.ms - self.ms


def test_events_that_are_not_over_wait_for_the_end():
    made, tally = run(finished=False), RUNS.CallTally()
    for _ in range(RUNS._PENDING):
        made.time_later(tally, Clock(0), Clock(2, over=False))
    assert len(made._pending) == RUNS._PENDING
    made.finish()
    assert made._pending == []
    assert tally.elapsed_ms == 2 * RUNS._PENDING


def test_devices_whose_clock_cannot_be_read_are_not_timed():
    made = run(finished=False)
    tally = made.add(kind("double 0"))
    with METER.Meter(made, tally, torch.device("mps"), measures=True):
        pass
    assert tally.elapsed_ms == 0
    assert tally.extra_bytes is None
