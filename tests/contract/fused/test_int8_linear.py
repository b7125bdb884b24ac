"""The linear layer in 8-bit integers, emulated: without an activation every bit is that of its definition."""

import functools
import itertools
import random
import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from attn_support.fused.cases import Answers, worst_error
from attn_support.fused.emulation import LeftOut, each_left_out, emulate
from attn_support.fused.far import address_space
from attn_support.fused.linear import before_activation
from attn_support.randomness import seeds
from torch import Tensor

from pascal_attn_core.fused.code.kinds import INT8_LINEAR, MOST_COLUMNS, QUANTIZE, ROTATIONS, TILES
from pascal_attn_core.fused.code.source import source
from pascal_attn_core.fused.launch import linear as launches_linear
from pascal_attn_core.fused.launch.linear import ACTIVATIONS, LinearCall, linear_launches, product_of
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.reference import int8_rows
from pascal_attn_core.reference.int8_rows import Int8Matrix, quantize_rows

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT32, FLOAT16, BFLOAT16)
# Half a unit in the last place of the output, and some of float32's: activations are not rounded alike everywhere.
ROUNDING = {FLOAT32: 4e-7, FLOAT16: 2**-11 + 1e-6, BFLOAT16: 2**-8 + 1e-6}
_OF_GATE = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation in _OF_GATE:
        value, gate = y.chunk(2, dim=-1)
        return value * _activated(gate, _OF_GATE[activation])
    if activation == "silu":
        return F.silu(y)
    return y if activation == "none" else F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _weight(rows: int, columns: int, rotation: int = 0, *, one_scale: bool = False) -> Int8Matrix:
    weight = quantize_rows(torch.randn(rows, columns), rotation)
    return weight._replace(scales=weight.scales[:1].clone()) if one_scale else weight


def _call(
    x: Tensor, weight: Int8Matrix, bias: Tensor | None = None, activation: str = "none", out: torch.dtype = FLOAT32
) -> LinearCall:
    cols = weight.codes.shape[0] // (2 if activation in _OF_GATE else 1)
    return LinearCall(x, weight, bias, activation, torch.full((x.shape[0], cols), float("nan"), dtype=out))


def _check(call: LinearCall, product: str | None = None, seed: int = 1) -> None:
    emulate(linear_launches(call, 28, product), seed)
    y = before_activation(call)
    if call.activation == "none":
        assert torch.equal(call.out, y.to(call.out.dtype))
        return
    expected = _activated(y.double(), call.activation)
    allowed = ROUNDING[call.out.dtype] * expected.abs() + 1e-6 * y.abs().max() ** 2
    assert ((call.out.double() - expected).abs() <= allowed).all()


def _shapes() -> Iterator[tuple[str, int, int, int]]:
    """Rows and columns of the output at the edges of the tiles, and columns of x around whole chunks and words."""
    columns = itertools.cycle((4, 12, 16, 28, 32, 36, 64, 100, 128, 512, 516))
    for product, tile in TILES.items():
        for rows, cols in (
            (1, 1),
            (tile.rows, tile.cols),
            (tile.rows - 1, tile.cols + 1),
            (tile.rows + 1, tile.cols - 1),
            (2 * tile.rows + 3, 2 * tile.cols + 4),
        ):
            yield product, rows, cols, next(columns)


@pytest.mark.parametrize(("product", "rows", "cols", "columns"), list(_shapes()))
def test_every_bit_is_that_of_the_definition(product: str, rows: int, cols: int, columns: int) -> None:
    _check(_call(torch.randn(rows, columns), _weight(cols, columns), torch.randn(cols)), product)


def test_long_rows_are_read_twice_and_their_sums_still_fit() -> None:
    """Beyond 8192 columns a block keeps no row in registers; the largest sum has 31 bits."""
    for columns in (8192, 8196, 20000, MOST_COLUMNS):
        _check(_call(torch.randn(2, columns), _weight(3, columns)))
    _check(_call(torch.randn(600, 1100), _weight(5, 1100)))  # many rows take less threads each
    weight = Int8Matrix(torch.full((2, MOST_COLUMNS), -128, dtype=torch.int8), torch.ones(2))
    call = _call(torch.ones(1, MOST_COLUMNS), weight)
    _check(call)
    assert call.out[0, 0] == torch.tensor(-127 * 128 * MOST_COLUMNS).float() * torch.tensor(1 / 127)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("stride", "first"), [(64, 0), (68, 4), (65, 0), (66, 2), (64, 1), (0, 0), (200, 3)])
def test_rows_of_x_may_lie_anywhere(dtype: torch.dtype, stride: int, first: int) -> None:
    memory = torch.randn(20 * 200 + 64).to(dtype)
    x = memory.as_strided((20, 64), (stride, 1), first)
    _check(_call(x, _weight(9, 64)))


