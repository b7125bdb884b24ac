"""The product with blocks of GGUF files and x in 8 bits, emulated, has the definition's bits for every format."""

import itertools
import re
from typing import Any

import pytest
import torch
from attn_support.fused.device import execute, fresh_card
from attn_support.fused.driver import StandIn, fails_once
from attn_support.fused.emulation import CARD, LeftOut, each_left_out, emulate
from attn_support.randomness import seeds, some
from mutants import MUTANTS
from torch import Tensor

from pascal_attn_core.fused.code.kinds import FEW, GGUF_LINEAR, PRODUCT_FORMATS
from pascal_attn_core.fused.code.source import gguf_linear_variants, source
from pascal_attn_core.fused.launch import gguf as launches
from pascal_attn_core.fused.launch.gguf import GgufLinearCall, gguf_linear_launches
from pascal_attn_core.fused.linear import why_no_product
from pascal_attn_core.fused.trust import verify_linear
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.fused.trust.verify_linear import expected_product, sane_blocks
from pascal_attn_core.gguf import int8 as ways
from pascal_attn_core.gguf.matrix import GgufMatrix
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.reference.gguf_blocks import FORMATS

CPU = torch.device("cpu")
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(variant.format, variant.rows) for variant in gguf_linear_variants()]


def call(
    name: str, rows: int, cols: int, columns: int, dtype: torch.dtype = FLOAT32, *, bias: bool = True
) -> GgufLinearCall:
    blocks = sane_blocks(name, cols, columns, torch.Generator().manual_seed(seeds(1)[0]))
    out = torch.full((rows, cols), float("nan"), dtype=dtype)
    return GgufLinearCall(torch.randn(rows, columns).to(dtype), blocks, name, torch.randn(cols) if bias else None, out)


def same(found: Tensor, right: Tensor) -> bool:
    """Whether both have the same numbers; any NaN is as good as another."""
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(), right.nan_to_num())


def check(given: GgufLinearCall, rows: int = 8, function: str = "", seed: int = 1, **options: Any) -> None:
    queued = gguf_linear_launches(given, rows, function)
    emulate(queued, seed, **options)
    assert same(given.out, expected_product(given, queued[-1].function).to(given.out.dtype))


@pytest.mark.parametrize(("name", "rows"), some(SHAPES, 5))
def test_every_bit_is_that_of_the_definition(name: str, rows: int) -> None:
    least = FORMATS[name].weights
    for count, cols, columns in ((130, 70, 2 * least), (17, 3, 512), (40, 65, 768)):
        check(call(name, count, cols, columns), rows, "pa_gguf_linear")
    if least == 32:  # a chunk without its second block
        for columns in (32, 96, 160):
            check(call(name, 20, 9, columns, bias=False), rows)


@pytest.mark.parametrize("name", PRODUCT_FORMATS)
def test_few_rows_have_a_kernel_of_their_own(name: str) -> None:
    for count, cols, columns in ((1, 1, 256), (4, 17, 2304), (3, 40, 512), (5, 9, 512), (16, 15, 2560)):
        given = call(name, count, cols, columns)
        used = gguf_linear_launches(given)[-1].function
        assert used == ("pa_gguf_few" if count <= 4 else "pa_gguf_some")
        check(given)
    if name in [name for name in PRODUCT_FORMATS if FORMATS[name].weights == 32]:
        for function, columns in itertools.product(FEW, (32, 96)):
            check(call(name, 2, 19, columns, bias=False), 8, function)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize(("name", "rows"), some([("Q8_0", 8), ("Q4_K", 4), ("Q6_K", 8)], 2))
def test_every_dtype_and_rows_that_lie_apart(name: str, rows: int, dtype: torch.dtype) -> None:
    for count in (2, 37):
        given = call(name, count, 33, 512, dtype)
        wide = torch.randn(count, 700).to(dtype)
        check(given._replace(x=wide[:, 100:612]), rows)


