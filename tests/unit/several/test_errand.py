"""Pieces on their way to another device: the right numbers, in the right order, with as much at once as there can be;
and nothing is lost or left behind when something fails."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from attn_support.several.lanes import ModelLanes, Step
from torch import Tensor

from pascal_attn_core.several.errand import Errand, Piece, is_dense
from pascal_attn_core.several.lanes import HostLanes, Lane, Lanes, Place, lanes_between
from pascal_attn_core.several.pace import PIECES, Pace, best_counts, cut_pieces, shared_ms, time_away


def _pieces(count: int, rows: int = 4, *, dense: bool = True) -> tuple[list[Piece], Tensor, Tensor, Tensor]:
    """(pieces of ``source * 2 + common``, source, common, target)."""
    whole = torch.randn(count * rows, 8)
    source = whole if dense else whole.repeat(1, 2)[:, :8]
    target = torch.full_like(whole, 7.0) if dense else torch.full((count * rows, 16), 7.0)[:, :8]
    common = torch.randn(8)

    def compute(shared: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
        return [own[0] * 2 + shared[0]]

    cuts = [slice(rows * i, rows * (i + 1)) for i in range(count)]
    return [Piece([source[cut]], [target[cut]], compute) for cut in cuts], source, common, target


def _done(lanes: Lanes, pieces: list[Piece], common: Tensor) -> Errand:
    errand = Errand(lanes, [common], pieces)
    errand.start()
    errand.join()
    return errand


@pytest.mark.parametrize(
    "make", [ModelLanes, lambda: ModelLanes(is_direct=True), lambda: HostLanes(*[torch.device("cpu")] * 2)]
)
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_piece_is_computed_and_comes_back(make: Callable[[], Lanes], dense: bool, count: int) -> None:
    pieces, source, common, target = _pieces(count, dense=dense)
    errand = _done(make(), pieces, common)
    assert (errand.error, errand.finished) == (None, count)
    assert torch.equal(target, source * 2 + common)
    assert errand.copy_ms > 0
    assert errand.run_ms > 0


def _ordered(first: Step, second: Step) -> bool:
    return first in second.before or second in first.before


@pytest.mark.parametrize("is_direct", [True, False])
def test_no_two_lanes_touch_the_same_memory_unordered(is_direct: bool) -> None:
    """Of two copies of which one writes what the other reads or writes, one waits for the other: by its lane, by a
    mark, or because the host has waited. Memory that was freed and is given out again counts as the same."""
    lanes = ModelLanes(is_direct=is_direct)
    pieces, _, common, _ = _pieces(6, dense=False)
    assert _done(lanes, pieces, common).error is None
    conflicts = 0
    for first, second in itertools.combinations(lanes.steps, 2):
        if first.writes & (second.reads | second.writes) or first.reads & second.writes:
            conflicts += 1
            assert _ordered(first, second), (first.lanes, second.lanes)
    assert conflicts > 6


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_piece_is_computed_after_it_has_come_and_leaves_after_it_was(is_direct: bool) -> None:
    lanes = ModelLanes(is_direct=is_direct)
    pieces, _, common, _ = _pieces(5)
    _done(lanes, pieces, common)
    received, runs = lanes.of(Lane.RECEIVE), lanes.of(Lane.RUN)
    landed = lanes.of(Lane.LAND)
    assert len(received) == 6  # the common tensor comes first
    for number, run in enumerate(runs):
        assert set(received[: number + 2]) <= run.before
        assert run in landed[number].before
    assert lanes.drained == 1


def test_copies_run_while_pieces_are_computed() -> None:
    lanes = ModelLanes(copy_ms=lambda lane, num_bytes: 1.0, run_ms=lambda: 10.0)
    pieces, _, common, _ = _pieces(4)
    _done(lanes, pieces, common)
    runs = lanes.of(Lane.RUN)
    assert all(later.begins == earlier.ends for earlier, later in itertools.pairwise(runs))  # it never waits for a copy
    received, returned = lanes.of(Lane.RECEIVE)[1:], lanes.of(Lane.RETURN)
    assert received[1].ends < runs[0].begins + 10
    for number in range(2):
        assert received[number + 2].overlaps(runs[number])
    for number in range(3):
        assert returned[number].overlaps(runs[number + 1])
    first, last = received[0].ends, lanes.of(Lane.LAND)[-1].ends
    assert first + 40 + 2 == last  # all that is not hidden: the first copy there and the last one back, in two halves


def test_where_copies_take_longest_they_never_wait_for_computation() -> None:
    lanes = ModelLanes(
        is_direct=True, copy_ms=lambda lane, num_bytes: 10.0 if lane == Lane.RECEIVE else 0.1, run_ms=lambda: 1.0
    )
    pieces, _, common, _ = _pieces(6)
    _done(lanes, pieces, common)
    assert all(later.begins == earlier.ends for earlier, later in itertools.pairwise(lanes.of(Lane.RECEIVE)))


@pytest.mark.parametrize("run_ms", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("in_ms", [0.2, 2.0, 9.0])
@pytest.mark.parametrize("back_ms", [0.1, 4.0])
@pytest.mark.parametrize("units", [1, 3, 4, 7])
def test_the_arithmetic_is_that_of_the_lanes(run_ms: float, in_ms: float, back_ms: float, units: int) -> None:
    """``time_away`` against the modelled clock of what an errand really does."""
    sizes = cut_pieces(units)
    left = iter([run_ms * size for size in sizes])
    lanes = ModelLanes(
        is_direct=True,
        copy_ms=lambda lane, num_bytes: num_bytes / 32 * {Lane.RECEIVE: in_ms, Lane.LAND: back_ms}.get(lane, 0.0),
        run_ms=lambda: next(left),
    )
    source, target = torch.randn(units, 8), torch.empty(units, 8)
    cuts, first = [], 0
    for size in sizes:
        cuts.append(slice(first, first + size))
        first += size
    errand = Errand(lanes, [], [Piece([source[c]], [target[c]], lambda common, own: [own[0] + 1]) for c in cuts])
    errand.start()
    errand.join()
    assert torch.equal(target, source + 1)
    assert lanes.of(Lane.LAND)[-1].ends == pytest.approx(time_away(Pace(run_ms, in_ms, back_ms), sizes))


# ---- faults ----------------------------------------------------------------------------------------------------------


class Fault(RuntimeError):
    pass


def _failing(at: int) -> Callable[[str, int], None]:
    def fail(name: str, number: int) -> None:
        if number == at:
            raise Fault(f"{name} {number}")

    return fail


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_fault_anywhere_leaves_whole_pieces_and_nothing_running(is_direct: bool) -> None:
    """At every copy, every allocation, every computation and every wait."""
    probe = ModelLanes(is_direct=is_direct)
    _done(probe, *_pieces(3, dense=False)[::2][:2])
    names: set[str] = set()
    for at in range(1, probe.count + 1):
        pieces, source, common, target = _pieces(3, dense=False)
        lanes = ModelLanes(is_direct=is_direct, fail=_failing(at))
        errand = _done(lanes, pieces, common)
        assert isinstance(errand.error, Fault)
        names.add(str(errand.error).rpartition(" ")[0])
        assert lanes.drained == 1
        assert errand.finished < 3
        rows = 4 * errand.finished
        assert torch.equal(target[:rows], (source * 2 + common)[:rows])
    expected = {"allocate away", "copy", "run", "wait"} | (set() if is_direct else {"allocate home", "allocate pinned"})
    assert names == expected


def test_a_result_of_another_shape_is_refused() -> None:
    piece = Piece([torch.randn(4, 8)], [torch.empty(4, 8)], lambda common, own: [own[0][:2]])
    errand = Errand(ModelLanes(), [], [piece])
    errand.start()
    errand.join()
    assert "came back as torch.float32 [2, 8], not torch.float32 [4, 8]" in str(errand.error)


def test_cancelling_waits_for_the_piece_in_progress_and_ends() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def compute(common: Sequence[Tensor], own: Sequence[Tensor]) -> Sequence[Tensor]:
        begun.set()
        go_on.wait(10)
        return [own[0]]

    target = torch.zeros(6, 2)
    pieces = [Piece([torch.ones(1, 2)], [target[i : i + 1]], compute) for i in range(6)]
    errand = Errand(ModelLanes(), [], pieces)
    errand.start()
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    errand.cancel()
    assert not errand._thread.is_alive()
    assert errand.error is None
    assert errand.finished < 6
    assert torch.equal(target[: errand.finished], torch.ones(errand.finished, 2))


def test_who_waits_may_stop_waiting() -> None:
    go_on = threading.Event()
    piece = Piece([torch.ones(1)], [torch.ones(1)], lambda common, own: [own[0] * go_on.wait(10)])
    errand = Errand(ModelLanes(), [], [piece])
    errand.start()

    def stop() -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        errand.join(stop)
    assert time.monotonic() - began < 5
    go_on.set()
    errand.cancel()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_at_home_only_what_is_not_dense_is_copied(is_direct: bool, dense: bool) -> None:
    lanes = ModelLanes(is_direct=is_direct)
    pieces, _, common, _ = _pieces(3, dense=dense)
    _done(lanes, pieces, common)
    of_a_piece = sum(t.numel() * t.element_size() for t in (*pieces[0].sources, *pieces[0].targets))
    assert lanes.allocated[Place.HOME] == (0 if dense or is_direct else 3 * of_a_piece)
    assert (lanes.allocated[Place.PINNED] == 0) == is_direct


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(2, 3, 4), True),
        (torch.empty(2, 3, 4).transpose(0, 2), True),
        (torch.empty(2, 3, 4)[:, :2], False),
        (torch.empty(1, 3, 4)[:, :2], True),
        (torch.empty(3).expand(2, 3), False),
        (torch.empty(()), True),
    ],
)
def test_is_dense(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


# ---- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 2, 5, 24, 40])
@pytest.mark.parametrize("away", [Pace(1.0), Pace(0.4, 0.1, 0.1), Pace(3.0, 0.5, 0.2, 4.0, 1.0), Pace(0.2, 30.0, 9.0)])
def test_the_counts_are_the_best_there_are(units: int, away: Pace) -> None:
    counts = best_counts(units, 1.0, (away,))
    every = [(units - there, there) for there in range(units)]
    assert shared_ms(1.0, [away], counts) == min(shared_ms(1.0, [away], each) for each in every)


def test_three_devices_share_by_their_speed() -> None:
    assert best_counts(40, 1.0, (Pace(1.0), Pace(2.0))) == (16, 16, 8)
    assert sum(best_counts(7, 1.0, (Pace(0.01), Pace(50.0)))) == 7
    assert best_counts(8, 1.0, (Pace(0.001),))[0] == 1


def test_pieces_are_even() -> None:
    assert cut_pieces(10) == [3, 3, 2, 2]
    assert cut_pieces(3) == [1, 1, 1]
    assert len(cut_pieces(100)) == PIECES


def test_devices_of_two_kinds_have_no_lanes() -> None:
    with pytest.raises(ValueError, match="devices must be CUDA devices, or all of them CPUs, got cpu and cuda:0"):
        lanes_between(torch.device("cpu"), torch.device("cuda:0"))
