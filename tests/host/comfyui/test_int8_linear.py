"""Pascal Int8 Linear on the tiny diffusion models of a real ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy.graph import largest_difference, sample
from attn_support.comfy.inside.comfy_checks import names_in, outcomes
from attn_support.comfy.server import ComfyServer

CHECKS = Path(__file__).parents[2] / "support" / "comfy" / "inside" / "comfy_int8_checks.py"


@pytest.fixture(scope="module")
def outcome(host_script: Callable[..., str]) -> dict[str, list[str]]:
    # Its own checks alone: it borrows helpers from those of FFN chunking.
    script = "import comfy_checks\nimport comfy_ffn_checks\ncomfy_checks.CHECKS.clear()\n"
    script += "from comfy_int8_checks import *\nrun_checks()"
    return outcomes(host_script(script, "--use-pytorch-cross-attention"))


@pytest.mark.parametrize("name", names_in(CHECKS))
def test_in_the_host(outcome: dict[str, list[str]], name: str) -> None:
    result, text = outcome[name]
    if result == "skipped":
        pytest.skip(text)
    assert result == "passed", text
