"""Pascal Second Card on the tiny diffusion models of a real ComfyUI, with a second device played by the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy.graph import largest_difference, sample
from attn_support.comfy.inside.comfy_checks import names_in, outcomes
from attn_support.comfy.server import ComfyServer

CHECKS = Path(__file__).parents[2] / "support" / "comfy" / "inside" / "comfy_second_checks.py"


@pytest.fixture(scope="module")
def outcome(host_script: Callable[..., str]) -> dict[str, list[str]]:
    script = "from comfy_second_checks import *\nrun_checks()"
    return outcomes(host_script(script, "--use-pytorch-cross-attention"))


@pytest.mark.parametrize("name", names_in(CHECKS))
def test_in_the_host(outcome: dict[str, list[str]], name: str) -> None:
    result, text = outcome[name]
    if result == "skipped":
        pytest.skip(text)
    assert result == "passed", text


def test_through_the_server_a_card_that_is_not_there_is_no_error(server: ComfyServer) -> None:
    stock = sample(server, "sd15")
    ours = sample(server, "sd15", ("PascalSecondCard", {"device": "cuda:3", "least_tokens": 64}))
    assert largest_difference(ours, stock) == 0
    assert ours.says("the model is on cpu, not on a card: the model is returned unchanged")
