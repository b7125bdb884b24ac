"""Pascal VAE Attention, decoding and encoding in bands, on the tiny VAEs of a real ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy.inside.comfy_checks import names_in, outcomes

CHECKS = Path(__file__).parents[2] / "support" / "comfy" / "inside" / "comfy_bands_checks.py"


@pytest.fixture(scope="module", params=["", "--use-pytorch-cross-attention"], ids=["sub-quadratic", "sdpa"])
def outcome(request: pytest.FixtureRequest, host_script: Callable[..., str]) -> dict[str, list[str]]:
    return outcomes(host_script("from comfy_bands_checks import *\nrun_checks()", *filter(None, [request.param])))


@pytest.mark.parametrize("name", names_in(CHECKS))
def test_in_the_host(outcome: dict[str, list[str]], name: str) -> None:
    result, text = outcome[name]
    if result == "skipped":
        pytest.skip(text)
    assert result == "passed", text
