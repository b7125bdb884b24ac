"""The fused kernel and torch's timed against each other on a real card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pascal_attn_core import explain, sdpa, timing
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.device import device_info
from pascal_attn_core.fused import route as fused
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, and torch.cuda.is_available() is False", allow_module_level=True)

BUDGET = 64 << 20


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a card on which the kernel is thought of, whichever this is."""
    monkeypatch.setattr(timing, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setattr(fused, "may_win", lambda call, torch_has_a_kernel: True)
    return tmp_path


def _call(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> AttentionCall:
    tensors = [torch.randn(1, 8, 2048, 64, device="cuda", dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
    return check_call(*tensors)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_ratio_is_found_once_and_kept(folder: Path, dtype: torch.dtype, requires_grad: bool) -> None:
    call = _call(dtype, requires_grad=requires_grad)
    ratio = timing.fused_over_torch(call, BUDGET)
    assert ratio is not None
    assert 0.02 < ratio < 50
    assert timing.fused_over_torch(call, BUDGET) == ratio
    assert [path.name for path in folder.iterdir()] == [timing.file_name(device_info("cuda"))]


def test_the_choice_and_its_reason_follow_the_timing() -> None:
    call = _call()
    said = explain(call.query, call.key, call.value).splitlines()[0]
    ratio = timing.fused_over_torch(call, BUDGET)
    assert ratio is not None
    assert said.startswith("route fused" if ratio < 1 else "route torch")
    assert f"{ratio:.2f}" in said
    out = sdpa(call.query, call.key, call.value)
    torch.testing.assert_close(out, reference_sdpa(call.query, call.key, call.value)[0], atol=1e-5, rtol=1e-4)


def test_nothing_is_timed_while_a_graph_is_captured(folder: Path) -> None:
    call = _call()
    sdpa(call.query, call.key, call.value)
    timing._known.clear()
    for path in folder.iterdir():
        path.unlink()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert timing.fused_over_torch(call, BUDGET) is None
        out = sdpa(call.query, call.key, call.value)
    graph.replay()
    torch.testing.assert_close(out, reference_sdpa(call.query, call.key, call.value)[0], atol=1e-5, rtol=1e-4)
    assert list(folder.iterdir()) == []
    assert timing.fused_over_torch(call, BUDGET) is not None


def test_the_two_take_turns_and_little_memory() -> None:
    call = _call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    timing.fused_over_torch(call, BUDGET)
    assert torch.cuda.max_memory_allocated() - before < 96 << 20
    assert torch.cuda.memory_allocated() == before
