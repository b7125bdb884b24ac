"""The formats of GGUF files against the package ``gguf``, and the weights of a layer in slices."""

import math

import pytest

pytest.importorskip("gguf", reason="gguf is not installed")

import gguf
import numpy as np
import torch
from torch import Tensor

from pascal_attn_core.gguf import matrix as matrices
from pascal_attn_core.gguf.matrix import GgufMatrix, linear
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

TYPES = {name: gguf.GGMLQuantizationType[name] for name in FORMATS}


def any_bits(name: str, count: int, seed: int = 0) -> Tensor:
    """Blocks of random bits: some scales are subnormal, infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, FORMATS[name].bytes), dtype=torch.uint8, generator=generator)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether both have the same numbers, signs of zeros included; any NaN is as good as another."""
    nan = expected.isnan()
    bits = [t.masked_fill(nan, 0).view(torch.int32) for t in (found, expected)]
    return torch.equal(found.isnan(), nan) and torch.equal(*bits)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_has_the_bits_of_the_definition(name: str) -> None:
    assert (FORMATS[name].weights, FORMATS[name].bytes) == gguf.GGML_QUANT_SIZES[TYPES[name]]
    blocks = any_bits(name, 1000)
    blocks[0], blocks[1] = 0, 255
    with np.errstate(all="ignore"):
        right = torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), TYPES[name]), dtype=np.float32))
    assert same_bits(expand(blocks, name).float(), right)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_stay_in_bytes(name: str) -> None:
    """Nothing of a block is widened before its product with the scale but the indices of a table."""
    from pascal_attn_core.observe.memory import measure

    count = 4096
    weights = count * FORMATS[name].weights
    extra = measure(expand, any_bits(name, count), name, torch.float16).extra_bytes
    assert extra <= (9 if name.startswith("IQ") else 4.5) * weights  # indices are int32


def sliced(name: str, rows: int, columns: int) -> GgufMatrix:
    weights = FORMATS[name].weights
    blocks = any_bits(name, rows * columns // weights)
    return GgufMatrix(blocks, name, (rows, columns), torch.float32, torch.int8, torch.float32)


@pytest.mark.parametrize(("name", "rows", "columns"), [("Q4_0", 7, 96), ("Q6_K", 9, 256), ("Q4_K", 16, 320)])
@pytest.mark.parametrize("most", [1, 700, 1 << 22])
def test_rows_in_slices_are_all_rows(name: str, rows: int, columns: int, most: int, monkeypatch) -> None:
    """In the last case, rows end within blocks."""
    monkeypatch.setattr(matrices, "slice_weights", lambda _: most)
    weight = sliced(name, rows, columns)
    found = torch.cat([weight.rows(some) for some in weight.slices()])
    assert same_bits(found, expand(weight.data, name).view(rows, columns))
    least = FORMATS[name].weights // math.gcd(FORMATS[name].weights, columns)
    assert len(weight.slices()) == -(-rows // max(least, most // columns // least * least))


def test_a_product_and_its_gradients_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sliced("BF16", 24, 32)
    weight = weight._replace(data=torch.randn(24 * 32).bfloat16().view(torch.uint8), dtype=torch.float64)
    whole = weight.rows(slice(0, 24))
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 5 * 32)
    assert len(weight.slices()) == 5
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(24, dtype=torch.float64, requires_grad=True)
    results = []
    for product in (lambda: linear(x, weight, bias), lambda: torch.nn.functional.linear(x, whole, bias)):
        out = product()
        results.append((out, *torch.autograd.grad(out.sin().sum(), (x, bias))))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
