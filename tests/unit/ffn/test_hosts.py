"""A host's additions to modules are recognised by what its package has registered, and by nothing in the core."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.ffn_zoo import Ffn
from torch import nn

from pascal_attn_core.ffn import forward, patch_ffn
from pascal_attn_core.patching import hosts

FILES = [file for module in (forward, hosts) for file in Path(module.__file__).parent.glob("*.py")]


@pytest.fixture(autouse=True)
def registered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_hooks", hosts._hooks)


def offload(module: nn.Module, calls: list[torch.Size]) -> None:
    """As a host does: the weights are empty between calls, and the hook counts them in an attribute of the module."""
    state: Any = module.__dict__
    weights = {name: parameter.data for name, parameter in module.named_parameters()}
    state["hosts_inner"], state["hosts_calls"] = module.forward, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        state["hosts_calls"] += 1
        for name, parameter in module.named_parameters():
            parameter.data = weights[name]
        try:
            return state["hosts_inner"](*args, **kwargs)
        finally:
            for parameter in module.parameters():
                parameter.data = parameter.data.new_empty(0)

    module.forward = forward  # type: ignore[method-assign]
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def slots(module: nn.Module) -> Iterator[hosts.Slot]:
    if "hosts_inner" in module.__dict__:
        yield module.__dict__, "hosts_inner"


def test_slices_run_below_hooks_that_are_registered() -> None:
    hosts.register(hosts.WeightHooks(("hosts_inner", "hosts_calls"), slots))
    model, x, calls = Ffn().eval(), torch.randn(1, 64, 16), []
    with torch.no_grad():
        expected = model(x)
        offload(model, calls)
        with patch_ffn(model, include="", chunk_tokens=16, min_tokens=8) as patch:
            torch.testing.assert_close(model(x), expected)
            torch.testing.assert_close(model(x), expected)
            assert patch.report().lines[0].state == "chunked", patch.report().text()
        assert calls == [x.shape, x.shape]  # once per call, not once per slice
        torch.testing.assert_close(model(x), expected)
    assert model.__dict__["hosts_inner"] == Ffn.forward.__get__(model)


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="expected WeightHooks or CastingLayers, got str"):
        hosts.register("_hook")  # type: ignore[arg-type]


def test_no_attribute_of_a_host_is_named() -> None:
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        hosts_names = [name for name in names if re.search(r"^_?(prev_)?(comfy|hf|diffusers|accelerate)_|^_old_", name)]
        assert file.name == "host_hooks.py" or not hosts_names
