"""The fused kernels on a GPU: the emulation's table with fresh numbers, streams, threads, graphs, memory."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from attn_support.oracle import assert_attention
from attn_support.table import TABLE, Case

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import HEAD_DIMS, KINDS, Variant, all_variants, amd_variants
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.gpu.hip import HipRuntime
from pascal_attn_core.fused.launch.plan import tensor_plan
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime, runtime_of, using
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import why_not

pytestmark = pytest.mark.gpu
FUSED = AttentionConfig(route="fused")


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_kernel_gives_the_answer_of_the_definition(case: Case) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if case.dtype == torch.float32 else (case.dtype,):
        inputs, options = replace(case, dtype=dtype, name=f"{case.name} {dtype}").build(device="cuda")
        if why_not("fused", check_call(*inputs, **options), FUSED):
            with pytest.raises(UnsupportedAttention):
                sdpa(*inputs, **options, config=FUSED)
            continue
        out, lse = sdpa_with_lse(*inputs, **options, config=FUSED)
        assert_attention(out, lse, inputs, options, dtype)


@pytest.mark.slow  # what does not ship is compiled
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_is_right_on_this_card(kind: str, head_dim: int) -> None:
    kernels = _kernels()
    variants = [v for v in _variants(kernels) if (v.kind, v.head_dim) == (kind, head_dim)]
    if not variants:
        pytest.skip("has none for this card")
    for variant in variants:
        error = kernels.largest_error(variant)
        assert error <= verify.tolerance(variant), variant.name


def _kernels() -> Kernels:
    return runtime_of(torch.device("cuda", torch.cuda.current_device())).part(Kernels)


def _variants(kernels: Kernels) -> list[Variant]:
    """All that a call can ask for on this card, NVIDIA's or AMD's."""
    if kernels.variant_arch:
        return list(amd_variants(kernels.arch))
    return [variant for variant in all_variants() if variant.runs_on(kernels.info.capability or (0, 0))]


def _large(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, heads, 4096, 64, device="cuda", dtype=dtype) for heads in (8, 2, 2)]


_grouped = functools.partial(sdpa, enable_gqa=True, config=FUSED)


def test_two_streams_at_once_do_not_disturb_each_other() -> None:
    calls = [_large(), _large()]
    expected = [_grouped(*call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, call in zip(streams, calls):
            with torch.cuda.stream(stream):
                results.append(_grouped(*call))
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))


def test_two_threads_at_once_do_not_disturb_each_other() -> None:
    calls = [_large(torch.float16), _large(torch.float16)]
    expected = [_grouped(*call) for call in calls]

    def work(call: list[torch.Tensor], right: torch.Tensor) -> bool:
        return all(torch.equal(_grouped(*call), right) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, calls, expected))


@pytest.fixture
def first_use() -> Iterator[Kernels]:
    """The kernels of this card as a new process finds them: none is loaded or checked yet."""
    with using(Runtime(torch.device("cuda", torch.cuda.current_device()))) as runtime:
        yield runtime.part(Kernels)


def _check_a_training_step(attend: Callable[..., torch.Tensor], tokens: int = 100) -> None:
    leaves = [torch.randn(1, 2, tokens, 64, device="cuda", requires_grad=True) for _ in range(3)]
    out, expected = attend(*leaves), reference_sdpa(*leaves, is_causal=True)[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    out.square().sum().backward()
    for leaf, w in zip(leaves, wanted):
        torch.testing.assert_close(leaf.grad, w, atol=1e-4, rtol=1e-3)


def _attend(*tensors: torch.Tensor) -> torch.Tensor:
    return sdpa(*tensors, is_causal=True, config=FUSED)


def test_a_compiled_call_and_its_gradients_are_one_graph(first_use: Kernels) -> None:
    for _ in range(2):
        _check_a_training_step(torch.compile(_attend, fullgraph=True, backend="aot_eager"))
    assert len(first_use._checked) == 3


def test_nothing_is_checked_while_a_graph_is_captured(first_use: Kernels) -> None:
    query, key, value = (torch.randn(1, 4, 300, 64, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(query, key, value, config=FUSED)
    graph.replay()
    assert not first_use._checked
    torch.testing.assert_close(out, reference_sdpa(query, key, value)[0], atol=1e-5, rtol=1e-4)
    sdpa(query, key, value, config=FUSED)
    assert first_use._checked


def test_the_forward_pass_takes_no_memory_but_its_output() -> None:
    call = _large()
    _grouped(*call)
    with PeakMemory("cuda", follow=False) as peak:
        out = _grouped(*call)
    assert peak.peak_bytes - out.numel() * out.element_size() <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_the_same_bits_every_time(dtype: torch.dtype) -> None:
    leaves = [t.requires_grad_() for t in _large(dtype)]
    grads = [torch.autograd.grad(_grouped(*leaves).float().sum(), leaves) for _ in range(3)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))


def test_a_card_with_prebuilt_kernels_compiles_nothing() -> None:
    if not prebuilt.ships_for(_kernels().arch):
        pytest.skip("nothing ships for this card")
    device = torch.device("cuda", torch.cuda.current_device())
    is_amd = bool(_kernels().variant_arch)
    gpu = HipRuntime(find_compiler=lambda: None) if is_amd else CudaRuntime(find_compiler=lambda arch: None)
    without_compiler = {Kernels: lambda runtime: Kernels(runtime, gpu=gpu)}
    with using(Runtime(device, parts=without_compiler)):
        _grouped(*_large())


TENSOR = AttentionConfig(route="fused-tensor")


@pytest.fixture
def cut() -> list[torch.Tensor]:
    """Query, key and value of a call whose last tiles this card takes in parts."""
    info = _kernels().info
    if info.kind != "cuda" or (info.capability or (0, 0)) < (7, 0):
        pytest.skip("needs tensor cores")
    tiles = info.num_sms + info.num_sms * 6 // 10  # of 256 rows
    three = [torch.randn(1, 1, n, 64, device="cuda", dtype=torch.float16) for n in (256 * tiles, 4096, 4096)]
    found = tensor_plan(check_call(*three), info.num_sms, info.capability or (0, 0))
    if found.pieces is None or not found.pieces.slots:
        pytest.skip("the tiles fill this card")
    return three


def test_tiles_in_parts_have_the_answer_of_the_definition(cut: list[torch.Tensor]) -> None:
    out, lse = sdpa_with_lse(*cut, config=TENSOR)
    expected, expected_lse = reference_sdpa(*(t.float() for t in cut))
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def test_tiles_in_parts_have_the_same_bits_whichever_block_is_the_last(cut: list[torch.Tensor]) -> None:
    """Beside other work, so that blocks end in another order each time."""
    expected = sdpa(*cut, config=TENSOR)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for i in range(50):
        with torch.cuda.stream(other):
            for _ in range(i % 7):
                noise @ noise
        assert torch.equal(sdpa(*cut, config=TENSOR), expected)


def test_a_captured_graph_makes_the_counters_of_parts_zero_each_time(cut: list[torch.Tensor]) -> None:
    sdpa(*cut, config=TENSOR)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(*cut, config=TENSOR)
    for _ in range(3):
        for tensor in cut:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.testing.assert_close(out, sdpa(*cut, config=TENSOR), atol=0, rtol=0)
