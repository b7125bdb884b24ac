"""The gradient kernels on tensor cores, emulated on a CPU, against the definition in float64: the table's calls, the
shipped tiles, and the kernels with a barrier left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.fused.cases import Emulated, poisoned
from attn_support.fused.cases import backward as run_backward
from attn_support.fused.emulation import GXX, Deadlock, blocks_and_passes, build
from attn_support.oracle import assert_gradients_close, cast, gradients, plain_dtype
from attn_support.table import GRADIENT_TABLE, LAYOUTS, MASKS, Case
from torch import Tensor

from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.gradient_geometry import GRADIENT_HEAD_DIMS
from pascal_attn_core.fused.plan import Plan, gradient_variants, variants_of
from pascal_attn_core.fused.select import tensor_reasons
from pascal_attn_core.fused.source import Variant, source
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
TURING = (7, 5)
Numbers = list[Tensor | None]


def _halves(case: Case) -> Case | None:
    """The case in float16, if the kernels take its gradients."""
    if case.dtype in (torch.bfloat16, torch.float64):
        return None
    case = replace(case, dtype=torch.float16)
    call = _call(*case.build())
    if tensor_reasons(call, TURING) or not gradient_variants(call, TURING)[0].on_tensor_cores:
        return None
    return case


def _call(inputs: Numbers, options: dict[str, Any]) -> AttentionCall:
    leaves = [t.detach().requires_grad_() if t is not None and i < 3 else t for i, t in enumerate(inputs)]
    return check_call(*leaves, **options)  # type: ignore[arg-type]


TAKEN = [taken for case in GRADIENT_TABLE if (taken := _halves(case)) is not None]


def _saved(call: AttentionCall, inputs: Numbers, options: dict[str, Any]) -> Emulated:
    """What a forward pass saves, rounded as it rounds."""
    with torch.no_grad():
        out, lse = reference_sdpa(*(cast(t, torch.float64) for t in inputs), **options)
        log_sum = None
        if call.has_bias:
            # -inf as large as a half's numbers can be: lse less the row's maximum, which a unit matrix of values shows.
            log_sum = _log_sum(inputs, options, lse)
    plan = Plan(variants_of(call).forward, 0, gradient_variants(call, TURING))
    return Emulated(call, plan, out.to(call.query.dtype), lse.float(), log_sum)


def _log_sum(inputs: Numbers, options: dict[str, Any], lse: Tensor) -> Tensor:
    """lse without the row's maximum: lse of the same scores in a call whose rows are that much lower."""
    query, key, _, mask = (cast(t, torch.float64) for t in inputs)
    assert query is not None
    assert key is not None
    assert mask is not None
    unit = torch.eye(key.shape[-2], dtype=torch.float64).expand(*key.shape[:-1], key.shape[-2])
    probs, _ = reference_sdpa(query, key, unit, mask, **options)
    return -probs.max(dim=-1).values.log().float().where(lse.isfinite(), torch.zeros(()))


def _check(inputs: Numbers, options: dict[str, Any], with_lse: bool = False) -> tuple[Variant, ...]:
    call = _call(inputs, options)
    result = _saved(call, inputs, options)
    wide, narrow = ([cast(t, d) for t in inputs] for d in (torch.float64, plain_dtype(torch.float16, as_torch=True)))
    for some in (wide, narrow):
        some[:3] = [t.requires_grad_() for t in some[:3]]  # type: ignore[union-attr]
    (oracle, lse), (similar, similar_lse) = (reference_sdpa(*some, **options) for some in (wide, narrow))
    grad_out = torch.randn(oracle.shape).half()
    grad_lse = lse.isfinite().float() if with_lse else None
    answers = [
        gradients(o, some[:3], grad_out.to(o.dtype), some_lse if with_lse else None)  # type: ignore[arg-type]
        for o, some, some_lse in ((oracle, wide, lse), (similar, narrow, similar_lse))
    ]
    actual = run_backward(result, grad_out, grad_lse)
    assert_gradients_close(actual, *answers, lse.detach(), torch.float16)
    return result.plan.gradients


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_gradients_are_those_of_the_definition(case: Case) -> None:
    inputs, options = case.build()
    _check(inputs, options, with_lse="causal" in case.name)
