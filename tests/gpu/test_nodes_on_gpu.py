"""The ComfyUI pack's engine on a GPU: clocks and memory from the device, CUDA graphs."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from attn_support.comfy.pack import load_pack

from pascal_attn_core.call import Arguments
from pascal_attn_core.machine.device import MIB
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.gpu


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The pack's engine without ComfyUI: nobody cancels, and it computes on the first GPU."""
    name = load_pack().__name__
    host, runs = sys.modules[f"{name}.nodes.comfy.host"], sys.modules[f"{name}.nodes.engine.runs"]
    monkeypatch.setattr(host, "throw_if_interrupted", lambda: None)
    monkeypatch.setattr(host, "compute_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(host, "prompt_id", lambda: "")
    yield sys.modules[f"{name}.nodes.engine.engine"]
    runs._recent.clear()


def _engine(module: ModuleType, **options: object) -> object:
    return module.Engine(module.PatchSettings(min_keys=0, **options), "Flux", "diffusion model", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_time_and_memory_come_from_the_device(engine_module: ModuleType, dtype: torch.dtype) -> None:
    engine = _engine(engine_module)
    query, key, value = (torch.randn(1, 8, 4096, 64, device="cuda", dtype=dtype) for _ in range(3))
    run = engine.begin()
    out = engine.attend(Arguments(query, key, value), block="double 0")
    engine.end()
    expected, _ = reference_sdpa(query[:, :, :64].double(), key.double(), value.double())
    torch.testing.assert_close(out[:, :, :64].double(), expected, rtol=0, atol=2e-3)
    [tally] = run.tallies.values()
    assert 0 < tally.elapsed_ms < 10_000
    assert tally.extra_bytes <= 70 * MIB
    assert run.peak_bytes > 4 * query.numel() * query.element_size()
    assert run.sample.query.device.type == "cpu"


def test_a_cuda_graph_can_be_captured(engine_module: ModuleType) -> None:
    engine = _engine(engine_module)
    query = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.float16)
    expected = engine.attend(Arguments(query, query, query), block="warm-up")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = engine.attend(Arguments(query, query, query), block="captured")
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)
