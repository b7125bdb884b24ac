"""``pascal-attn selftest`` on a real card: everything is right, in its time."""

import time

import pytest
import torch

from pascal_attn_core.cli.selftest import selftest
from pascal_attn_core.selftest import describe
from pascal_attn_core.selftest.cases import CASES, DTYPES

pytestmark = pytest.mark.gpu


def test_everything_is_right_and_measured_within_its_time() -> None:
    start = time.monotonic()
    found = selftest(torch.device("cuda", torch.cuda.current_device()), 60.0)
    print(describe(found))
    assert time.monotonic() - start < 90
    assert found.problems == []
    assert found.is_right
    assert not found.why_no_kernels
    computed = {(check.case, check.dtype) for check in found.checks if check.route == "fused" and not check.refused}
    assert computed == {(case.name, dtype) for case in CASES if case.way != "varlen" for dtype in DTYPES}
    assert found.before is not None
    assert found.over_torch("auto") is not None
