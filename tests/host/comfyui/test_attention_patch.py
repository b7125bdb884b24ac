"""Pascal Attention Patch in one process of a real ComfyUI, with its own attention for a CPU and with torch's SDPA.

Calls in unusual layouts, models that call attention past the override, other packs' patches, the host's estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy.inside.comfy_checks import names_in, outcomes

CHECKS = Path(__file__).parents[2] / "support" / "comfy" / "inside" / "comfy_patch_checks.py"


@pytest.fixture(scope="module", params=["", "--use-pytorch-cross-attention"], ids=["sub-quadratic", "sdpa"])
def outcome(request: pytest.FixtureRequest, host_script: Callable[..., str]) -> dict[str, list[str]]:
    code = "load_pack()\nfrom comfy_patch_checks import *\nrun_checks()"
    return outcomes(host_script(code, *filter(None, [request.param])))


@pytest.mark.parametrize("name", names_in(CHECKS))
def test_in_the_host(outcome: dict[str, list[str]], name: str) -> None:
    result, text = outcome[name]
    if result == "skipped":
        pytest.skip(text)
    assert result == "passed", text
