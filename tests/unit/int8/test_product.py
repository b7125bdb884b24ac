"""Rows in 8 bits; the linear layer: integers exactly, the rest to the last bit, gradients, graphs and memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pascal_attn_core.fused.code.kinds import MOST_COLUMNS
from pascal_attn_core.fused.linear import LinearCall
from pascal_attn_core.int8 import ACTIVATIONS, Int8Matrix, int8_linear, operator, quantize_rows, rotate
from pascal_attn_core.int8.backends import GATED, activated, by_float
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.reference.int8_rows import LEAST_SCALE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def definition(x: Tensor, weight: Int8Matrix, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """With the sums in 64-bit integers, one rounding in float32 for each step."""
    rounded = quantize_rows(x.reshape(-1, x.shape[-1]), weight.rotation)
    sums = (rounded.codes.long() @ weight.codes.long().T).float()
    sums = sums * (rounded.scales[:, None] * weight.scales)
    if bias is not None:
        sums = sums + bias.float()
    return activated(sums, activation).to(dtype).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition_bit_for_bit(dtype: torch.dtype, activation: str) -> None:
    for rows, outs, columns, rotation in ((1, 8, 4, 0), (3, 34, 60, 4), (77, 70, 256, 256), (2, 128, 64, 16)):
        x, bias = torch.randn(2, rows, columns).to(dtype), torch.randn(outs)
        weight = quantize_rows(torch.randn(outs, columns), rotation)
        for given in (None, bias, bias.to(dtype)):
            out = int8_linear(x, weight, given, activation=activation)
            assert (out.dtype, out.shape) == (dtype, (2, rows, outs // 2 if activation in GATED else outs))
            assert torch.equal(out, definition(x, weight, given, activation, dtype))
    other = torch.float32 if dtype == torch.float16 else torch.float16
    out = int8_linear(x, weight, activation=activation, out_dtype=other)
    assert torch.equal(out, definition(x, weight, None, activation, other))


@pytest.mark.parametrize("activation", ["none", "silu", "geglu"])
@pytest.mark.parametrize("rotation", [0, 64])
def test_expanding_the_weight_rounds_only_the_weight(rotation: int, activation: str) -> None:
    x, weight, bias = torch.randn(33, 64), torch.randn(48, 64), torch.randn(48)
    matrix = quantize_rows(weight, rotation)
    out = torch.empty(33, 24 if activation == "geglu" else 48)
    by_float(LinearCall(x, matrix, bias, activation, out))
    expected = activated(F.linear(x.double(), matrix.float().double(), bias.double()), activation)
    assert (out - expected).norm() < 1e-6 * expected.norm()


def test_many_rows_are_computed_some_at_a_time_in_little_memory() -> None:
    for way, activation, rotation in (
        ("int_mm", "none", 0), ("int_mm", "swiglu", 64), ("float", "none", 64), ("float", "silu", 64)
    ):  # fmt: skip
        x, weight = torch.randn(20_000, 64), quantize_rows(torch.randn(512, 64), rotation)
        with PeakMemory() as memory:
            out = int8_linear(x, weight, activation=activation, way=way)
        extra = memory.peak_bytes - out.numel() * out.element_size()
        assert extra < 18 << 20, (way, activation)  # the integer sums alone would take 39 MiB, and as floats again
        some = torch.arange(0, 20_000, 97)
        alone = int8_linear(x[some], weight, activation=activation, way=way)
        is_exact = (way, activation) == ("int_mm", "none")
        assert torch.equal(out[some], alone) if is_exact else (out[some] - alone).norm() < 1e-6 * alone.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu", "geglu"])
def test_gradients_are_those_of_the_rounded_weight(activation: str, dtype: torch.dtype) -> None:
    matrix = quantize_rows(torch.randn(24, 64), 16)
    x, bias = torch.randn(3, 5, 64).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    out = int8_linear(x, matrix, bias, activation=activation)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, bias), grad)
    right = activated(F.linear(x.float(), matrix.float(), bias.float()), activation)
    expected = torch.autograd.grad(right, (x, bias), grad.float())
    exact = 1e-5 if dtype == torch.float32 else 0.01
    for mine, other in zip(found, expected):
        assert mine.dtype == dtype
        # The derivative of the activation is taken at sums that 8 bits have rounded.
        assert (mine - other).float().norm() <= (exact if activation == "none" else 0.03) * other.float().norm()


def test_the_operator_passes_torchs_own_checks() -> None:
    matrix = quantize_rows(torch.randn(8, 16), 16)
    for x, bias, activation in (
        (torch.randn(3, 16), None, "none"),
        (torch.randn(2, 3, 16, requires_grad=True), torch.randn(8, requires_grad=True), "none"),
        (torch.randn(3, 16).half(), torch.randn(8), "geglu"),
    ):
        torch.library.opcheck(operator.linear, (x, *matrix[:2], bias, 16, activation, x.dtype, "auto"))


def test_one_scale_the_largest_sums_rows_with_nan_no_rows_and_no_outputs() -> None:
    x, codes = torch.randn(5, 16), torch.randint(-128, 128, (9, 16), dtype=torch.int8)
    weight = Int8Matrix(codes, torch.tensor([0.02]))
    assert torch.equal(int8_linear(x, weight), definition(x, weight, None, "none", torch.float32))
    wide, codes = torch.ones(2, MOST_COLUMNS), torch.full((8, MOST_COLUMNS), -128, dtype=torch.int8)
    out = int8_linear(wide, Int8Matrix(codes, torch.ones(1)))
    assert torch.equal(out, torch.full((2, 8), -128.0 * 127 * MOST_COLUMNS) * quantize_rows(wide).scales[:, None])
    x[1, 0] = float("nan")
    assert int8_linear(x, weight).isnan().all(dim=1).tolist() == [False, True, False, False, False]
    assert int8_linear(torch.empty(2, 0, 16), quantize_rows(torch.randn(8, 16))).shape == (2, 0, 8)
    assert int8_linear(torch.randn(3, 16), quantize_rows(torch.empty(0, 16))).shape == (3, 0)


_EMPTY = Int8Matrix(torch.empty(8, 0, dtype=torch.int8), torch.ones(8))
_WEIGHT = quantize_rows(torch.randn(8, 16))


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        (TypeError, "float32, float16 or bfloat16, got torch.float64", {"x": torch.randn(2, 16).double()}),
        (TypeError, "torch.int32", {"out_dtype": torch.int32}),
        (TypeError, "int8 codes", {"weight": Int8Matrix(torch.randn(8, 16), torch.ones(8))}),
        (TypeError, "float32 scales", {"weight": _WEIGHT._replace(scales=torch.ones(8).half())}),
        (ValueError, r"x must be \[..., 16\] for a weight \[8, 16\], got \[2, 12\]", {"x": torch.randn(2, 12)}),
        (ValueError, r"scales must be \[8\] or \[1\], got \[3\]", {"weight": _WEIGHT._replace(scales=torch.ones(3))}),
        (ValueError, r"bias must be \[8\], got \[4\]", {"bias": torch.ones(4)}),
        (ValueError, "way must be 'auto' or one of kernel, int_mm, float, got 'cuda'", {"way": "cuda"}),
        (ValueError, "activation must be one of none, gelu", {"activation": "relu"}),
        (
            ValueError,
            "even number of rows, got 7",
            {"weight": quantize_rows(torch.randn(7, 16)), "activation": "geglu"},
        ),
        (ValueError, "on one device, got cpu, meta", {"bias": torch.empty(8, device="meta")}),
        (ValueError, "power of 4 that divides the 16 columns, got 64", {"weight": _WEIGHT._replace(rotation=64)}),
        (ValueError, "1 to 131072 columns", {"x": torch.randn(2, 0), "weight": _EMPTY}),
    ],
)
def test_what_cannot_be_used_is_refused(kind: type[Exception], message: str, arguments: dict) -> None:
    given = {"x": torch.randn(2, 16), "weight": _WEIGHT, **arguments}
    with pytest.raises(kind, match=message):
        int8_linear(**given)


ROTATIONS = (0, 4, 16, 64, 256)


def hadamard(size: int) -> torch.Tensor:
    """The regular Hadamard matrix of ConvRot, by Kronecker products, in float64."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, four)
    return matrix


