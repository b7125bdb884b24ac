"""These tests check what ran and why, a function between the blocks, and PeakMemory by the allocator's own trace."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.machine.room import _room_in_control_groups
from pascal_attn_core.observe.memory import PeakMemory, measure
from pascal_attn_core.observe.progress import between_blocks, this_thread

TILED = AttentionConfig(route="tiled")


def _call(length: int = 70, **options) -> None:
    query = torch.randn(1, 2, length, 8)
    sdpa(query, query, query, **options)


def test_calls_of_one_kind_are_counted_together_with_shapes_mask_route_and_reason() -> None:
    with record() as report:
        for _ in range(3):
            _call(config=TILED)
        _call(is_causal=True, config=TILED)
        _call(40, config=AttentionConfig(route="math"))
    assert sorted(stats.count for stats in report.calls.values()) == [1, 1, 3]
    assert report.routes() == {"tiled": 4, "math": 1}
    assert list(report.routes()) == ["tiled", "math"]
    with record() as report:
        _call(window=(3, 4), config=TILED)
    text = report.text()
    assert "1 attention calls: 1 tiled" in text
    assert "q[1, 2, 70, 8] k[1, 2, 70, 8] float32 mask window (3, 4)" in text
    assert "asked for by name" in text


def test_blocks_say_how_many_were_bounded() -> None:
    with record() as report:
        _call(config=TILED)
        _call(config=AttentionConfig(route="tiled", softmax="online"))
    assert "bounded: " in report.text()
    with record() as nothing:
        pass
    assert nothing.total == 0
    assert str(nothing) == nothing.text() == "0 attention calls"


def test_reports_can_be_nested_and_see_other_threads() -> None:
    with record() as outer:
        _call()
        with record() as inner, ThreadPoolExecutor(1) as pool:
            pool.submit(_call).result()
        _call()
    assert (outer.total, inner.total) == (3, 1)


TILES = AttentionConfig(route="tiled", q_block=32, kv_block=64)


def test_every_block_reports_its_share_and_the_last_is_the_whole() -> None:
    seen: list[tuple[int, int]] = []
    query = torch.randn(1, 2, 128, 16)
    with between_blocks(lambda done, total: seen.append((done, total))):
        out = sdpa(query, query, query, config=TILES)
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert [done for done, _ in seen] == list(range(1, totals.pop() + 1))
    assert len(seen) >= 4
    assert torch.equal(out, sdpa(query, query, query, config=TILES))


def test_what_the_checkpoint_raises_ends_the_call_and_the_next_is_clean() -> None:
    query = torch.randn(1, 2, 128, 16)
    expected = sdpa(query, query, query, config=TILES)
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), between_blocks(stop):
        sdpa(query, query, query, config=TILES)
    assert seen == [1, 2]
    assert this_thread.checkpoint is None
    assert torch.equal(sdpa(query, query, query, config=TILES), expected)


def test_it_is_this_threads_alone_and_nests() -> None:
    seen: list[str] = []
    query = torch.randn(1, 2, 128, 16)
    with between_blocks(lambda *_: seen.append("outer")):
        other = threading.Thread(target=lambda: sdpa(query, query, query, config=TILES))
        other.start()
        other.join()
        assert seen == []
        with between_blocks(lambda *_: seen.append("inner")):
            sdpa(query, query, query, config=TILES)
        assert set(seen) == {"inner"}
        sdpa(query, query, query, config=TILES)
    assert set(seen) == {"inner", "outer"}


def allocator_peak(fn, *args):
    """The peak according to every allocation and release that torch's CPU allocator reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = fn(*args)  # noqa: F841
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def math_attention(query):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, query, query)


def gradient_left_in_the_leaf(query):
    leaf = query.detach().requires_grad_()
    math_attention(leaf).square().sum().backward()
    return leaf.grad


def resized_buffers(query):
    small, large = torch.empty(0), torch.empty(0)
    small.resize_(1000)
    large.resize_(50_000)
    torch.mul(query, 2, out=(buffer := torch.empty(0)))
    return buffer


def a_loop_of_tiles(query):
    out = torch.empty_like(query)
    for start in range(0, query.shape[-2], 64):
        rows = query[..., start : start + 64, :]
        out[..., start : start + 64, :] = (rows @ query.transpose(-1, -2)).softmax(-1) @ query
    return out


@torch.library.custom_op("pascal_test::quadratic", mutates_args=())
def quadratic(query: torch.Tensor) -> torch.Tensor:
    return (query @ query.transpose(-1, -2)).softmax(-1) @ query


FUNCTIONS = [math_attention, gradient_left_in_the_leaf, resized_buffers, a_loop_of_tiles, quadratic]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: getattr(fn, "__name__", "custom_operator"))
def test_the_peak_equals_that_of_the_allocator(fn):
    query = torch.randn(1, 2, 512, 32, generator=torch.Generator().manual_seed(0))
    expected = allocator_peak(fn, query)
    assert measure(fn, query).peak_bytes == pytest.approx(expected, abs=64)


def test_a_storage_older_than_the_block_is_free_unless_it_grows_and_makes_room_once_it_is_freed():
    old = torch.ones(1000)
    with PeakMemory() as peak:
        old.add_(1)
        assert peak.peak_bytes == 0
        old.resize_(3000)
        assert peak.peak_bytes == 8000
        old.untyped_storage().resize_(16_000)
    assert peak.peak_bytes == 12_000
    old = torch.ones(1000)
    with PeakMemory() as peak:
        old = old * 2  # the old one dies once the new one exists
        old = torch.cat([old, old])
    assert peak.peak_bytes == 8000


UNIFIED = {"memory.current": "600", "memory.stat": "anon 1\ninactive_file 50"}
FIRST = {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "400", "memory.stat": "cache 1"}


@pytest.mark.parametrize(
    ("own", "groups", "room"),
    [
        ("0::/a/b", {"a/b": UNIFIED | {"memory.max": "max"}, "a": UNIFIED | {"memory.max": "1000"}}, 450),
        ("5:cpu,cpuacct:/job\n4:memory:/job", {"memory/job": FIRST}, 600),
    ],
)
def test_the_tightest_control_group_counts_and_its_page_cache_is_free(own, groups, room, tmp_path):
    for group, files in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / group / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(f"{own}\n")
    assert _room_in_control_groups(tmp_path, tmp_path / "cgroup") == [room]
