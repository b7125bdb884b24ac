"""How far the answers of the kernels for linear layers in 8 bits are from the definition's: bit for bit without an
activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...reference.checks import gap
from ...reference.int8_rows import Int8Matrix, quantize_rows
from ..code.compilation import DtypeVariant
from ..code.linear_source import TILES
from ..launch import Launch
from ..launch.linear import LinearCall, linear_launches

# Rotation and columns: whole groups in two pieces of a row, and columns that can only be read four codes at a time.
_SHAPES = ((256, 512), (4, 276))


def largest_error(variant: DtypeVariant, device: torch.device, run: Callable[[list[Launch]], object]) -> float:
    """Largest difference from the definition, relative to the largest number, of each function on calls that fill two
    tiles in part; infinite where an output without an activation has another bit. ``run`` executes launches; the random
    state of torch is left alone."""
    largest = 0.0
    for product in TILES:
        for rotation, columns in _SHAPES:
            for activation in ("none", "geglu"):
                call = sample_call(variant, product, device, rotation, columns, activation)
                run(linear_launches(call, 1, product))
                out, right = call.out.cpu(), expected(call)
                is_same = activation != "none" or torch.equal(out, right.to(out.dtype))
                largest = max(largest, gap(out, right).relative if is_same else float("inf"))
    return largest


def sample_call(
    variant: DtypeVariant, product: str, device: torch.device, rotation: int, columns: int, activation: str
) -> LinearCall:
    """A call with small whole numbers, whose rotation is exact in any order of additions."""
    tile, generator = TILES[product], torch.Generator(device).manual_seed(1)
    rows, cols = tile.rows + 1, tile.cols + 5
    of_weight = 2 * cols if activation == "geglu" else cols

    def numbers(largest: int, *shape: int) -> Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator, device=device)

    dtype = getattr(torch, variant.dtype)
    scales = (numbers(100, of_weight) + 200).float() / 1e5
    weight = Int8Matrix(numbers(127, of_weight, columns).to(torch.int8), scales, rotation)
    out = torch.full((rows, cols), float("nan"), dtype=dtype, device=device)
    return LinearCall(numbers(8, rows, columns).to(dtype), weight, numbers(3, of_weight).to(dtype), activation, out)


def expected(call: LinearCall) -> Tensor:
    """The right ``call.out``, float32 ``[M, N]`` before it is rounded, worked out on a CPU."""
    x = quantize_rows(call.x.cpu(), call.weight.rotation)
    codes, scales = call.weight.codes.cpu(), call.weight.scales.cpu()
    sums = (x.codes.double() @ codes.double().T).float()  # whole numbers far below 2**53
    y = sums * (x.scales[:, None] * scales)
    if call.bias is not None:
        y = y + call.bias.cpu().float()
    if call.activation == "none":
        return y
    value, gate = y.chunk(2, dim=1)
    return value * F.gelu(gate)
