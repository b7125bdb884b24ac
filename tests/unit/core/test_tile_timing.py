"""On a CPU tiles are timed against torch's kernel once per kind of call, and the result decides."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.clock import Clock
from attn_support.fresh import execute
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain, sdpa
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.cli.bench.shapes import SHAPES
from pascal_attn_core.machine.device import MIB, DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import choose, timing_table, why_not
from pascal_attn_core.routes.route import Request
from pascal_attn_core.routes.run import TORCH
from pascal_attn_core.routes.tile_timing import CLEARLY, TileTimings, kind_of_call, slice_of
from pascal_attn_core.routes.tiled import TiledRoute, Walks
from pascal_attn_core.routes.timing_table import CallKind
from pascal_attn_core.tiled.tiles import Basis, cpu_bases

CPU = DeviceInfo("cpu", "a processor", num_sms=2, l2_bytes=32 << 20, core_l2_bytes=1 << 20)
AUTO = AttentionConfig()
LARGE, WIDE = Basis(1024, 512), Basis(512, 1024)


@contextmanager
def machine(folder: Path | None, clock: Any = None, info: DeviceInfo = CPU, **options: Any) -> Iterator[TileTimings]:
    """A CPU as a new process finds it, on which everything may be timed."""
    given = {"clock": clock, "folder": lambda: folder, "is_on": True, **options}
    with using(Runtime("cpu", info, {TileTimings: lambda runtime: TileTimings(runtime, **given)})) as runtime:
        yield runtime.part(TileTimings)


@contextmanager
def knowing(call: AttentionCall, ratio: float, basis: Basis = WIDE) -> Iterator[TileTimings]:
    """A CPU on which tiles of a shape were timed for calls like this, at a share of the time of torch's kernel."""
    kind = kind_of_call(call)
    assert kind is not None
    with machine(None, Clock()) as timings:
        timings.known[kind] = {"torch": 1.0, f"{basis.rows} x {basis.keys}": ratio}
        yield timings


