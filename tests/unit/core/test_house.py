"""Importing the package does nothing to anybody; the names in ``public_names.txt`` may be imported for good."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from attn_support.fresh import run

import pascal_attn_core

ROOT = Path(pascal_attn_core.__file__).parent


@pytest.mark.torch_2_5
def test_importing_loads_no_host_starts_no_cuda_changes_no_state_and_writes_nothing() -> None:
    code = """
import logging, sys, torch
import torch.nn.functional as F
logging.basicConfig(level=0, stream=sys.stdout)
before, loaded = F.scaled_dot_product_attention, set(sys.modules)
threads, grad, random = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
import pascal_attn_core
assert F.scaled_dot_product_attention is before
assert torch.equal(torch.get_rng_state(), random)
import pascal_attn_core.cli.run, pascal_attn_core.ffn, pascal_attn_core.flash_attn, pascal_attn_core.sdpa_patch
from pascal_attn_core.machine.runtime import runtimes
assert not torch.cuda.is_initialized() and not runtimes()
assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)
hosts = "torch._dynamo torch._inductor diffusers transformers comfy triton safetensors matplotlib numpy.testing"
print([name for name in hosts.split() if name in sys.modules and name not in loaded])
"""
    assert run(code, env={"PASCAL_ATTN_ROUTES": "x"}) == "[]"


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
        texts = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
        trees = {path: ast.walk(ast.parse(text)) for path, text in texts.items() if attribute in text}
        return {
            path.relative_to(ROOT).as_posix()
            for path, nodes in trees.items()
            if any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)
        }

    assert users("get_device_properties") == {"machine/device.py"}
    assert users("environ") == {"config.py", "cli/demo/__init__.py"}  # the demo silences other libraries


LINES = (Path(__file__).parent / "public_names.txt").read_text(encoding="utf-8").splitlines()
PUBLIC = {path: set(names.split()) for path, _, names in (line.partition(": ") for line in LINES)}


@pytest.mark.parametrize("path", PUBLIC)
def test_an_import_path_has_its_names_and_each_says_what_it_is(path: str) -> None:
    host = path.rpartition(".")[2]
    if host in ("diffusers", "transformers"):
        pytest.importorskip(host)
    importlib.import_module(path)
    module = sys.modules[path]  # also where the package has a function of the same name
    assert set(module.__all__) == PUBLIC[path]
    starred: dict[str, object] = {}
    exec(f"from {path} import *", starred)  # noqa: S102  # what a program writes
    assert all(starred[name] is getattr(module, name) for name in PUBLIC[path])
    assert [name for name in PUBLIC[path] if callable(starred[name]) and not starred[name].__doc__] == []