@pytest.mark.parametrize("product", TILES)
@pytest.mark.parametrize("first", [0, 4, 16, 64, 1, 2, 3, 5])
def test_a_weight_may_begin_anywhere(product: str, first: int) -> None:
    """One that no word can be read of is copied: a CPU reads words anywhere, but a GPU ends the process."""
    codes = torch.randint(-127, 128, (first + 30 * 64,)).to(torch.int8)[first:].view(30, 64)
    call = _call(torch.randn(5, 64), Int8Matrix(codes, torch.rand(30)))
    _check(call, product)
    _, multiply = linear_launches(call, 28, product)
    assert multiply.keep[2].data_ptr() == multiply.params.weight
    assert (multiply.params.weight == codes.data_ptr()) == (first % 4 == 0)


@pytest.mark.parametrize("cols", [1, 2, 3, 5, 8])
def test_an_output_may_have_any_number_of_columns_and_begin_anywhere(cols: int) -> None:
    x, weight = torch.randn(5, 32), _weight(cols, 32)
    for product, first in itertools.product(TILES, (0, 1)):
        out = torch.full((5 * cols + first,), float("nan"), dtype=FLOAT16)
        _check(LinearCall(x, weight, None, "none", out[first:].view(5, cols)), product)


def test_more_rows_than_the_memory_for_their_codes_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches_linear, "_SLICE_BYTES", 300 * (64 + 4))
    call = _call(torch.randn(600, 64), _weight(9, 64), torch.randn(9))
    launches = linear_launches(call, 28)
    assert [launch.function for launch in launches[::2]] == [QUANTIZE] * 3
    codes, scales = launches[0].keep[1:]
    assert codes.numel() * 4 + scales.numel() * 4 <= 300 * 68
    assert len({launch.keep[-2].data_ptr() for launch in launches[::2]}) == 1  # all slices in one buffer
    _check(call)


