"""Blocks of GGUF files expanded and multiplied on a GPU: every bit against the definitions on a CPU, and times."""

import pytest
import torch

from pascal_attn_core.fused.code.kinds import KERNELS, PRODUCT_FORMATS
from pascal_attn_core.fused.launch.gguf import GgufLinearCall, gguf_linear_launches
from pascal_attn_core.fused.linear import run_product, why_no_expansion, why_no_product
from pascal_attn_core.fused.trust.verify_linear import expected_product, sane_blocks
from pascal_attn_core.gguf.matrix import GgufMatrix, linear
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

pytestmark = pytest.mark.gpu
_DEVICE = torch.device("cuda", torch.cuda.current_device())
if reason := why_no_expansion(_DEVICE, "Q8_0", torch.float16, torch.float32):
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("name", KERNELS)
def test_a_whole_layer_has_the_definitions_weights(name: str) -> None:
    rows, columns, (weights, size, _) = 3072, 3072, FORMATS[name]
    data = torch.randint(0, 40, (rows * columns // weights, size), dtype=torch.uint8)
    weight = GgufMatrix(data.cuda(), name, (rows, columns), torch.float16, torch.float32, torch.float32)
    right = expand(data, name, torch.float16, table=torch.float32).float().view(rows, columns)
    found = torch.cat([weight.rows(some) for some in weight.slices()])
    assert torch.equal(found.cpu(), right)
    x = torch.randn(33, columns)
    torch.testing.assert_close(linear(x.cuda(), weight, None).cpu(), x @ right.T, rtol=1e-3, atol=1e-2)


needs_dp4a = pytest.mark.skipif(bool(why_no_product(_DEVICE, "Q8_0", 100, 8)), reason="needs dp4a")


def _call(name: str, rows: int, cols: int, columns: int, dtype: torch.dtype) -> GgufLinearCall:
    """On the CPU, so that its numbers are the same on every card."""
    blocks = sane_blocks(name, cols, columns, torch.Generator().manual_seed(3))
    return GgufLinearCall(
        torch.randn(rows, columns).to(dtype), blocks, name, torch.randn(cols), torch.empty(rows, cols)
    )


@needs_dp4a
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCT_FORMATS)
def test_every_bit_of_a_product_is_that_of_the_definition(name: str, dtype: torch.dtype) -> None:
    for rows, cols, columns in ((1, 320, 1280), (16, 77, 768), (333, 640, 768), (1025, 70, 2304)):
        here = _call(name, rows, cols, columns, dtype)
        there = here._replace(**{key: getattr(here, key).to(_DEVICE) for key in ("x", "blocks", "bias")})
        for shape in (8, 4):
            if why_no_product(_DEVICE, name, rows, shape):
                continue
            call = there._replace(out=torch.full((rows, cols), float("nan"), dtype=dtype, device=_DEVICE))
            run_product(call, shape)
            right = expected_product(here, gguf_linear_launches(call, shape)[-1].function)
            assert torch.equal(call.out.cpu(), right.to(dtype))
