"""8-bit linear layers whose weights their host stores as 8-bit floats, or as tensors that expand themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pascal_attn_core.int8 import Int8Weight, patch_linear_int8
from pascal_attn_core.int8.layer import WEIGHTS
from pascal_attn_core.int8.stored import FLOATS_8

ROWS, COLUMNS = 96, 128


class Scaled(Tensor):
    """Codes and a scale, as hosts have them: it says that it is float, and expands itself for what it does not know."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, columns: int = COLUMNS) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, (len(codes), columns), dtype=torch.float32)  # type: ignore[return-value]

    def __init__(self, codes: Tensor, scale: Tensor, columns: int = COLUMNS):
        self.codes, self.scale = codes, scale

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return nn.Parameter(Scaled(self.codes.clone(), self.scale.clone()), requires_grad=False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return Scaled(args[0].codes, args[0].scale)
        plain = tree_map(lambda each: each.dequantize() if isinstance(each, Scaled) else each, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Casting(nn.Linear):
    """A host's layer, which casts its weight in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def scaled(weight: Tensor) -> Scaled:
    scale = weight.abs().amax() / 448
    return Scaled((weight / scale).to(torch.float8_e4m3fn), scale)


def layer(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    module = Casting(COLUMNS, ROWS).requires_grad_(False)
    weight = scaled(module.weight) if kind == "scaled" else module.weight.to(kind)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return nn.ModuleList([module])


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 80, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", [*FLOATS_8, "scaled"], ids=str)
def test_in_8_bits_by_the_error_to_the_files_weight_and_back(kind: Any, weights: str, x: Tensor) -> None:
    model = layer(kind)
    module, stored = model[0], model[0].weight
    expected = module(x)
    with patch_linear_int8(model, weights=weights) as patch:
        out = module(x)
        assert torch.equal(module(x), out), "also by the check of the second call"
        (line,) = patch.report().lines
        assert f"{line.format}, 0.01 -> 0.01 MiB, error" in patch.report().text()
        assert isinstance(module.weight, Int8Weight)
        assert torch.equal(copy.deepcopy(model)[0](x), expected) or weights == "free"
    exact = F.linear(x.double(), stored.dequantize().double() if kind == "scaled" else stored.double())
    error = (out - module.bias - exact).norm() / exact.norm()
    assert line.error == pytest.approx(error.item(), rel=1e-3)
    assert 0.003 < error < 0.015
    codes = str(torch.float8_e4m3fn if kind == "scaled" else kind).removeprefix("torch.")
    assert line.format == codes + (" in a Scaled" if kind == "scaled" else "")
    assert (line.float_bytes, line.int8_bytes) == (ROWS * COLUMNS + 4 * (kind == "scaled"), ROWS * (COLUMNS + 4))
    if weights != "free":
        assert torch.equal(module(x), expected)
        assert module.weight is stored


def test_what_is_left_and_named(x: Tensor) -> None:
    model = nn.ModuleList(layer(kind)[0] for kind in (torch.float8_e4m3fn, torch.uint8, "scaled"))
    model[0].register_buffer("weight_scale", torch.ones(1))
    model[2].weight = nn.Parameter(Scaled(torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8), torch.ones(1)))
    model.append(layer(torch.float32)[0])
    model.append(layer("scaled")[0])
    model[4].weight = nn.Parameter(Scaled(torch.zeros(ROWS, COLUMNS, dtype=torch.int8), torch.ones(1)))
    report = patch_linear_int8(model).report()
    assert {line.name: (line.state, line.why) for line in report.lines} == {
        "0": ("unable", "its weight is float8_e4m3fn with a scale of the module's own (weight_scale)"),
        "1": ("unable", "its weight is uint8"),
        "2": ("off", "uint8 in a Scaled takes less memory than 8 bits"),
        "3": ("waiting", "not called yet"),
        "4": ("unable", "its weight is int8 in a Scaled"),
    }
