"""Machine code, executed on a CPU by the interpreter of its maker's instructions, on the call with which a card checks a
kernel before its first use."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.trust import verify

from .modes import deterministic

CodeOf = Callable[[Compilation], bytes]


def largest_error(variant: Compilation, code_of: CodeOf, **how: Any) -> float:
    """As ``verify.largest_error`` finds it; new memory holds NaN. how: of the interpreter.

    Raises:
        AssertionError: an instruction met an error.
    """
    from ..amd import machine as amd
    from ..nvidia import machine as nvidia

    execute = amd.execute if variant.arch else nvidia.execute
    with deterministic(), torch.no_grad():
        return verify.largest_error(variant, torch.device("cpu"), lambda launches: execute(launches, code_of, **how))


class Result(NamedTuple):
    """error: relative to the tolerance, infinite where an instruction met an error; problem: which."""

    error: float
    seconds: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= 1


def result(variant: Compilation, code_of: CodeOf, **how: Any) -> Result:
    """What comes of a variant's sample call."""
    begin, problem = time.perf_counter(), ""
    try:
        error = largest_error(variant, code_of, **how) / verify.tolerance(variant)
    except (AssertionError, NotImplementedError) as failure:
        error, problem = float("inf"), str(failure)
    return Result(error, time.perf_counter() - begin, problem)
