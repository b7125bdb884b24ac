"""Rows in 8 bits: against the definition, written out."""

import pytest
import torch

from pascal_attn_core.int8 import Int8Matrix, quantize_rows, rotate
from pascal_attn_core.reference.int8_rows import LEAST_SCALE

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