def _tensors(q: tuple[int, ...] = (1, 2, 1200, 32), kv_tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(q)
    key = torch.randn(*q[:-2], kv_tokens or q[-2], q[-1])
    return query, key, torch.randn_like(key)


def _ask(config: AttentionConfig = AUTO, *, times: int = 40, **options: Any) -> str:
    """The route after so many calls of a kind: enough for a timing to be worth it."""
    tensors = _tensors()
    call = check_call(*tensors, **options)
    for _ in range(times):
        choice = choose(call, config)
    return choice.route


@pytest.mark.parametrize(("ratio", "route"), [(0.6, "tiled"), (CLEARLY, "tiled"), (0.99, "torch"), (1.3, "torch")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_table_decides_and_is_given_as_the_reason(ratio: float, route: str, is_causal: bool) -> None:
    tensors = _tensors()
    call = check_call(*tensors, is_causal=is_causal)
    with knowing(call, ratio) as timings:
        choice = choose(call, AUTO)
        said = explain(*tensors, is_causal=is_causal).splitlines()[0]
        assert timings.clock.runs == 0
    assert (choice.route, choice.over_torch) == (route, ratio if route == "tiled" else None)
    assert said.startswith(f"route {route}: ")
    what = "tiles were " if route == "torch" else ""  # of which the sentence does not speak otherwise
    assert f"{what}timed on this CPU at {ratio:.2f} of the time of torch's kernel (512 x 1024)" in said


def test_the_fastest_tile_shape_is_the_one_that_runs() -> None:
    tensors = _tensors((1, 1, 2048, 32))
    call = check_call(*tensors)
    for basis in cpu_bases(CPU):
        with knowing(call, 0.5, basis):
            for config in (AUTO, AttentionConfig(route="tiled")):
                plan = choose(call, config).plan
                assert plan == basis
                tiles = Walks(Runtime("cpu", CPU)).of(call, config, basis=plan).tiles
                assert (tiles.q_block, tiles.kv_block) == tuple(basis)
            torch.testing.assert_close(sdpa(*tensors), reference_sdpa(*tensors)[0], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_call_that_torch_cannot_take_goes_to_tiles_whatever_was_timed(ratio: float) -> None:
    """A softcap changes no kind: its tiles take the shape that is fastest for calls without."""
    tensors = _tensors()
    with knowing(check_call(*tensors), ratio):
        choice = choose(check_call(*tensors, softcap=5.0), AUTO)
        assert (choice.route, choice.why, choice.plan) == ("tiled", "torch's function has no softcap", WIDE)
        assert choose(check_call(*tensors), AUTO, with_lse=True).why == "torch's function does not return lse"


def test_tiles_that_are_slow_never_send_a_call_to_a_route_that_stores_its_scores() -> None:
    """Where torch has only its math attention the verdict cannot be against tiles."""
    tensors = _tensors((1, 2, 1200, 32))
    call = check_call(*tensors, alignment="lower_right", is_causal=True, window=(64, 0))
    with machine(None, Clock(1.0, 9.0, 9.0, 9.0)) as timings:
        assert choose(call, AUTO).route == "tiled"
        assert timings.known == {}


def test_a_tile_or_budget_of_the_users_own_is_not_what_was_timed() -> None:
    with knowing(check_call(*_tensors()), 0.5):
        assert _ask(replace(AUTO, budget_mib=64)) == "tiled"
        for config in (replace(AUTO, budget_mib=1), replace(AUTO, kv_block=64), replace(AUTO, softmax="online")):
            assert _ask(config) == "torch"
            assert choose(check_call(*_tensors()), replace(config, route="tiled")).plan is None


def test_a_real_measurement_is_stored_and_read_again(tmp_path: Path) -> None:
    with machine(tmp_path) as timings:
        route = _ask()
        ((kind, times),) = timings.known.items()
        found = timings.verdict(times)
    assert list(times) == ["torch", "1024 x 512", "512 x 1024", "512 x 256"]
    assert 0.1 < found.ratio < 20
    assert route == ("tiled" if found.ratio <= CLEARLY else "torch")
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["processor"] == "a processor"
    with machine(tmp_path, Clock()) as later:
        assert _ask(times=1) == route
        assert (later.known, later.clock.runs) == ({kind: times}, 0)


@pytest.mark.parametrize(
    ("times", "route", "basis"),  # of torch's kernel, and of each tile shape
    [
        ((1.0, 2.0, 3.0, 4.0), "torch", 0),
        ((2.0, 1.0, 3.0, 4.0), "tiled", 0),
        ((2.0, 1.0, 0.91, 0.95), "tiled", 0),
        ((2.0, 1.0, 0.95, 0.8), "tiled", 2),
    ],
)
def test_the_times_decide_and_another_tile_shape_is_taken_only_where_it_is_clearly_faster(
    times: tuple[float, ...], route: str, basis: int, tmp_path: Path
) -> None:
    clock = Clock(*times)
    with machine(tmp_path, clock) as timings:
        assert _ask() == route
        found = timings.verdict(*timings.known.values())
    assert found is not None
    assert (found.ratio, found.basis, clock.runs) == (times[1 + basis] / times[0], cpu_bases(CPU)[basis], 1)
    for result in clock.results[1:]:
        torch.testing.assert_close(result.out, clock.results[0], atol=1e-5, rtol=1e-4)


def test_other_processors_threads_and_tiles_are_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0, 1.0, 1.0, 1.0)
    others = [CPU, CPU, replace(CPU, name="another"), replace(CPU, core_l2_bytes=1 << 21)]
    for info, runs in zip(others, (1, 1, 2, 3)):
        with machine(tmp_path, clock, info):
            _ask()
        assert clock.runs == runs
    threads = torch.get_num_threads() + 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with machine(tmp_path, clock):
        _ask()
    assert clock.runs == 4
    assert len(list(tmp_path.iterdir())) == 3


def test_a_timing_comes_when_the_calls_of_a_kind_have_taken_as_long(tmp_path: Path) -> None:
    small, large = check_call(*_tensors((1, 1, 700, 64))), check_call(*_tensors((10, 8, 1200, 64)))
    with machine(tmp_path, Clock(2.0, 1.0, 1.0, 1.0)) as timings:
        for call, first in ((small, 18), (large, 1)):  # torch's kernel and two shapes of tiles, six times each
            routes = [choose(call, AUTO).route for _ in range(first)]
            assert routes == ["torch"] * (first - 1) + ["tiled"]
        assert timings.clock.runs == 2


def test_questions_and_calls_with_gradients_and_within_a_backward_pass_are_not_timed(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 1.0, 1.0)
    leaf = torch.randn(1, 2, 1200, 32, requires_grad=True)
    seen: list[str] = []

    with machine(tmp_path, clock) as timings:
        for _ in range(40):
            assert why_not("tiled", check_call(*_tensors()), AUTO) == []  # a question is no call
            out = sdpa(leaf, leaf, leaf)
        out.register_hook(lambda grad: seen.append(_ask()))
        out.sum().backward()
        assert seen == ["torch"]
        assert (clock.runs, timings.known) == (0, {})
        assert _ask(times=1) == "tiled"
    assert clock.runs == 1


def test_compiled_calls_do_not_measure_and_use_what_is_known(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 1.0, 1.0)
    tensors = _tensors()
    compiled = torch.compile(lambda *given: sdpa(*given), backend="eager", fullgraph=True)
    with machine(tmp_path, clock):
        for _ in range(20):
            compiled(*tensors)
        assert clock.runs == 0
        assert _ask() == "tiled"
        torch.testing.assert_close(compiled(*tensors), sdpa(*tensors), atol=0, rtol=0)


FORK = """
import os, torch
from pascal_attn_core import explain
query = torch.randn(2, 4, 1200, 32)

def last_of_40():
    return [explain(query, query, query).splitlines()[0] for _ in range(40)][-1]

worker = os.fork()
if not worker:
    print(last_of_40(), flush=True)
    os._exit(0)
os.waitpid(worker, 0)
print(last_of_40())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_worker_does_not_measure_and_another_process_decides_as_this_one_has_measured(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    worker, parent = execute(FORK, env=environment).stdout.splitlines()
    assert "timed on this CPU at" not in worker
    assert "timed on this CPU at" in parent
    assert execute(FORK, env=environment).stdout.splitlines() == [parent] * 2
    (file,) = tmp_path.rglob("tiles-*.json")
    (row,) = json.loads(file.read_text())["milliseconds"]
    assert "torch" in row["times"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_timed_slice_is_small_and_of_the_same_kind(shape: Any) -> None:
    small = replace(shape, batch=min(2, shape.batch), num_heads=min(8, shape.num_heads), dtype="float32")
    small = replace(small, num_kv_heads=min(small.num_heads, shape.num_kv_heads) if shape.name != "gqa" else 2)
    given = replace(small, seq_len_q=min(4096, shape.seq_len_q), seq_len_kv=min(4096, shape.seq_len_kv)).make()
    options = {"is_causal": given.is_causal, "enable_gqa": given.enable_gqa}
    call = check_call(given.query, given.key, given.value, given.attn_mask, **options)
    sample = slice_of(call)
    found, kind = kind_of_call(sample), kind_of_call(call)
    assert found._replace(rows=0, kept=0) == kind._replace(rows=0, kept=0)  # type: ignore[union-attr]
    assert sample.num_scores * sample.head_dim <= 1 << 30
    for ours, theirs in ((sample.query, call.query), (sample.key, call.key), (sample.value, call.value)):
        assert ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    if isinstance(sample.attn_mask, Tensor) and shape.mask == "bool":
        assert sample.attn_mask.numel() <= MIB
    assert not isinstance(TORCH.plan(Request(sample, AUTO)), list)


def _kind(*args: Any, **options: Any) -> CallKind | None:
    return kind_of_call(check_call(*_tensors(*args), **options))


def test_calls_that_differ_in_what_matters_are_of_different_kinds() -> None:
    def padding(kept: int) -> Tensor:
        return (torch.arange(1200) < kept)[None, None, None]

    masks = [padding(1200), padding(300), torch.ones(1200, 1200).bool(), torch.zeros(1200, 1200), torch.zeros(1, 1200)]
    kinds = [_kind(), _kind(is_causal=True), _kind((1, 2, 1200, 40)), _kind((1, 2, 1200, 32), 77)]
    kinds += [_kind(attn_mask=mask) for mask in masks]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert _kind((1, 8, 3000, 32)) == _kind((3, 9, 5000, 32))
    assert _kind(attn_mask=masks[4] - 1e4) == _kind(attn_mask=padding(0))._replace(mask="float32 keys")  # type: ignore[union-attr]
    for options in ({"window": (64, 64)}, {"dropout_p": 0.5}, {"is_causal": True, "alignment": "lower_right"}):
        call = check_call(*_tensors((1, 2, 1200, 32), 1300), **options)  # type: ignore[arg-type]
        assert kind_of_call(call) is None


def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    count = Tensor.count_nonzero
    monkeypatch.setattr(Tensor, "count_nonzero", lambda tensor: looks.append(1) or count(tensor))
    call = check_call(*_tensors((1, 1, 2048, 16)), (torch.arange(2048) < 1000)[None, None, None])
    with machine(None, Clock()) as timings:
        for _ in range(6):
            timings.of(TiledRoute(TORCH), Request(call, AUTO))
    assert 0 < len(looks) <= 7


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, is_on, route in (
        ("1", False, "torch"),
        ("1", None, "torch"),
        ("1", True, "tiled"),
        ("0", None, "tiled"),
    ):
        monkeypatch.setenv(timing_table.NO_TIMING, variable)
        with machine(tmp_path, Clock(2.0, 1.0, 1.0, 1.0), is_on=is_on):
            assert _ask() == route


def test_a_slow_attempt_ends_a_timing_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([200.0, 150.0, 9.0])
    monkeypatch.setattr(timing_table, "milliseconds", lambda attempt, device: next(given))
    attempts: list[Callable[[], Any]] = [list, list, list]
    cpu = torch.device("cpu")
    assert timing_table.least_times(attempts, cpu, rounds=6, seconds=0.3) == [200.0, 150.0, float("inf")]
