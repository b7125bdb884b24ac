"""How far the answers of the kernels for linear layers are from the definitions': bit for bit for GGUF weights, and for
8-bit integers without an activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...reference.checks import gap
from ...reference.gguf_blocks import FORMATS, Parts, expand
from ...reference.int8_rows import Int8Matrix, quantize_rows
from ..code.compilation import DtypeVariant, GgufLinearVariant
from ..code.kinds import FEW, KERNELS, TILES
from ..launch import Launch, gguf_definition
from ..launch.gguf import DTYPES, ExpandCall, GgufLinearCall, expand_launches, gguf_linear_launches
from ..launch.linear import LinearCall, linear_launches

Run = Callable[[list[Launch]], object]
# Rotation and columns: whole groups in two pieces of a row, and columns that can only be read four codes at a time.
_SHAPES = ((256, 512), (4, 276))
_BLOCKS = 9
_HALVES = {"Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
_LANES = 32  # of a warp, which share the blocks of a row where x has few rows


def largest_error(variant: DtypeVariant, device: torch.device, run: Run) -> float:
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


# ---- GGUF weights ----------------------------------------------------------------------------------------------------


def expansion_error(variant: DtypeVariant, device: torch.device, run: Run) -> float:
    """0.0, or infinity where an output of any function has another bit, on blocks of random bits. ``run`` executes
    launches; the random state of torch is left alone."""
    arithmetic, generator = getattr(torch, variant.dtype), torch.Generator("cpu").manual_seed(1)
    for name in KERNELS:
        weights, size, _ = FORMATS[name]
        blocks = torch.randint(0, 256, (_BLOCKS, size), generator=generator, dtype=torch.uint8, device="cpu")
        for dtype in DTYPES:
            for table in (torch.int8, torch.float32):
                out = torch.full((_BLOCKS, weights), float("nan"), dtype=dtype, device=device)
                run(expand_launches(ExpandCall(blocks.to(device), name, arithmetic, table, out)))
                if not _same(out.cpu(), expand(blocks, name, arithmetic, table=table).to(dtype)):
                    return float("inf")
    return 0.0


def _same(found: Tensor, right: Tensor) -> bool:
    """Whether both have the same numbers; any NaN is as good as another."""
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(), right.nan_to_num())


def product_error(variant: GgufLinearVariant, device: torch.device, run: Run) -> float:
    """As :func:`expansion_error`, of each product of a variant and each dtype, on calls that fill two tiles in part.
    Rows have an odd number of blocks where a format allows it."""
    name, generator = variant.format, torch.Generator("cpu").manual_seed(2)
    columns, cols = (96, 69) if FORMATS[name].weights == 32 else (768, 69)
    functions = [*FEW, "pa_gguf_linear"] if variant.rows == 8 else ["pa_gguf_linear"]
    for function, dtype in zip([*functions, *functions], (*DTYPES, *DTYPES)):
        x = torch.randn(FEW[function].rows if function in FEW else 131, columns, generator=generator, device="cpu")
        blocks, bias = sane_blocks(name, cols, columns, generator), torch.randn(cols, generator=generator, device="cpu")
        out = torch.full((len(x), cols), float("nan"), dtype=dtype, device=device)
        call = GgufLinearCall(x.to(device, dtype), blocks.to(device), name, bias.to(device), out)
        run(gguf_linear_launches(call, variant.rows, function, variant.arch))
        right = expected_product(call._replace(x=x.to(dtype), blocks=blocks, bias=bias), function).to(dtype)
        if not _same(out.cpu(), right):
            return float("inf")
    return 0.0


def expected_product(call: GgufLinearCall, function: str) -> Tensor:
    """The product that a function has to give, float32 ``[M, N]`` before it is rounded. Tensors on a CPU."""
    _, size, unpack = FORMATS[call.format]
    parts = unpack(call.blocks.view(-1, size), torch.float32, torch.int8)
    shape = call.out.shape[1], -1
    minima = None if parts.minima is None else parts.minima.reshape(shape)
    weight = Parts(parts.scales.reshape(shape), parts.codes.reshape(shape), minima)
    x, lanes = gguf_definition.round_rows(call.x), _LANES if function in FEW else 1
    y = gguf_definition.product(x, weight, call.format, lanes)
    return y if call.bias is None else y + call.bias


def sane_blocks(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """uint8 ``[rows, bytes]`` of random bits, scales and minima below 2."""
    weights, size, _ = FORMATS[name]
    shape = rows, columns // weights, size
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
    for at in _HALVES.get(name, (0,)):
        blocks[..., at + 1] &= 0xBF  # the highest bit of the exponent
    return blocks.flatten(1)
