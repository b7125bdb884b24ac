"""The fused kernel and torch's timed against each other on a real card."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pascal_attn_core import sdpa
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import fused, route_named
from pascal_attn_core.routes.timing import Timings

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def timings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Timings]:
    """Nothing has been timed yet, on a card on which the kernel is a candidate, whichever this is."""
    monkeypatch.setattr(fused, "may_win", lambda call, as_it_came: True)
    parts = {Timings: lambda runtime: Timings(runtime, folder=lambda: tmp_path, is_on=True)}
    with using(Runtime(torch.device("cuda", torch.cuda.current_device()), parts=parts)) as runtime:
        yield runtime.part(Timings)


def _ask(timings: Timings, call: AttentionCall) -> float | None:
    return timings.fused_over_torch(route_named("fused"), call, 64 << 20)


def _call(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> AttentionCall:
    tensors = [torch.randn(1, 8, 2048, 64, device="cuda", dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
    return check_call(*tensors)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_ratio_is_found_once_and_kept(timings: Timings, dtype: torch.dtype, requires_grad: bool) -> None:
    call = _call(dtype, requires_grad=requires_grad)
    ratio = _ask(timings, call)
    assert ratio is not None
    assert 0.02 < ratio < 50
    assert _ask(timings, call) == ratio
    assert [path.name for path in timings.folder().iterdir()] == [timings.file_name()]


def test_nothing_is_timed_while_a_graph_is_captured(timings: Timings) -> None:
    call = _call()
    sdpa(call.query, call.key, call.value)
    timings.known.clear()
    for path in timings.folder().iterdir():
        path.unlink()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert _ask(timings, call) is None
        out = sdpa(call.query, call.key, call.value)
    graph.replay()
    torch.testing.assert_close(out, reference_sdpa(call.query, call.key, call.value)[0], atol=1e-5, rtol=1e-4)
    assert list(timings.folder().iterdir()) == []
    assert _ask(timings, call) is not None
