"""Checks inside one process of a real ComfyUI, which takes ten seconds to start: each runs a whole file of them."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy.inside.comfy_checks import names_in, outcomes

INSIDE = Path(__file__).parents[2] / "support" / "comfy" / "inside"
SUB_QUADRATIC, SDPA = "", "--use-pytorch-cross-attention"
FILES = {
    "around": (SDPA,),
    "patch": (SUB_QUADRATIC, SDPA),
    "vae": (SUB_QUADRATIC, SDPA),
    "bands": (SUB_QUADRATIC, SDPA),
    "text": (SUB_QUADRATIC, SDPA),
    "estimate": (SDPA,),
    "ffn": (SDPA,),
    "int8": (SDPA,),
    "int8_lora": (SDPA,),
    "eight_bit": (SUB_QUADRATIC,),
    "kitchen": (SDPA,),
    "gguf_node": (SDPA,),
    "whole": (SUB_QUADRATIC, SDPA),
}
CASES = [
    pytest.param(file, argument, name, id=f"{file}-{'sdpa' if argument else 'sub-quadratic'}-{name}")
    for file, arguments in FILES.items()
    for argument in arguments
    for name in names_in(INSIDE / f"comfy_{file}_checks.py")
]
Outcomes = dict[str, list[str]]


@pytest.fixture(scope="module")
def outcome_of(host_script: Callable[..., str]) -> Callable[[str, str], Outcomes]:
    """``outcome_of(file, argument of ComfyUI)``: what each check of the file came to."""

    @functools.cache
    def outcome_of(file: str, argument: str) -> Outcomes:
        script = f"import comfy_{file}_checks\nfrom comfy_checks import run_checks\nrun_checks('comfy_{file}_checks')"
        try:
            return outcomes(host_script(script, *filter(None, [argument])))
        except AssertionError as failure:  # kept, so that the next check does not start the file again
            names = names_in(INSIDE / f"comfy_{file}_checks.py")
            return {name: ["failed", str(failure)] for name in names} | outcomes(str(failure))

    return outcome_of


@pytest.mark.parametrize(("file", "argument", "name"), CASES)
def test_in_the_host(outcome_of: Callable[[str, str], Outcomes], file: str, argument: str, name: str) -> None:
    result, text = outcome_of(file, argument)[name]
    if result == "skipped":
        pytest.skip(text)
    assert result == "passed", text
