"""Linear layers of a float32 model in float16 on a GPU: the error, rows beyond float16's range, and the time."""

import pytest
import torch
from torch import nn

from pascal_attn_core import patch_linear_float16
from pascal_attn_core.int8.float16 import in_float16

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "outs", "columns"), [(17, 96, 384), (4096, 3072, 3072), (4096, 3072, 12288)])
def test_rows_beyond_float16_err_by_rounding_and_a_faster_layer_is_taken(rows: int, outs: int, columns: int) -> None:
    layer = nn.Linear(columns, outs, device="cuda").requires_grad_(False)
    x = torch.randn(rows, columns, device="cuda") * torch.logspace(-3, 8, rows, device="cuda")[:, None]
    exact = layer.double()(x.double())
    found, model = in_float16(layer.float(), x), nn.Sequential(layer)
    assert ((found - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.002
    with patch_linear_float16(model, include="*") as patch:
        model(x)
        (state,) = patch.report().states
    print(f"\n{rows} x {outs} x {columns}: {state.state}, {state.why}")
    assert state.state in ("on", "refused")
    assert "error" in state.why or "not faster" in state.why
