"""The registry's archive, unpacked into ``custom_nodes``, on the real host."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from attn_support.comfy.archive import unpack_archive
from attn_support.comfy.pack import load_pack
from attn_support.comfy.server import ComfyServer, Host
from attn_support.comfy.workflow_files import NAMES


@pytest.fixture(scope="module")
def server_of_archive(comfy_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("archive")
    for folder in ("models", "user"):
        (base / folder).mkdir()
    unpack_archive(base / "custom_nodes" / "pascal-attention")
    server = ComfyServer(comfy_host, base)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


def test_all_nodes_of_the_archive_load_without_a_warning(server_of_archive: ComfyServer) -> None:
    known = server_of_archive.request("/object_info")
    assert set(load_pack().NODE_CLASS_MAPPINGS) <= set(known)
    assert not [line for line in server_of_archive.log if "IMPORT FAILED" in line or "Traceback" in line]


def fetched(server: ComfyServer, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as answer:
        return answer.read()


def test_help_pages_and_workflows_are_served(server_of_archive: ComfyServer) -> None:
    assert sorted(server_of_archive.request("/workflow_templates")["pascal-attention"]) == NAMES
    for name in NAMES:
        assert server_of_archive.request(f"/api/workflow_templates/pascal-attention/{name}.json")["nodes"]
        assert fetched(server_of_archive, f"/api/workflow_templates/pascal-attention/{name}.jpg").startswith(
            b"\xff\xd8"
        )
    for kind in load_pack().NODE_CLASS_MAPPINGS:
        assert fetched(server_of_archive, f"/extensions/pascal-attention/docs/{kind}.md").startswith(b"# ")