@pytest.mark.parametrize("size", ROTATIONS[1:])
def test_rotation_is_the_product_with_the_hadamard_matrix_of_each_group(size: int) -> None:
    x = torch.randn(3, 512, dtype=torch.float64)
    matrix = hadamard(size)
    assert torch.equal(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    expected = (x.view(3, -1, size) @ matrix).view(3, 512)
    assert torch.allclose(rotate(x, size), expected, rtol=0, atol=1e-12)
    assert torch.allclose(rotate(rotate(x, size), size), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0, 64])
def test_codes_and_scales_are_those_of_the_definition(dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(37, 192) * torch.logspace(-6, 3, 37)[:, None]).to(dtype)
    found = quantize_rows(x, size)
    rows = rotate(x.float(), size)
    for row, codes, scale in zip(rows, found.codes, found.scales):
        assert scale.item() == (row.abs().max() / 127).item()
        assert torch.equal(codes, torch.round(row / scale).to(torch.int8))
    assert found.codes.abs().max() == 127
    assert found.rotation == size


def test_no_rotation_rows_of_zeros_no_rows_and_one_scale_for_all() -> None:
    x = torch.randn(2, 12)
    assert rotate(x, 0) is x
    zeros = quantize_rows(torch.zeros(2, 8))
    assert not zeros.codes.any()
    assert torch.equal(zeros.scales, torch.full((2,), LEAST_SCALE))
    nothing = quantize_rows(torch.empty(0, 16))
    assert nothing.codes.shape == nothing.float().shape == (0, 16)
    codes = torch.randint(-127, 128, (5, 8), dtype=torch.int8)
    assert torch.equal(Int8Matrix(codes, torch.tensor([0.5])).float(), codes * 0.5)


@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_number_that_is_none_has_it_as_its_scale(value: float, size: int) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = value
    found = quantize_rows(x, size)
    assert not found.codes[1].any()
    assert not found.scales[1].isfinite()
    other = quantize_rows(x[[0, 2]], size)
    assert torch.equal(found.codes[[0, 2]], other.codes)
    assert torch.equal(found.scales[[0, 2]], other.scales)


def test_many_rows_are_rounded_some_at_a_time() -> None:
    x = torch.randn(10_000, 64)
    whole, parts = quantize_rows(x, 16), [quantize_rows(part, 16) for part in x.split(999)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts]))


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        *(
            (shape, 0, r"x must be \[rows, columns\] with a column at least, got")
            for shape in ((3, 0), (4,), (2, 3, 4))
        ),
        *(((2, 1024), size, "power of 4 that divides the 1024 columns") for size in (-4, 1, 2, 3, 8, 32, 128, 512)),
        ((2, 96), 64, "power of 4 that divides the 96 columns, got 64"),
    ],
)
def test_only_matrices_are_rounded_and_only_some_rotations_fit(shape: tuple[int, ...], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_rows(torch.ones(shape), size)
