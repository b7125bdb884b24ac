"""One place of the core names what hosts add to modules."""

import ast
import re
from pathlib import Path

from pascal_attn_core.ffn import forward
from pascal_attn_core.patching import hosts

FILES = [file for module in (forward, hosts) for file in Path(module.__file__).parent.glob("*.py")]


def test_no_attribute_of_a_host_is_named_elsewhere() -> None:
    named = set()
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if any(re.search(r"^_?(prev_)?(comfy|hf|diffusers|accelerate)_|^_old_", name) for name in names):
            named.add(file.name)
    assert named == {"hosts.py"}
