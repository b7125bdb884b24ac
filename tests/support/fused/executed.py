"""Machine code, executed on a CPU by the interpreter of its maker's instructions: on the call with which a card checks
a kernel before its first use."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from pascal_attn_core.call import AttentionCall
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust import verify

from ..amd import machine as amd
from ..nvidia import machine as nvidia
from .memory import far
from .modes import deterministic

CodeOf = Callable[[Compilation], bytes]


def largest_error(variant: Compilation, code_of: CodeOf, *, is_far: bool = False, **how: Any) -> float:
    """As ``verify.largest_error`` finds it; new memory holds NaN.

    Args:
        is_far: on two batch elements, in tensors whose strides are far beyond 2^31 bytes.
        how: of the interpreter.

    Raises:
        AssertionError: an instruction met an error.
    """
    execute = amd.execute if variant.arch else nvidia.execute

    def run(launches: list[Launch]) -> None:
        execute(map(far, launches) if is_far else launches, code_of, **how)

    sample_call = _two_batch_elements if is_far else verify.sample_call
    with deterministic(), torch.no_grad(), mock.patch.object(verify, "sample_call", sample_call):
        return verify.largest_error(variant, torch.device("cpu"), run)


def _two_batch_elements(variant: Variant, *given: Any, sample_call: Callable = verify.sample_call) -> AttentionCall:
    """The sample call and another one, where a kernel has no list of its blocks or sequences."""
    call = sample_call(variant, *given)
    if variant.is_even or variant.traits.is_packed:
        return call
    both = {name: torch.cat([t, t.flip(-1)]) for name in ("query", "key", "value") for t in (getattr(call, name),)}
    if call.attn_mask is not None:
        both["attn_mask"] = torch.stack([call.attn_mask.roll(n, -1) for n in range(4)]).unflatten(0, (2, 2))
    return replace(call, batch=(2,), **both)


class Result(NamedTuple):
    """error: relative to the tolerance, infinite where an instruction met an error; problem: which."""

    error: float
    seconds: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= 1


def result(variant: Compilation, code_of: CodeOf, **how: Any) -> Result:
    """What comes of a variant's sample call, and of the one with strides that are far beyond 2^31 bytes."""
    begin, problem = time.perf_counter(), ""
    try:
        errors = [largest_error(variant, code_of, is_far=is_far, **how) for is_far in (False, True)]
        error = max(errors) / verify.tolerance(variant)
    except (AssertionError, NotImplementedError) as failure:
        error, problem = float("inf"), str(failure)
    return Result(error, time.perf_counter() - begin, problem)
