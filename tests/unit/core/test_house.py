"""What importing the package does: nothing to anybody. And rules that hold in every module of it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from attn_support.fresh import run

import pascal_attn_core

ROOT = Path(pascal_attn_core.__file__).parent


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """By their path in the package."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


@pytest.mark.torch_2_5
def test_importing_loads_no_host_and_starts_no_cuda() -> None:
    hosts = [
        "torch._dynamo",
        "torch._inductor",
        "diffusers",
        "transformers",
        "comfy",
        "triton",
        "safetensors",
        "matplotlib",
        "rich",
        "numpy.testing",
    ]
    code = f"""
import sys, torch
import torch.nn.functional as F
before, loaded = F.scaled_dot_product_attention, set(sys.modules)
threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
import pascal_attn_core
assert F.scaled_dot_product_attention is before
import pascal_attn_core.cli.run, pascal_attn_core.ffn, pascal_attn_core.flash_attn, pascal_attn_core.sdpa_patch
assert not torch.cuda.is_initialized()
assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)
print([name for name in {hosts} if name in sys.modules and name not in loaded])
"""
    assert run(code, env={}) == "[]"


def test_importing_writes_nothing() -> None:
    code = "import logging; logging.basicConfig(level=0)\nimport pascal_attn_core"
    assert run(code, env={"PASCAL_ATTN_ROUTES": "x"}) == ""


def test_importing_does_not_touch_the_random_state() -> None:
    code = """
import torch
before = torch.get_rng_state()
import pascal_attn_core
print(torch.equal(before, torch.get_rng_state()))
"""
    assert run(code, env={}) == "True"


def test_an_unusable_environment_breaks_neither_the_import_nor_a_call_and_is_told_once() -> None:
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import pascal_attn_core, torch
print("imported")
q = torch.zeros(1, 1, 2, 2)
for _ in range(3):
    assert pascal_attn_core.sdpa(q, q, q).shape == q.shape
"""
    told = ["imported", "PASCAL_ATTN_BUDGET_MIB is ignored: budget_mib must be a number, got 'lots'"]
    assert run(code, env={"PASCAL_ATTN_BUDGET_MIB": "lots"}).splitlines() == told


def test_only_one_module_asks_cuda_for_properties_and_one_reads_the_environment() -> None:
    def users(attribute: str) -> set[str]:
        return {
            name
            for name, tree in _modules().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == attribute
        }

    assert users("get_device_properties") == {"machine/device.py"}
    assert users("environ") == {"config.py", "cli/demo/__init__.py"}  # the demo silences other libraries


def test_no_error_is_swallowed() -> None:
    for name, tree in _modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                silent = all(isinstance(line, ast.Pass) for line in node.body)
                assert caught, f"{name}:{node.lineno}: a bare except"
                assert not (silent and caught.endswith("Exception")), f"{name}:{node.lineno}: {caught} ignored"


def test_everything_promised_is_there() -> None:
    for name in pascal_attn_core.__all__:
        assert hasattr(pascal_attn_core, name)
    for name in ("sdpa", "sdpa_with_lse", "explain", "AttentionConfig", "Patch", "record", "tiled_attention"):
        assert name in pascal_attn_core.__all__