@pytest.mark.parametrize("function", [*FEW, "pa_gguf_linear"])
def test_zeros_and_what_is_not_finite(function: str) -> None:
    given = call("Q4_1", 6 if function != "pa_gguf_few" else 4, 9, 96, bias=False)
    given.x[0], given.x[1, 40], given.x[2, 5] = 0, float("nan"), float("inf")
    given.x[3] *= 1e-38
    check(given, 8, function)
    assert given.out.isnan().all(dim=1).tolist()[:4] == [False, True, True, False]
    given.out.fill_(1.0)
    for row, bits in ((2, (0, 0)), (5, (0, 0x7E)), (7, (1, 0)), (8, (255, 0x7B))):  # zero, NaN, the least, the largest
        given.blocks.view(9, 3, 20)[row, 0, :2] = torch.tensor(bits, dtype=torch.uint8)
    check(given, 8, function)  # the last chunk of row 4 has no second block: row 5 begins behind it
    assert given.out[0].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("name", PRODUCT_FORMATS)
def test_the_largest_sums_of_both_signs(name: str) -> None:
    given = call(name, 3, 4, 256)
    blocks, (weights, size, _) = given.blocks.view(-1, FORMATS[name].bytes), FORMATS[name]
    whole = verify_linear.sane_blocks(name, 1, weights, torch.Generator().manual_seed(1)).expand(len(blocks), size)
    for fill, sign in itertools.product((0, 255, 128, 127), (1, -1)):
        blocks[:] = fill
        for at in verify_linear._HALVES.get(name, (0,)):
            blocks[:, at : at + 2] = whole[:, at : at + 2]
        given.x[:] = 127.0 * sign
        check(given)
        check(given, 8, "pa_gguf_linear")


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "Q8_0", "IQ4_XS"])
def test_blocks_may_begin_at_any_byte(name: str) -> None:
    given = call(name, 18, 5, 256)
    moved = torch.empty(given.blocks.numel() + 1, dtype=torch.uint8)[1:].view(given.blocks.shape)
    emulate(gguf_linear_launches(given._replace(blocks=moved.copy_(given.blocks))))
    assert same(given.out, expected_product(given, "pa_gguf_linear"))


def test_more_rows_than_fit_go_through_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_SLICE_BYTES", 40_000)
    given = call("Q4_0", 300, 9, 128)
    assert len(gguf_linear_launches(given)) == 4
    check(given)


