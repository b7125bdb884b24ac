"""Blocks of GGUF files expanded on a GPU: every bit against the definition on a CPU, and a layer by both ways."""

from __future__ import annotations

import pytest
import torch

from pascal_attn_core.fused.code.gguf_source import KERNELS
from pascal_attn_core.fused.code.source import gguf_variants
from pascal_attn_core.fused.gguf import why_not
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.gguf.matrix import GgufMatrix, linear
from pascal_attn_core.gguf_blocks import FORMATS, expand
from pascal_attn_core.machine.runtime import runtime_of

pytestmark = pytest.mark.gpu
_DEVICE = torch.device("cuda", torch.cuda.current_device())
if reason := why_not(_DEVICE, "Q8_0", torch.float16, torch.float32):
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("variant", gguf_variants(), ids=lambda variant: variant.name)
def test_every_variant_is_right_on_this_card(variant) -> None:
    assert runtime_of(_DEVICE).part(Kernels).largest_error(variant) == 0


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
