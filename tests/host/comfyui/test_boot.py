"""The pack alone in a real ComfyUI: it loads without a word of complaint, shows its nodes, and touches nothing."""

import json
import re
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attn_support.comfy.archive import unpack_archive
from attn_support.comfy.pack import load_pack
from attn_support.comfy.server import COLOUR, ComfyServer, Host, base_directory, command
from attn_support.comfy.workflow_files import NAMES

FOLDERS = ["ComfyUI-Pascal-Attention", "Pascal Attention v0.1 (my copy)"]
PLACED = [*({"folder": folder} for folder in FOLDERS), {"folder": "pascal-attention", "put": unpack_archive}]
COMPLAINT = re.compile(r"warn|error|traceback|failed|cannot import", re.IGNORECASE)
NODES = set(load_pack().NODE_CLASS_MAPPINGS)


def boot_once(host: Host, base: Path) -> tuple[int, list[str]]:
    """Exit code and log of ``--quick-test-for-ci``."""
    arguments = ["--quick-test-for-ci", "--disable-all-custom-nodes"]
    packs = sorted(path.name for path in (base / "custom_nodes").iterdir())
    if packs:
        arguments += ["--whitelist-custom-nodes", *packs]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = command(host, base, *arguments)
    done = subprocess.run(line, cwd=host.path, env=host.environment(), timeout=300, **output)
    return done.returncode, COLOUR.sub("", done.stdout).replace(str(base), "").splitlines()


def complaints(log: list[str]) -> set[str]:
    return {line for line in log if COMPLAINT.search(line)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_host_boots_with_our_pack_as_quietly_as_without(comfy_host: Host, folder: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    for name in ("custom_nodes", "models", "user"):
        (bare / name).mkdir(parents=True)
    expected_code, expected_log = boot_once(comfy_host, bare)
    code, log = boot_once(comfy_host, base_directory(tmp_path / "with", None, folder=folder))
    assert code == expected_code == 0, "\n".join(log[-40:])
    assert complaints(log) <= complaints(expected_log)
    assert [line for line in log if folder in line and "seconds" in line], "\n".join(log)


@pytest.fixture(scope="module", params=PLACED, ids=[*FOLDERS, "the registry's archive"])
def lone_server(request: pytest.FixtureRequest, start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """A server with our pack only: as cloned, under each folder name, and as the registry unpacks it."""
    server = start_server("--use-pytorch-cross-attention", packs=(), placed=request.param)
    yield server
    server.stop()


def our_nodes(server: ComfyServer) -> dict[str, Any]:
    """Return what the front end is told about our nodes, and about nobody else's."""
    info = server.request("/object_info", timeout_s=120)
    return {name: node for name, node in info.items() if "custom_nodes" in node.get("python_module", "")}


def test_every_node_is_there_and_no_other_and_nothing_is_complained_of(lone_server: ComfyServer) -> None:
    assert set(our_nodes(lone_server)) == NODES
    assert not [line for line in lone_server.log if "IMPORT FAILED" in line or "Traceback" in line]


def test_every_node_input_and_output_is_explained(lone_server: ComfyServer) -> None:
    for name, node in our_nodes(lone_server).items():
        assert len(node["description"]) > 40, name
        assert node["display_name"].startswith("Pascal "), name
        assert node["category"].startswith("model/patch"), name
        for kind in ("required", "optional"):
            for key, (_, *options) in node["input"].get(kind, {}).items():
                assert options, (name, key)
                assert options[0].get("tooltip"), (name, key)
        assert len(node.get("output_tooltips") or ()) == len(node["output"]), name
        assert all(node.get("output_tooltips") or ()), name


def test_help_pages_and_workflows_are_served(lone_server: ComfyServer) -> None:
    (pack,) = {node["python_module"].partition(".")[2] for node in our_nodes(lone_server).values()}
    if pack != urllib.parse.quote(pack):
        pytest.skip("aiohttp, which ComfyUI serves files with, finds no folder whose name has to be quoted")
    for name, node in our_nodes(lone_server).items():
        page = lone_server.fetched(f"/extensions/{pack}/docs/{name}.md").decode()
        assert page.startswith("# "), name
        assert page.count("\n| ") + page.count("\n- ") > len(node["input"].get("required", {})), name
    assert sorted(lone_server.request("/workflow_templates")[pack]) == NAMES
    for name in NAMES:
        assert lone_server.request(f"/api/workflow_templates/{pack}/{name}.json")["nodes"]
        assert lone_server.fetched(f"/api/workflow_templates/{pack}/{name}.jpg").startswith(b"\xff\xd8")


def test_defaults_are_accepted_by_the_host(lone_server: ComfyServer) -> None:
    """A node dropped onto a graph and not touched: every default lies in its own range and list."""
    for name, node in our_nodes(lone_server).items():
        for key, (kind, *options) in node["input"].get("required", {}).items():
            given = options[0] if options else {}
            if isinstance(kind, list):
                assert given.get("default", kind[0]) in kind, (name, key)
            elif kind in ("INT", "FLOAT"):
                assert given["min"] <= given["default"] <= given["max"], (name, key)
                assert kind == "FLOAT" or isinstance(given["default"], int), (name, key)


IMPORT = """
import json
import torch.nn.functional as F
from comfy.ldm.modules import attention

def state():
    functions = F.scaled_dot_product_attention, attention.optimized_attention, torch.nn.Module.__call__
    return [torch.__version__, torch.__file__, torch.is_grad_enabled(), *map(id, functions)]

import nodes
before, modules = state(), set(sys.modules)
known = set(nodes.NODE_CLASS_MAPPINGS)
mappings = load_pack()
new = set(sys.modules) - modules
print("RESULT", json.dumps({
    "same": before == state(),
    "nodes": sorted(set(mappings) - known),
    "cuda": torch.cuda.is_initialized(),
    "foreign": sorted({name.partition(".")[0] for name in new if "pascal" not in name.lower()
                       and str(PACK) not in str(getattr(sys.modules[name], "__file__", None))}),
}))
"""


def test_importing_the_pack_changes_nothing_in_torch_or_the_host(host_script: Callable[..., str]) -> None:
    result = json.loads(host_script(IMPORT).rpartition("RESULT")[2])
    assert result["same"]
    assert set(result["nodes"]) == NODES
    assert not result["cuda"]
    assert not {"diffusers", "triton", "matplotlib", "transformers"} & set(result["foreign"])