@pytest.mark.parametrize("product", TILES)
def test_a_long_launch_in_parts_is_the_same(product: str) -> None:
    tile = TILES[product]
    call = _call(torch.randn(2 * tile.rows + 1, 32), _weight(3 * tile.cols - 3, 32))
    quantized, product_launch = linear_launches(call, 28, product)
    pieces = parts(product_launch, product_launch.work // 4)
    assert len(pieces) >= 3
    emulate([quantized, *pieces])
    assert torch.equal(call.out, before_activation(call))


def test_tiles_cover_every_output_once_whatever_the_number_of_rows() -> None:
    """More rows than BAND tiles of them."""
    _check(_call(torch.randn(64 * 19 + 5, 16), _weight(64 * 3 + 1, 16)), "pa_linear_small")


def test_offsets_are_64_bit_numbers() -> None:
    far = 1 << 32
    memory = address_space(2 * far, FLOAT16)
    x = memory.as_strided((2, 64), (far, 1))
    x.copy_(torch.randn(2, 64))
    _check(_call(x, _weight(9, 64)))
    rows = (1 << 16) + 200  # more than 2**31 words
    codes = address_space(rows * MOST_COLUMNS, torch.int8).view(rows, MOST_COLUMNS)
    codes[[0, 17000, -1], :40] = torch.randint(-127, 128, (3, 40)).to(torch.int8)
    out = torch.full((2, codes.shape[0]), float("nan"))
    call = LinearCall(torch.randn(2, MOST_COLUMNS), Int8Matrix(codes, torch.ones(1)), None, "none", out)
    launches = linear_launches(call, 28, "pa_linear_few")
    columns = TILES["pa_linear_few"].cols
    emulate(launches[:1])
    for n in (0, 17000, codes.shape[0] - 1):
        one = launches[1]._replace(grid=(1, 1, 1))
        one.params.first_tile = n // columns
        emulate([one])
        few = Int8Matrix(codes[n : n + 1].clone(), torch.ones(1))
        expected = before_activation(call._replace(weight=few, out=out[:, :1]))
        assert torch.equal(out[:, n : n + 1], expected)
    assert out[:, 17000].abs().max() > 0


@pytest.mark.parametrize("rotation", [0, 16, 256])
def test_a_nan_or_an_infinity_makes_its_row_nan_and_no_other(rotation: int) -> None:
    x = torch.randn(9, 512)
    x[1, 300], x[3, 5], x[5, 511], x[6] = float("nan"), float("inf"), -float("inf"), 0.0
    x[8, 7], x[8, 8] = float("inf"), float("nan")
    for product in TILES:
        call = _call(x, _weight(6, 512, rotation))
        launches = linear_launches(call, 28, product)
        emulate(launches)
        expected = quantize_rows(x, rotation)
        codes, scales = launches[0].keep[1:]
        assert torch.equal(codes.view(torch.int8)[:, :512], expected.codes)
        torch.testing.assert_close(scales, expected.scales, atol=0, rtol=0, equal_nan=True)
        rows = ~call.out.isfinite().all(dim=1)
        assert rows.nonzero().flatten().tolist() == [1, 3, 5, 8]
        assert call.out[rows].isnan().all()
        assert (call.out[6] == 0).all()


def _check_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and the scales of rows, which are those of the definition."""
    launches = linear_launches(_call(x, _weight(1, x.shape[1])), 28)
    emulate(launches[:1])
    codes, scales = launches[0].keep[1:]
    codes, expected = codes.view(torch.int8)[:, : x.shape[1]], quantize_rows(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes, expected.codes)
    return codes, scales


def test_halves_are_rounded_as_by_a_division() -> None:
    """Numbers beside each code and a half, for many scales: a product with the reciprocal rounds some of them wrong."""
    wrong_by_reciprocal = 0
    for exponent in (-99.0, -60.0, 0.0, 80.0, 120.0):
        scale = (torch.rand(40, 1, dtype=torch.float64) + 1) * 2**exponent
        halves = (torch.arange(127) + 0.5) * scale
        x = halves.float()[:, :, None].view(torch.int32) + torch.arange(-2, 3)
        x = torch.cat([(127 * scale).float(), x.view(FLOAT32).flatten(1)], dim=1)
        x = x * torch.where(torch.rand(x.shape) < 0.5, -1.0, 1.0)
        x = F.pad(x, (0, -x.shape[1] % 4))
        codes, scales = _check_codes(x)
        wrong_by_reciprocal += int(((x * (1 / scales)[:, None]).round() != codes).sum())
    assert wrong_by_reciprocal > 0


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-31, 1e-30, 1e-28, 1e30, 3e38])
def test_tiny_and_huge_rows(magnitude: float) -> None:
    x = torch.rand(3, 64).mul_(2).sub_(1) * magnitude
    _, scales = _check_codes(x)
    assert scales.min() >= torch.tensor(int8_rows.LEAST_SCALE)


def test_sums_that_overflow_in_the_rotation_are_infinite_as_in_the_definition() -> None:
    x = torch.full((2, 64), 3e38)
    x[1, ::2] = -3e38
    call = _call(x, _weight(4, 64, 16))
    emulate(linear_launches(call, 28))
    assert torch.equal(call.out.isnan(), before_activation(call).isnan())


@pytest.mark.parametrize("seed", seeds(40))
def test_random_layers(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rotation = draw.choice(ROTATIONS)
    columns = draw.randrange(1, 6) * rotation if rotation else 4 * draw.randrange(1, 200)
    activation = draw.choice(["none", *ACTIVATIONS])
    rows, cols = draw.randrange(1, 150), draw.randrange(1, 150)
    dtype, out, of_bias = (draw.choice(DTYPES) for _ in range(3))
    weight = _weight(2 * cols if activation in _OF_GATE else cols, columns, rotation, one_scale=draw.random() < 0.2)
    bias = torch.randn(weight.codes.shape[0]).to(of_bias) if draw.random() < 0.7 else None
    x = torch.randn(rows, columns + draw.randrange(5)).to(dtype)[:, :columns]
    _check(_call(x, weight, bias, activation, out), draw.choice([None, *TILES]), seed)


def test_the_product_is_chosen_by_the_rows_and_by_what_fills_the_device() -> None:
    assert [product_of(rows, 3072, 28) for rows in (1, 4, 5, 32)] == ["pa_linear_few"] * 2 + ["pa_linear_some"] * 2
    assert product_of(4096, 3072, 28) == product_of(100_000, 320, 28) == "pa_linear"
    assert product_of(77, 2048, 28) == product_of(256, 1280, 28) == "pa_linear_small"


_BARRIER = re.compile(r"__syncthreads\(\);")
_SENSITIVE = [(product, TILES[product].rows + 1, TILES[product].cols + 1, 1200) for product in TILES]


def _is_right(text: str | LeftOut | None) -> bool:
    """Whether three runs of each product with another text give the definition's bits."""

    def run(product: str, rows: int, cols: int, columns: int, seed: int) -> Answers:
        torch.manual_seed(seed)
        call = _call(torch.randn(rows, columns), _weight(cols, columns))
        emulate(linear_launches(call, 28, product), seed, {INT8_LINEAR: text})
        return [call.out], [before_activation(call)]

    return worst_error([functools.partial(run, *sizes, seed) for sizes in _SENSITIVE for seed in (1, 2, 3)], 0) == 0


def test_a_kernel_without_any_one_barrier_or_its_second_buffer_is_wrong() -> None:
    text = source(INT8_LINEAR)
    assert _is_right(None)
    mutants = list(each_left_out(text, _BARRIER.finditer(text)))
    assert len(mutants) == 3  # of the rounding, of large tiles, of few rows
    for right, wrong in (("place = Shape::WORDS - place;", ""), ("place ^= 1) {", "place ^= 0) {")):
        assert text.count(right) == 1
        mutants.append((text.replace(right, wrong), right))
    for mutant, line in mutants:
        assert not _is_right(mutant), line
