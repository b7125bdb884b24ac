"""The contract on a GPU: memory, graphs, autocast. Answers and gradients are in the random calls of test_fuzz.py."""

import pytest
import torch

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.device import MIB, device_info
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes.tiled import TiledRoute
from pascal_attn_core.tiled.plan import plan_call

TILES = TiledRoute()
pytestmark = pytest.mark.gpu
TILED, FUSED = AttentionConfig(route="tiled"), AttentionConfig(route="fused")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The allocator hands out whole blocks: 512 bytes for each tensor, up to 2 MiB for each size class it opens.
ALLOCATOR_MIB = 4


def _large(dtype: torch.dtype = torch.float32, kv_heads: int = 8) -> list[torch.Tensor]:
    shapes = ((4, 32, 4096, 64), (4, kv_heads, 4096, 64), (4, kv_heads, 4096, 64))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("budget_mib", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_allocator_sees_no_more_than_the_plan(budget_mib: int, dtype: torch.dtype, is_causal: bool) -> None:
    query, key, value = _large(dtype)
    config = AttentionConfig(route="tiled", budget_mib=budget_mib)
    call = check_call(query, key, value, is_causal=is_causal, enable_gqa=True)
    plan = plan_call(call, device_info("cuda"), config)
    TILES.forward(call, config, with_lse=False)  # cuBLAS takes its workspace once
    with PeakMemory("cuda", follow=False) as peak:
        out = TILES.forward(call, config, with_lse=False)
    extra = peak.peak_bytes - out[0].numel() * out[0].element_size()
    assert plan.extra_bytes <= budget_mib * MIB
    assert extra <= plan.extra_bytes + ALLOCATOR_MIB * MIB


def test_no_route_takes_more_than_the_default_budget() -> None:
    for dtype in DTYPES:
        inputs = _large(dtype)
        sdpa(*inputs, enable_gqa=True)
        with PeakMemory("cuda", follow=False) as peak:
            out = sdpa(*inputs, enable_gqa=True)
        assert peak.peak_bytes - out.numel() * out.element_size() <= (64 + ALLOCATOR_MIB) * MIB


@pytest.mark.parametrize(
    ("config", "queries", "keys", "mask"),
    [*((TILED, 200, 200, mask) for mask in (None, torch.bool, torch.float32)), (FUSED, 1, 2000, None),
     (FUSED, 200, 2000, None)],
)  # fmt: skip
def test_a_captured_graph_repeats_the_call_on_new_numbers(
    config: AttentionConfig, queries: int, keys: int, mask: torch.dtype | None
) -> None:
    query, key, value = (torch.randn(1, 4, n, 64, device="cuda") for n in (queries, keys, keys))
    bias = None if mask is None else (torch.rand(queries, keys, device="cuda") < 0.7).to(mask)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            sdpa(query, key, value, bias, config=config)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(query, key, value, bias, config=config)
    for tensor in (query, key, value):
        tensor.copy_(torch.randn_like(tensor) * 3)
    graph.replay()
    torch.testing.assert_close(out, reference_sdpa(query, key, value, bias)[0], atol=1e-5, rtol=1e-4)


def test_a_real_lack_of_memory_is_survived() -> None:
    query, key, value = (torch.randn(1, 8, 4096, 64, device="cuda") for _ in range(3))
    expected = sdpa(query, key, value, config=TILED)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    # Room for the output and some MiB, far less than the budget.
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + (28 << 20)) / total))
    try:
        config = AttentionConfig(route="tiled", budget_mib=512)
        torch.testing.assert_close(sdpa(query, key, value, config=config), expected, atol=1e-5, rtol=1e-4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
