"""Blocks of GGUF files expanded by the kernels: the very CUDA source, emulated thread by thread, has the definition's
bits for every format, dtype of the arithmetic and dtype of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fused.device import CardKernels, execute, fresh_card
from attn_support.fused.driver import StandIn, fails_once
from attn_support.fused.emulation import CARD, emulate
from attn_support.fused.trials import Starter
from attn_support.randomness import some
from torch import Tensor

from pascal_attn_core.fused.code.gguf_source import KERNELS, KIND
from pascal_attn_core.fused.code.source import from_row, gguf_variants, source
from pascal_attn_core.fused.gguf import GgufTrials, why_not
from pascal_attn_core.fused.launch.gguf import DTYPES, ExpandCall, expand_launches
from pascal_attn_core.fused.trust import trial, verify_gguf
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.gguf import matrix as matrices
from pascal_attn_core.gguf.expansion import ExpandTimings
from pascal_attn_core.gguf.matrix import GgufMatrix, linear
from pascal_attn_core.machine.runtime import Runtime, runtime_of, using
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

CPU = torch.device("cpu")
TABLES = (torch.int8, torch.float32)


def expanded(blocks: Tensor, name: str, arithmetic: torch.dtype, table: torch.dtype, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(blocks), FORMATS[name].weights), float("nan"), dtype=dtype)
    emulate(expand_launches(ExpandCall(blocks, name, arithmetic, table, out)))
    return out


def same(found: Tensor, right: Tensor) -> bool:
    """Whether both have the same bits, those of zeros included; any NaN is as good as another."""
    nan = right.isnan()
    bits = [t.masked_fill(nan, 0).view(torch.int16) for t in (found, right)]
    return torch.equal(found.isnan(), nan) and torch.equal(*bits)


@pytest.mark.parametrize("arithmetic", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_bit_is_that_of_the_definition(name: str, arithmetic: torch.dtype) -> None:
    size = FORMATS[name].bytes
    for count, first in ((1, 0), (70, 1), (33, 2)):  # blocks may begin at any byte, and end within a thread block
        blocks = torch.randint(0, 256, (first + count * size,), dtype=torch.uint8)[first:].view(count, size)
        blocks[-1] = 255
        for dtype in DTYPES:
            for table in TABLES:
                right = expand(blocks.clone(), name, arithmetic, table=table).to(dtype)
                assert same(expanded(blocks, name, arithmetic, table, dtype), right)


@pytest.mark.parametrize("name", KERNELS)
def test_zero_and_subnormal_scales(name: str) -> None:
    blocks = torch.randint(0, 256, (64, FORMATS[name].bytes), dtype=torch.uint8)
    blocks[:32, 1::2] = 0  # the upper byte of every scale that begins at an even one
    blocks[:4] = 0
    for arithmetic in DTYPES:
        right = expand(blocks, name, arithmetic)
        assert same(expanded(blocks, name, arithmetic, torch.int8, arithmetic), right)


def test_every_format_that_is_not_a_dtype_has_a_kernel() -> None:
    assert set(KERNELS) == set(FORMATS) - {"BF16"}


def test_no_blocks_are_no_launch() -> None:
    empty = torch.empty(0, 18, dtype=torch.uint8)
    assert expand_launches(ExpandCall(empty, "Q4_0", torch.float16, torch.int8, torch.empty(0, 32))) == []


MUTANTS = {
    "a weight beside": ("const i64 at = 4 * (", "const i64 at = 4 + 4 * ("),
    "a scale that is not rounded": ("return rounded(half_to_float(", "return (half_to_float("),
    "a product that is not rounded": ("return rounded(__fmul_rn(a, b));", "return __fmul_rn(a, b);"),
    "a sum in one step": ("w[i] = rounded(__fadd_rn(w[i], m));", "w[i] = __fadd_rn(w[i], m);"),
    "a difference that is not rounded": ("w[i] = rounded(__fsub_rn(", "w[i] = (__fsub_rn("),
    "unsigned codes": ("(float)signed_at(p + 2 + j + i)", "(float)byte_at(p + 2 + j + i)"),
    "the other nibbles": ("j / 16 * 4, 4);\n        if (bits)", "4 - j / 16 * 4, 4);\n        if (bits)"),
    "the wrong high bits": ("field(p + bits + j / 8,", "field(p + bits + j / 16,"),
    "another zero": ("of_32(p, j, w, 2, 6, 16, false)", "of_32(p, j, w, 2, 6, 15, false)"),
    "no minimum": ("of_32(p, j, w, 0, 4, 0, true)", "of_32(p, j, w, 0, 4, 0, false)"),
    "another number in the table": ("0x71594535u", "0x71594534u"),
    "a table that is always rounded": ("is_wide ? y : rounded(y)", "rounded(y)"),
    "a table that is never rounded": ("is_wide ? y : rounded(y)", "y"),
    "scales for minima": ("(float)(scale >> 4)", "(float)(scale & 15)"),
    "three bits for two": ("field(p + 104 + g % 4, g / 4 * 2, 2)", "field(p + 104 + g % 4, g / 4 * 2, 3)"),
    "no third bit": ("4 * field(p + j % 32 + i, j / 32, 1) - 4", "-4"),
    "six bits for four": ("scale = (low & 15) | ", "scale = (low & 63) | "),
    "the first minima for all": ("(byte_at(p + 4 + g) >> 2 & 48)", "(byte_at(p + g) >> 2 & 48)"),
    "no fifth bit": ("if (has_high_bits) q[i] |=", "if (false) q[i] |="),
    "unsigned scales": ("(float)signed_at(p + 192 + j / 16)", "(float)byte_at(p + 192 + j / 16)"),
    "the first half's low bits": ("field(p + 64 * half + k % 64 + i", "field(p + k % 64 + i"),
    "scales of neighbours": ("field(p + 4 + g / 2, g % 2 * 4, 4)", "field(p + 4 + g / 2, 4 - g % 2 * 4, 4)"),
    "float16 for bfloat16": ("p.out_kind == 1 ? float_to_half(w[i])", "p.out_kind >= 1 ? float_to_half(w[i])"),
    "halves of a word exchanged": ("four.x = h[0] | h[1] << 16;", "four.x = h[1] | h[0] << 16;"),
}  # fmt: skip


def is_found(text: str | None) -> bool:
    """Whether any variant with another text is refused at its first use."""
    mutated = None if text is None else {KIND: text}
    errors = [
        verify_gguf.largest_error(variant, CPU, lambda launches: emulate(launches, mutated=mutated))
        for variant in gguf_variants()[1:3]
    ]
    return max(errors) > 0


@pytest.mark.parametrize("mutant", [None, *some(MUTANTS, 4)])
def test_the_check_at_first_use_finds_what_is_wrong(mutant: str | None) -> None:
    if mutant is None:
        assert not is_found(None)
        return
    right, wrong = MUTANTS[mutant]
    text = source(KIND)
    assert text.count(right) == 1
    assert is_found(text.replace(right, wrong))


def layer(name: str = "Q4_K", rows: int = 48, columns: int = 512) -> tuple[Tensor, GgufMatrix]:
    weights, size, _ = FORMATS[name]
    data = torch.randint(0, 40, (rows * columns // weights * size,), dtype=torch.uint8)
    return torch.randn(3, columns), GgufMatrix(data, name, (rows, columns), torch.float16, torch.int8, torch.float32)


def times(*milliseconds: float) -> Any:
    """A clock that runs everything and then says this."""

    def clock(attempts: list[Any], device: torch.device) -> list[float]:
        for attempt in attempts:
            attempt()
        return list(milliseconds)

    return clock


@pytest.mark.parametrize(("clock", "takes_kernel"), [(times(1.0, 2.0), True), (times(2.0, 1.0), False)])
def test_a_layer_takes_the_faster_one(clock: Any, takes_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 5000)
    x, weight = layer()
    expected = linear(x, weight, None)
    with fresh_card(StandIn(CARD, execute)) as kernels:
        runtime = runtime_of(CPU)
        runtime._parts[ExpandTimings] = ExpandTimings(runtime, clock=clock, folder=lambda: None, is_on=True)
        assert torch.equal(linear(x, weight, None), expected)
        queued = len(kernels.queued)
        assert {launch.function for launch in kernels.queued} == set(KERNELS.values())  # they were checked
        assert torch.equal(linear(x, weight, None), expected)
        used = [launch.function for launch in kernels.queued[queued:]]
        assert used == ["pa_gguf_q4_k"] * len(weight.slices()) * takes_kernel


def test_a_kernel_that_fails_or_is_wrong_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = layer("Q8_0")
    expected, text = linear(x, weight, None), source(KIND)
    mutated = {KIND: text.replace(*MUTANTS["unsigned codes"])}
    with fresh_card(StandIn(CARD, lambda launch: emulate([launch], mutated=mutated))) as kernels:
        for _ in range(2):
            assert torch.equal(linear(x, weight, None), expected)
        assert "differs from the definition by inf" in why_not(CPU, "Q8_0", torch.float16, torch.float32)
        queued = len(kernels.queued)
        assert torch.equal(linear(x, weight, None), expected)
        assert len(kernels.queued) == queued
    driver = StandIn(CARD, execute)
    with fresh_card(driver):
        linear(x, weight, None)
        driver.faults["cuLaunchKernel"] = fails_once(1)
        assert torch.equal(linear(x, weight, None), expected)
        assert "invalid argument" in why_not(CPU, "Q8_0", torch.float16, torch.float32)


def test_what_no_kernel_expands_has_a_reason() -> None:
    assert "needs a CUDA device, got cpu" in why_not(CPU, "Q8_0", torch.float16, torch.float32)
    with fresh_card(StandIn(CARD, execute)):
        assert why_not(CPU, "Q8_0", torch.float16, torch.float32) == ""
        assert "does not expand BF16" in why_not(CPU, "BF16", torch.float16, torch.float32)
        assert "to torch.float64" in why_not(CPU, "Q8_0", torch.float16, torch.float64)


def test_the_kernels_are_tried_in_a_process_of_their_own(tmp_path: Path) -> None:
    start = Starter()
    parts = {
        Kernels: lambda runtime: CardKernels(runtime, StandIn()),
        GgufTrials: lambda runtime: GgufTrials(runtime, start=start, folder=lambda: tmp_path),
    }
    with using(Runtime("cpu", CARD, parts)):
        assert why_not(CPU, "Q8_0", torch.float16, torch.float32) == ""
    assert [job.needed for job in start.jobs] == [[[KIND, "float16", ""]]]
    said: list[dict[str, Any]] = []
    with fresh_card(StandIn(execute=execute)) as kernels:
        trial._run_one(kernels, from_row(start.jobs[0].needed[0]), lambda **line: said.append(line))
    assert said[-1]["error"] == 0
