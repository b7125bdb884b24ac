"""Streams and events for real: two streams of one card, and two cards where there are two."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.machine.runtime import Runtime, runtime_of, using
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.routes.several import Speeds

pytestmark = pytest.mark.gpu
HOME = torch.device("cuda", 0)
COUNT = torch.cuda.device_count()
needs_two = pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, there are {COUNT}")
OTHERS = ["cuda:0", pytest.param("cuda:1", marks=needs_two)]


@pytest.fixture(autouse=True)
def _helpers_of_its_own() -> Iterator[None]:
    with using(Runtime(HOME)):
        yield


def _inputs(layout: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = [torch.randn(2, 8, 2048, 64, device=HOME, dtype=dtype) for _ in range(3)]
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors] if layout == "tokens" else tensors


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("route", ["torch", "tiled"])
def test_results_are_those_of_one_device(other: str, layout: str, route: str) -> None:
    alone = AttentionConfig(route=route)
    shared = replace(alone, devices=("cuda:0", other), share_from_tokens=1)
    inputs = _inputs(layout)
    mask = torch.rand(2, 1, 1, 2048, device=HOME) < 0.8
    for given, options in (((), {}), ((mask,), {}), ((), {"is_causal": True})):
        with record() as report:
            out = sdpa(*inputs, *given, **options, config=shared)
        expected = sdpa(*inputs, *given, **options, config=alone)
        if report.routes() == {"several": 1}:
            (stats,) = report.calls.values()
            assert stats.remarks == {}
        else:
            ((key, _),) = report.calls.items()
            assert "on one device: several heads share a step" in key.why
        if torch.cuda.get_device_name(HOME) == torch.cuda.get_device_name(torch.device(other)):
            assert torch.equal(out, expected)
        else:
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("other", OTHERS)
def test_many_calls_without_a_wait_between_them(other: str) -> None:
    """Memory of one call is given out again in the next: nothing may still be in flight in it."""
    alone = AttentionConfig(route="torch")
    shared = replace(alone, devices=("cuda:0", other), share_from_tokens=1)
    first = _inputs("tokens")
    expected, found = first[0], first[0]
    for _ in range(20):
        expected = sdpa(expected, first[1], first[2], config=alone)
        found = sdpa(found * 1.0, first[1].clone(), first[2].clone(), config=shared)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("other", OTHERS)
def test_the_caller_may_use_a_stream_of_its_own(other: str) -> None:
    shared = AttentionConfig(route="torch", devices=("cuda:0", other), share_from_tokens=1)
    inputs = _inputs("heads")
    expected = sdpa(*inputs, config=replace(shared, devices=()))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(HOME)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [t + 0 for t in inputs]
        out = sdpa(*late, config=shared)
        total = out.sum()
    torch.testing.assert_close(total, expected.sum())
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("other", OTHERS)
def test_shares_are_timed(other: str) -> None:
    runtime = Runtime(HOME, parts={Speeds: lambda own: Speeds(own, folder=lambda: None, is_on=True)})
    with using(runtime):
        config = AttentionConfig(devices=("cuda:0", other), share_from_tokens=1, math_limit_mib=0)
        inputs = _inputs("heads")
        out = sdpa(*inputs, config=config)
        torch.testing.assert_close(out, sdpa(*inputs, config=replace(config, devices=())), atol=1e-5, rtol=1e-4)
        (times,) = runtime_of(HOME).part(Speeds).known.values()
        assert times is not None
        assert min(times.values()) > 0


@needs_two
def test_memory_of_the_first_card() -> None:
    config = AttentionConfig(route="torch", devices=("cuda:0", "cuda:1"), share_from_tokens=1)
    inputs = _inputs("heads")
    sdpa(*inputs, config=config)
    with PeakMemory(HOME, follow=False) as alone:
        sdpa(*inputs, config=replace(config, devices=()))
    with PeakMemory(HOME, follow=False) as shared:
        out = sdpa(*inputs, config=config)
    out_bytes = out.numel() * out.element_size()
    assert shared.peak_bytes <= alone.peak_bytes + 3 * out_bytes