def test_tiles_come_in_bands_and_long_launches_in_pieces() -> None:
    given = call("Q4_0", 9 * 128 + 5, 130, 32)
    rounding, product = gguf_linear_launches(given, 4)
    pieces = parts(product, product.work // 7)
    assert len(pieces) > 5
    emulate([rounding, *pieces])
    assert same(given.out, expected_product(given, "pa_gguf_linear"))


EACH = [name for name, mutant in MUTANTS.items() if mutant.file.endswith("gguf_linear.cu")]


def mutated(name: str) -> str:
    """The kernels' source with one place of ``tools/mutants.txt`` made wrong."""
    return source(GGUF_LINEAR).replace(MUTANTS[name].right, MUTANTS[name].wrong)


def error_of(name: str, text: str | None) -> float:
    wrong = None if text is None else {GGUF_LINEAR: text}
    variant = next(variant for variant in gguf_linear_variants() if variant.format == name)
    return verify_linear.product_error(variant, CPU, lambda queued: emulate(queued, mutated=wrong))


@pytest.mark.parametrize("name", PRODUCT_FORMATS)
def test_the_check_at_first_use_finds_nothing_wrong(name: str) -> None:
    assert error_of(name, None) == 0


@pytest.mark.parametrize("mutant", some(EACH, 8))
def test_the_check_at_first_use_finds_what_is_wrong(mutant: str) -> None:
    name = next(name for name in PRODUCT_FORMATS if mutant.startswith(f"gguf_{name}_"))
    assert error_of(name, mutated(mutant)) > 0


def test_a_kernel_without_any_one_barrier_or_its_second_buffer_is_wrong() -> None:
    text, barrier = source(GGUF_LINEAR), re.compile(r"__syncthreads\(\);")

    def is_right(text: str | LeftOut | None) -> bool:
        sizes = {**dict.fromkeys(FEW, (2, 9, 2112)), "pa_gguf_linear": (20, 9, 320)}
        for (function, shape), seed in itertools.product(sizes.items(), (1, 2, 3)):
            given = call("Q4_0", *shape)
            emulate(gguf_linear_launches(given, 8, function), seed, None if text is None else {GGUF_LINEAR: text})
            if not same(given.out, expected_product(given, function)):
                return False
        return True

    assert is_right(None)
    mutants = list(each_left_out(text, barrier.finditer(text)))
    assert len(mutants) == 4
    buffer = "place = (int)sizeof(Buffer) - place;"
    for mutant, line in [*mutants, (text.replace(buffer, ";"), buffer)]:
        assert not is_right(mutant), line


@pytest.mark.parametrize(
    ("rows", "milliseconds", "way"),
    [
        (20, [2.0, 1.0, 3.0, 4.0], "kernel"),
        (20, [1.0, 2.0, 3.0, 4.0], "kernel_4x8"),
        (20, None, "kernel_4x8"),
        (20, [3.0, 2.0, 4.0, 1.0], "float"),
        (3, [1.0, 3.0, 2.0], "kernel"),
    ],
)
def test_a_call_takes_the_fastest_way(rows: int, milliseconds: list[float] | None, way: str) -> None:
    given = call("Q4_K", rows, 9, 512)
    weight = GgufMatrix(given.blocks, "Q4_K", (9, 512), FLOAT32, torch.int8, FLOAT32)
    with fresh_card(StandIn(CARD, execute)) as kernels:
        runtime = runtime_of(CPU)
        is_on, folder = milliseconds is not None, lambda: None
        timings = ways.GgufWays(runtime, clock=lambda *_: milliseconds, folder=folder, is_on=is_on)
        runtime._parts[ways.GgufWays] = timings
        ways.product(given.x, weight, given.bias)
        queued = len(kernels.queued)  # the kernels were checked
        out = ways.product(given.x, weight, given.bias)
        assert ways.way_for(given.x, weight).name == way
        used = [launch for launch in kernels.queued[queued:] if launch.variant.kind == GGUF_LINEAR]
        assert [launch.variant.rows for launch in used[1:]] == [4 if way == "kernel_4x8" else 8] * (way != "float")
        if used:
            assert torch.equal(out, expected_product(given, used[1].function))


def test_a_kernel_that_fails_or_is_wrong_gives_way() -> None:
    given = call("Q8_0", 20, 9, 64)
    weight = GgufMatrix(given.blocks, "Q8_0", (9, 64), FLOAT32, torch.int8, FLOAT32)
    right, wrong = expected_product(given, "pa_gguf_linear"), {GGUF_LINEAR: mutated("gguf_Q8_0_magic")}
    with fresh_card(StandIn(CARD, lambda launch: emulate([launch], mutated=wrong))):
        assert torch.equal(ways.product(given.x, weight, given.bias), right)  # by the definition
        assert "differs from the definition by inf" in why_no_product(CPU, "Q8_0", 20, 8)
    driver = StandIn(CARD, execute)
    with fresh_card(driver):
        ways.product(given.x, weight, given.bias)
        driver.faults["cuLaunchKernel"] = fails_once(1)
        assert torch.equal(ways.product(given.x, weight, given.bias), right)
        assert "invalid argument" in why_no_product(CPU, "Q8_0", 20, 8)


def test_what_no_kernel_multiplies_has_a_reason() -> None:
    assert "needs a GPU with products of four bytes" in why_no_product(CPU, "Q8_0", 20, 8)
    with fresh_card(StandIn(CARD, execute)):
        assert why_no_product(CPU, "Q8_0", 20, 4) == ""
        assert "does not multiply Q2_K" in why_no_product(CPU, "Q2_K", 20, 8)
        assert why_no_product(CPU, "Q6_K", 20, 4) == ""
        assert "one shape for 3 rows" in why_no_product(CPU, "Q8_0", 3, 4)
