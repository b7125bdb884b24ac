"""Blocks of GGUF files expanded by the kernels, emulated, have the definition's bits for every format and dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.clock import Clock
from attn_support.fused.device import execute, fresh_card
from attn_support.fused.driver import StandIn, fails_once
from attn_support.fused.emulation import CARD, emulate
from attn_support.fused.trials import Starter, tried
from attn_support.oracle import same_bits
from attn_support.randomness import some
from mutants import MUTANTS
from torch import Tensor

from pascal_attn_core.fused.code.kinds import GGUF_EXPAND, KERNELS
from pascal_attn_core.fused.code.source import from_row, gguf_variants, source
from pascal_attn_core.fused.launch.gguf import DTYPES, ExpandCall, expand_launches
from pascal_attn_core.fused.linear import why_no_expansion
from pascal_attn_core.fused.trust import trial, verify_linear
from pascal_attn_core.gguf import matrix as matrices
from pascal_attn_core.gguf.matrix import ExpandWays, GgufMatrix, linear
from pascal_attn_core.machine.runtime import runtime_of, using
from pascal_attn_core.reference.gguf_blocks import FORMATS, expand

CPU = torch.device("cpu")


def expanded(blocks: Tensor, name: str, arithmetic: torch.dtype, table: torch.dtype, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(blocks), FORMATS[name].weights), float("nan"), dtype=dtype)
    emulate(expand_launches(ExpandCall(blocks, name, arithmetic, table, out)))
    return out


@pytest.mark.parametrize("arithmetic", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_bit_is_that_of_the_definition(name: str, arithmetic: torch.dtype) -> None:
    size = FORMATS[name].bytes
    for count, first in ((1, 0), (70, 1), (33, 2)):  # blocks may begin at any byte, and end within a thread block
        blocks = torch.randint(0, 256, (first + count * size,), dtype=torch.uint8)[first:].view(count, size)
        blocks[-1] = 255
        for dtype in DTYPES:
            for table in (torch.int8, torch.float32):
                right = expand(blocks.clone(), name, arithmetic, table=table).to(dtype)
                assert same_bits(expanded(blocks, name, arithmetic, table, dtype), right)


@pytest.mark.parametrize("name", KERNELS)
def test_zero_and_subnormal_scales(name: str) -> None:
    blocks = torch.randint(0, 256, (64, FORMATS[name].bytes), dtype=torch.uint8)
    blocks[:32, 1::2] = 0  # the upper byte of every scale that begins at an even one
    blocks[:4] = 0
    for arithmetic in DTYPES:
        right = expand(blocks, name, arithmetic)
        assert same_bits(expanded(blocks, name, arithmetic, torch.int8, arithmetic), right)


def test_every_format_that_is_not_a_dtype_has_a_kernel() -> None:
    assert set(KERNELS) == set(FORMATS) - {"BF16"}


def test_no_blocks_are_no_launch() -> None:
    empty = torch.empty(0, 18, dtype=torch.uint8)
    assert expand_launches(ExpandCall(empty, "Q4_0", torch.float16, torch.int8, torch.empty(0, 32))) == []


EACH = [name for name, mutant in MUTANTS.items() if mutant.file.endswith("gguf_expand.cu")]


def mutated(name: str) -> str:
    """The kernels' source with one place of ``tools/mutants.txt`` made wrong."""
    return source(GGUF_EXPAND).replace(MUTANTS[name].right, MUTANTS[name].wrong)


@pytest.mark.parametrize("mutant", [None, *some(EACH, 4)])
def test_the_check_at_first_use_finds_what_is_wrong(mutant: str | None) -> None:
    """Any variant with another text is refused at its first use."""
    wrong = mutant and {GGUF_EXPAND: mutated(mutant)}
    errors = [
        verify_linear.expansion_error(variant, CPU, lambda launches: emulate(launches, mutated=wrong))
        for variant in gguf_variants()[1:3]
    ]
    assert (max(errors) > 0) == (mutant is not None)


def layer(name: str = "Q4_K", rows: int = 48, columns: int = 512) -> tuple[Tensor, GgufMatrix]:
    weights, size, _ = FORMATS[name]
    data = torch.randint(0, 40, (rows * columns // weights * size,), dtype=torch.uint8)
    return torch.randn(3, columns), GgufMatrix(data, name, (rows, columns), torch.float16, torch.int8, torch.float32)


@pytest.mark.parametrize("takes_kernel", [True, False])
def test_a_layer_takes_the_faster_one(takes_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "slice_weights", lambda _: 5000)
    x, weight = layer()
    expected = linear(x, weight, None)
    with fresh_card(StandIn(CARD, execute)) as kernels:
        runtime = runtime_of(CPU)
        runtime._parts[ExpandWays] = ExpandWays(
            runtime, clock=Clock(1.0, 2.0 if takes_kernel else 0.5), folder=lambda: None, is_on=True
        )
        assert torch.equal(linear(x, weight, None), expected)
        queued = len(kernels.queued)
        assert {launch.function for launch in kernels.queued} == set(KERNELS.values())  # they were checked
        assert torch.equal(linear(x, weight, None), expected)
        used = [launch.function for launch in kernels.queued[queued:]]
        assert used == ["pa_gguf_q4_k"] * len(weight.slices()) * takes_kernel


def test_a_kernel_that_fails_or_is_wrong_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = layer("Q8_0")
    expected, wrong = linear(x, weight, None), {GGUF_EXPAND: mutated("expand_unsigned_codes")}
    with fresh_card(StandIn(CARD, lambda launch: emulate([launch], mutated=wrong))) as kernels:
        for _ in range(2):
            assert torch.equal(linear(x, weight, None), expected)
        assert "differs from the definition by inf" in why_no_expansion(CPU, "Q8_0", torch.float16, torch.float32)
        queued = len(kernels.queued)
        assert torch.equal(linear(x, weight, None), expected)
        assert len(kernels.queued) == queued
    driver = StandIn(CARD, execute)
    with fresh_card(driver):
        linear(x, weight, None)
        driver.faults["cuLaunchKernel"] = fails_once(1)
        assert torch.equal(linear(x, weight, None), expected)
        assert "invalid argument" in why_no_expansion(CPU, "Q8_0", torch.float16, torch.float32)


def test_what_no_kernel_expands_has_a_reason() -> None:
    assert "needs a CUDA device, got cpu" in why_no_expansion(CPU, "Q8_0", torch.float16, torch.float32)
    with fresh_card(StandIn(CARD, execute)):
        assert why_no_expansion(CPU, "Q8_0", torch.float16, torch.float32) == ""
        assert "does not expand BF16" in why_no_expansion(CPU, "BF16", torch.float16, torch.float32)
        assert "to torch.float64" in why_no_expansion(CPU, "Q8_0", torch.float16, torch.float64)


def test_the_kernels_are_tried_in_a_process_of_their_own(tmp_path: Path) -> None:
    start = Starter()
    with using(tried(start, tmp_path)):
        assert why_no_expansion(CPU, "Q8_0", torch.float16, torch.float32) == ""
    assert [job.needed for job in start.jobs] == [[[GGUF_EXPAND, "float16", ""]]]
    said: list[dict[str, Any]] = []
    with fresh_card(StandIn(execute=execute)) as kernels:
        trial._run_one(kernels, from_row(start.jobs[0].needed[0]), lambda **line: said.append(line))
    assert said[-1]["error"] == 0
