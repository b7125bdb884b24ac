"""Fixtures of the tests on a real ComfyUI. Everything here skips unless ``COMFYUI_PATH`` names a checkout.

    COMFYUI_PATH=/path/to/ComfyUI COMFYUI_PYTHON=/path/to/its/python pytest tests/host/comfyui

``PASCAL_ATTN_TINY_MODELS=<folder>`` keeps the tiny models (2.5 to 3.7 GB per ComfyUI version) from one run to the next.
The test process imports nothing of ComfyUI; ``attn_support.comfy.graph`` builds and runs graphs.
"""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attn_support.comfy.graph import FAMILIES
from attn_support.comfy.server import ComfyServer, Host, base_directory

HERE = Path(__file__).parent
SUPPORT = HERE.parents[1] / "support" / "comfy" / "inside"
PROBE_PACK = HERE / "probe_pack"
RUNNING: list[ComfyServer] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for ``--dist loadgroup``; a skip without a host."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.xdist_group("comfyui"))
        if not os.environ.get("COMFYUI_PATH"):
            item.add_marker(pytest.mark.skip(reason="COMFYUI_PATH is not set: no ComfyUI to test with"))


@pytest.fixture(scope="session")
def comfy_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The ComfyUI under test. Under xdist the workers take turns: two hosts at once would need twice the memory."""
    path = Path(os.environ["COMFYUI_PATH"]).resolve()
    if not (path / "comfyui_version.py").is_file():
        raise FileNotFoundError(f"COMFYUI_PATH must be a ComfyUI checkout, got {path}")
    version = re.search(r'__version__ = "([\d.]+)"', (path / "comfyui_version.py").read_text())
    assert version is not None
    python = os.environ.get("COMFYUI_PYTHON", sys.executable)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with (Path(tempfile.gettempdir()) / f"pascal-attn-comfyui-{run}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield Host(path, python, version[1])
    Path(turn.name).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def tiny_models(comfy_host: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of tiny models and its manifest; built when the cache has none by this builder for this host."""
    builders = b"".join(path.read_bytes() for path in sorted(SUPPORT.glob("comfy_tiny_*.py")))
    key = f"{comfy_host.version}-{hashlib.sha256(builders).hexdigest()[:12]}"
    cache = os.environ.get("PASCAL_ATTN_TINY_MODELS")
    folder = (Path(cache) if cache else tmp_path_factory.mktemp("tiny")) / key
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not manifest.is_file():
            run_host(comfy_host, [str(SUPPORT / "comfy_tiny_build.py")], TINY_MODELS=str(folder))
    return folder, json.loads(manifest.read_text())


@pytest.fixture(scope="session")
def tiny_model(tiny_models: tuple[Path, dict[str, Any]]) -> Callable[[str], str]:
    """``tiny_model(name)``: its file name as the loader nodes list it; skips where the host does not load it."""

    def file_of(name: str) -> str:
        entry = tiny_models[1][name]
        if "skip" in entry:
            pytest.skip(f"{name}: {entry['skip']}")
        return entry["file"]

    return file_of


@pytest.fixture
def family(request: pytest.FixtureRequest, comfy_host: Host, tiny_model: Callable[[str], str]) -> str:
    """Indirect parameter: the name of a family that this host loads and runs."""
    needs = FAMILIES[request.param]
    tiny_model(needs.model or request.param)
    if comfy_host.version_tuple < needs.since:
        pytest.skip(f"{request.param}: ComfyUI {comfy_host.version} itself fails in it")
    return request.param


StartServer = Callable[..., ComfyServer]


@pytest.fixture(scope="session")
def start_server(comfy_host: Host, tiny_models: tuple[Path, dict[str, Any]], tmp_path_factory) -> Iterator[StartServer]:
    """``start_server(*arguments, packs=..., placed={"folder": ...}, VARIABLE="1")`` waits until it answers."""

    def start(
        *arguments: str, packs: tuple[Path, ...] = (PROBE_PACK,), placed: dict[str, Any] | None = None, **variables: str
    ) -> ComfyServer:
        base = base_directory(tmp_path_factory.mktemp("comfyui"), tiny_models[0], packs, **(placed or {}))
        server = ComfyServer(comfy_host, base, arguments, variables)
        RUNNING.append(server)
        server.wait_until_up()
        return server

    yield start
    for server in RUNNING:
        server.ask_to_stop()
    for server in RUNNING:
        server.stop()
    RUNNING.clear()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> ComfyServer:
    """ComfyUI with torch's SDPA as its attention."""
    return start_server("--use-pytorch-cross-attention")


@pytest.fixture(scope="session")
def plain_server(start_server: StartServer) -> ComfyServer:
    """ComfyUI with the attention that it chooses for a CPU, and our pack in a folder that no module could be named."""
    return start_server(placed={"folder": "Pascal Attention v0.1 (my copy)"})


def run_host(host: Host, arguments: list[str], timeout_s: float = 1800, **environment: str) -> str:
    """Return what the host's interpreter printed in the checkout; an AssertionError with it if that failed or hung."""
    try:
        done = subprocess.run(
            [host.python, *arguments],
            cwd=host.path,
            env=host.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        text = (late.output or b"").decode(errors="replace")
        raise AssertionError(f"{arguments[0]} did not end within {timeout_s} s:\n{text[-6000:]}") from None
    if done.returncode:
        raise AssertionError(f"{arguments[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done.stdout


@pytest.fixture(scope="session")
def host_script(comfy_host: Host, tiny_models: tuple[Path, dict[str, Any]], tmp_path_factory) -> Callable[..., str]:
    """``host_script(code, *arguments of ComfyUI)``: what code after ``from comfy_inproc import *`` printed there."""

    def run(code: str, *arguments: str) -> str:
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(f"import sys\nsys.path[0] = {str(SUPPORT)!r}\nfrom comfy_inproc import *\n{code}\n")
        given = {"TINY_MODELS": str(tiny_models[0]), "GGUF_PACK": os.environ.get("PASCAL_ATTN_GGUF", "")}
        return run_host(comfy_host, [str(script), *arguments], **given)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Remember how long the logs were when the test began; show what came after if it fails."""
    if call.when == "setup":
        item.stash[_LOG_LENGTHS] = {}
    report = yield
    if report.when == "setup":
        item.stash[_LOG_LENGTHS] = {server.port: len(server.log) for server in RUNNING}
    if report.failed:
        for server in RUNNING:
            new = server.log[item.stash[_LOG_LENGTHS].get(server.port, 0) :]
            title = f"server log: {' '.join(server.arguments) or 'no arguments'}"
            report.sections.append((title, "\n".join(new[-60:])))
    return report


_LOG_LENGTHS = pytest.StashKey[dict[int, int]]()
