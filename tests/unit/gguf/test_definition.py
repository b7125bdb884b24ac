"""The formats of GGUF files against the package ``gguf``, and the weights of a layer in slices.

The product with rows of x in 8 bits by its definition: whole numbers are exact, everything else is nearly so.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from attn_support.oracle import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pascal_attn_core.fused.launch.gguf_definition import product, round_rows
from pascal_attn_core.gguf import int8
from pascal_attn_core.gguf import matrix as matrices
from pascal_attn_core.gguf.int8 import GgufCall, by_float, by_int_mm, why_not
from pascal_attn_core.gguf.matrix import GgufMatrix, linear
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

IN_8_BITS = [name for name in FORMATS if not why_not(name, 512)]
_HALVES = {"Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def matrix(name: str, rows: int, columns: int, scale: float) -> GgufMatrix:
    """Random codes, and all float16 numbers equal to ``scale``."""
    weights, size, _ = FORMATS[name]
    blocks = torch.randint(0, 256, (rows * columns // weights, size), dtype=torch.uint8)
    for at in _HALVES.get(name, (0,)):
        blocks[:, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    return GgufMatrix(blocks, name, (rows, columns), torch.float32, torch.int8, torch.float32)


def exact(weight: GgufMatrix) -> Tensor:
    return expand(weight.data, weight.format).view(weight.shape).double()


@pytest.mark.parametrize("name", IN_8_BITS)
def test_whole_numbers_are_multiplied_exactly(name: str) -> None:
    weight = matrix(name, 7, 256, 1.0)
    x = torch.randint(-3, 4, (5, 256)).float()
    x[:, ::32] = 127.0  # so that every scale of x is one
    found = product(round_rows(x), weight.parts(slice(0, 7)), name)
    right = x.double() @ exact(weight).T
    if weight.parts(slice(0, 7)).scales.shape[1] == 256 // 32:
        assert torch.equal(found.double(), right)
    else:  # its scales of 16 weights are added by M
        largest = weight.parts(slice(0, 7)).scales.abs().amax().item()
        torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=8 * largest)


@pytest.mark.parametrize("name", IN_8_BITS)
def test_x_is_rounded_by_blocks_and_nothing_else_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 3 * 512)
    monkeypatch.setattr(int8, "_BAND_BYTES", 1)
    weight, x, bias = matrix(name, 37, 512, 0.01), torch.randn(41, 512), torch.randn(37)
    out = torch.full((41, 37), float("nan"))
    by_int_mm(GgufCall(x, weight, bias, out))
    blocks = x.unflatten(1, (-1, 32)).double()
    a = (blocks.abs().amax(-1, keepdim=True).float() / 127).double()
    right = ((blocks / a).round() * a).flatten(1) @ exact(weight).T + bias
    assert ((out - right).norm() / right.norm()) < (1e-4 if name in ("Q6_K", "Q3_K") else 1e-6)


class Largest(TorchDispatchMode):
    """The most elements that any operator gave, of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in filter(torch.is_tensor, tree_leaves(found)):
            self.most[each.dtype] = max(self.most.get(each.dtype, 0), each.numel())
        return found


@pytest.mark.parametrize("compute", [by_int_mm, by_float])
@pytest.mark.parametrize("name", IN_8_BITS)
def test_no_matrix_exists_but_its_bytes_and_no_codes_of_32_bits(name: str, compute: Any, monkeypatch) -> None:
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 16 * 512)
    with Largest() as seen:
        compute(GgufCall(torch.randn(4, 512), matrix(name, 256, 512, 0.01), None, torch.empty(4, 256)))
    assert seen.most.pop(torch.uint8) > 256 * 512 / 3  # the file's
    assert max(seen.most.values()) <= 16 * 512
    assert seen.most.get(torch.int32, 0) <= (16 * 512 if name.startswith("IQ") else 4 * 16)  # indices, or sums


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 40], x[3, 0] = float("nan"), float("inf"), 1e-36
    codes, scales = round_rows(x)
    assert codes.abs().sum() == 0
    weight = matrix("Q4_1", 3, 64, 0.01)
    found = product(round_rows(x), weight.parts(slice(0, 3)), "Q4_1")
    assert found.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert torch.equal(found[[0, 3]], torch.zeros(2, 3))
    assert scales[0, 0, 0] == torch.tensor(1e-30)


def test_what_is_not_multiplied_in_8_bits_has_a_reason() -> None:
    assert why_not("Q4_K", 768) == ""
    assert "must be a multiple of 256 for Q4_K, got 320" in why_not("Q4_K", 320)
    assert "a minimum for every 16 weights" in why_not("Q2_K", 256)
    assert "no whole numbers" in why_not("BF16", 256)


def any_bits(name: str, count: int, seed: int = 0) -> Tensor:
    """Blocks of random bits: some scales are subnormal, infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, FORMATS[name].bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_has_the_bits_of_the_definition(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kind = gguf.GGMLQuantizationType[name]
    assert (FORMATS[name].weights, FORMATS[name].bytes) == gguf.GGML_QUANT_SIZES[kind]
    blocks = any_bits(name, 1000)
    blocks[0], blocks[1] = 0, 255
    with np.errstate(all="ignore"):
        right = torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), kind), dtype=np.float32))
    assert same_bits(expand(blocks, name).float(), right)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_stay_in_bytes(name: str) -> None:
    """Nothing of a block is widened before its product with the scale but the indices of a table."""
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
    for each in (lambda: linear(x, weight, bias), lambda: torch.nn.functional.linear(x, whole, bias)):
        out = each()
        results.append((out, *torch.autograd.grad(out.sin().sum(), (x, bias))))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
