"""Linear layers in 8-bit integers on a GPU: every bit against the definition on a CPU, and time beside float32."""

import pytest
import torch
import torch.nn.functional as F
from attn_support.fused.linear import before_activation

from pascal_attn_core.contest.timing_table import median_times
from pascal_attn_core.fused.code.kinds import ROTATIONS, TILES
from pascal_attn_core.fused.launch.linear import linear_launches
from pascal_attn_core.fused.linear import LinearCall, run_linear, why_not
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.reference.int8_rows import Int8Matrix, quantize_rows

pytestmark = pytest.mark.gpu
_DEVICE = torch.device("cuda", torch.cuda.current_device())
if reasons := why_not(_DEVICE, columns=64, untried=True):
    pytest.skip(reasons[0], allow_module_level=True)


def _call(
    rows: int, cols: int, columns: int, dtype: torch.dtype = torch.float16, rotation: int = 0, activation: str = "none"
) -> LinearCall:
    """Made on the CPU, so that its numbers are the same on every card."""
    weight = quantize_rows(torch.randn(cols * (2 if activation == "geglu" else 1), columns), rotation)
    weight = weight._replace(codes=weight.codes.cuda(), scales=weight.scales.cuda())
    bias = torch.randn(weight.codes.shape[0], dtype=dtype)
    out = torch.full((rows, cols), float("nan"), dtype=dtype, device="cuda")
    return LinearCall(torch.randn(rows, columns).to(dtype).cuda(), weight, bias.cuda(), activation, out)


def _assert_bits(call: LinearCall) -> None:
    assert torch.equal(call.out.cpu(), before_activation(call).to(call.out.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_every_bit_is_that_of_the_definition(rotation: int, dtype: torch.dtype) -> None:
    for rows, cols, columns in ((1, 320, 1280), (17, 77, 512), (333, 640, 768), (1025, 1030, 2304)):
        call = _call(rows, cols, columns, dtype, rotation)
        run_linear(call)
        _assert_bits(call)


@pytest.mark.parametrize("product", TILES)
def test_every_product_on_sizes_at_the_edges_of_its_tiles(product: str) -> None:
    kernels, tile = runtime_of(_DEVICE).part(Kernels), TILES[product]
    for extra in (-1, 0, 1):
        call = _call(3 * tile.rows + extra, 3 * tile.cols + extra, 100 + 4 * extra)
        kernels.run(linear_launches(call, 1, product))
        _assert_bits(call)


def test_long_rows_and_nan() -> None:
    call = _call(40, 24, 20000, torch.float32)
    call.x[3, 19999], call.x[7, 0] = float("nan"), float("inf")
    run_linear(call)
    finite = call.out.isfinite().all(dim=1).cpu()
    assert (~finite).nonzero().flatten().tolist() == [3, 7]
    assert torch.equal(call.out.cpu()[finite], before_activation(call)[finite])


def test_a_layer_in_a_graph() -> None:
    call = _call(64, 128, 256)
    run_linear(call)
    right = call.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_linear(call)
    call.out.zero_()
    graph.replay()
    assert torch.equal(call.out, right)


@pytest.mark.timed
@pytest.mark.skipif(torch.cuda.get_device_capability() >= (8, 0), reason="float32 is as fast there, or has TF32")
@pytest.mark.parametrize(("rows", "cols", "columns"), [(1024, 1280, 1280), (4096, 3072, 3072), (4096, 10240, 1280)])
def test_it_takes_less_than_40_percent_of_the_time_of_float32(rows: int, cols: int, columns: int) -> None:
    call = _call(rows, cols, columns, torch.float32, rotation=256)
    weight: Int8Matrix = call.weight  # type: ignore[assignment]
    wide = weight.float()
    ours, theirs = median_times([lambda: run_linear(call), lambda: F.linear(call.x, wide, call.bias)], _DEVICE)
    print(f"\n{rows} x {cols} x {columns}: {ours:.2f} ms, float32 {theirs:.2f} ms, {theirs / ours:.2f} times")
    assert theirs / ours >= 2.5
