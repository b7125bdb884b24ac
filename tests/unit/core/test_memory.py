"""PeakMemory is the proof of O(N) elsewhere, so here it is proved itself: against the allocator's own trace."""

import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from pascal_attn_core.observe.memory import PeakMemory, _room_in_control_groups, available_bytes, measure

SCALARS = 64  # bytes: numbers that a kernel wraps into a tensor by itself


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


@pytest.fixture
def query():
    return torch.randn(1, 2, 512, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: getattr(fn, "__name__", "custom_operator"))
def test_the_peak_equals_that_of_the_allocator(fn, query):
    expected = allocator_peak(fn, query)
    assert measure(fn, query).peak_bytes == pytest.approx(expected, abs=SCALARS)


@pytest.mark.parametrize("fn", [math_attention, a_loop_of_tiles, quadratic])
def test_inference_mode_hides_nothing(fn, query):
    expected = allocator_peak(fn, query)
    with torch.inference_mode():
        assert measure(fn, query).peak_bytes == pytest.approx(expected, abs=SCALARS)


def test_meta_gives_the_same_numbers_as_the_cpu(query):
    on_cpu, on_meta = measure(math_attention, query), measure(math_attention, query.to("meta"))
    assert on_meta.peak_bytes == pytest.approx(on_cpu.peak_bytes, abs=SCALARS)
    assert on_meta[3:] == on_cpu[3:]


def test_an_argument_returned_unchanged_costs_nothing(query):
    assert measure(lambda x: x.transpose(0, 1)[None], query)[1:] == (0, 0, 0, 0)


def test_views_and_bare_allocations_are_no_launches(query):
    def two_launches(x):
        x = x.view(-1).unsqueeze(0).expand(3, -1)[1:].detach()
        return torch.empty_like(x).copy_(x).mul_(2)

    assert measure(two_launches, query).launches == 2


def test_a_freed_storage_whose_address_is_used_again_is_counted_again():
    with PeakMemory() as peak:
        for _ in range(100):
            torch.ones(1000)
        assert peak.peak_bytes == 4000
        kept = [torch.ones(1000) for _ in range(10)]
    assert peak.peak_bytes == 40_000
    assert peak.launches == 110
    del kept


def test_a_storage_older_than_the_block_is_free_unless_it_grows():
    old = torch.ones(1000)
    with PeakMemory() as peak:
        old.add_(1)
        assert peak.peak_bytes == 0
        old.resize_(3000)
        assert peak.peak_bytes == 8000
        old.untyped_storage().resize_(16_000)
    assert peak.peak_bytes == 12_000


def test_memory_freed_in_the_block_makes_room_as_it_does_in_the_allocator():
    old = torch.ones(1000)
    with PeakMemory() as peak:
        old = old * 2  # the old one dies once the new one exists
        old = torch.cat([old, old])
    assert peak.peak_bytes == 8000


def test_a_cycle_lives_until_it_is_collected():
    gc.disable()
    try:
        with PeakMemory() as peak:
            cycle = [torch.ones(1000)]
            cycle.append(cycle)
            del cycle
            torch.ones(1000)
            assert peak.peak_bytes == 8000
            gc.collect()
            torch.ones(1500)
        assert peak.peak_bytes == 8000
    finally:
        gc.enable()


def test_blocks_nest():
    with PeakMemory() as outer:
        first = torch.ones(1000)
        with PeakMemory() as inner:
            second = first + 1
    assert (outer.peak_bytes, inner.peak_bytes) == (8000, 4000)
    assert (outer.launches, inner.launches) == (2, 1)
    del second


def test_entering_one_object_twice_is_an_error():
    peak = PeakMemory()
    with peak, pytest.raises(RuntimeError, match="must not be entered twice"):
        peak.__enter__()
    with peak:
        torch.ones(10)
    assert peak.peak_bytes == 40


def test_other_device_types_are_left_out():
    with PeakMemory("meta") as peak:
        torch.ones(1000)
        kept = torch.ones(10, device="meta")
    assert peak.peak_bytes == kept.nbytes


def test_an_operator_with_a_second_kernel_in_python_runs_its_real_one():
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad():  # upsample_nearest2d: called by its composite key it would crash the process
        found = measure(lambda: F.interpolate(image, scale_factor=2.0, mode="nearest"))
    assert (found.peak_bytes, found.launches) == (4 * image.nbytes, 1)


def test_a_sparse_tensor_is_no_error():
    assert measure(lambda x: (x.to_sparse() * 2).to_dense(), torch.eye(3)).out[1, 1] == 2


def test_only_cuda_can_do_without_following():
    with pytest.raises(ValueError, match="follow must be True on cpu, got False"):
        PeakMemory("cpu", follow=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("follow", [True, False])
def test_cuda_asks_its_allocator(follow):
    with PeakMemory("cuda", follow=follow) as peak:
        torch.ones(1 << 20, device="cuda")
    assert peak.peak_bytes == 4 << 20
    assert peak.launches == (1 if follow else 0)


def test_available_memory_is_a_plausible_amount():
    assert available_bytes("meta") is None
    available = available_bytes("cpu")
    assert sys.platform != "linux" or available is not None
    assert available is None or 1 << 20 < available < 1 << 50


def test_the_tightest_control_group_counts_and_its_page_cache_is_free(tmp_path):
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for path, limit in (("outer/inner", "max"), ("outer", "1000")):
        (tmp_path / path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / path / "memory.current").write_text("600\n")
        (tmp_path / path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")
    assert _room_in_control_groups(tmp_path, tmp_path / "cgroup") == [450]


def test_control_groups_of_the_first_version_are_read_too(tmp_path):
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("400\n")
    (group / "memory.stat").write_text("cache 1\n")
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    assert _room_in_control_groups(tmp_path, tmp_path / "cgroup") == [600]
