"""A ComfyUI server in a process of its own, spoken to over HTTP as the front end does."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
MODEL_FOLDERS = ("checkpoints", "diffusion_models", "loras", "text_encoders", "vae")
NOT_PRODUCT = shutil.ignore_patterns(".*", "tests", "__pycache__", "*.egg-info", "build", "dist", "*_out")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Host:
    """A ComfyUI checkout and the interpreter that runs it."""

    path: Path
    python: str
    version: str

    @property
    def version_tuple(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split("."))

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a host process: one thread, nothing timed, no variable of ours or of the test process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PASCAL_ATTN_", "PYTHON"))}
        return {**kept, "OMP_NUM_THREADS": "1", "PASCAL_ATTN_NO_TIMING": "1", "COMFYUI_PATH": str(self.path), **more}


@dataclass(frozen=True)
class Outcome:
    """This class says how one prompt ended: ``status`` is ``"success"``, ``"error"`` or ``"interrupted"``."""

    status: str
    message: str  # of the exception
    log: list[str]  # the lines that the server logged meanwhile
    outputs: dict[str, Any] = field(default_factory=dict)  # by node id


class WorkflowError(AssertionError):
    """A prompt that was refused (then ``outcome`` is None), or did not end in success."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


def copy_pack(folder: Path) -> None:
    """Put what a user's ``git clone`` would hold into ``folder``."""
    shutil.copytree(REPOSITORY, folder, ignore=NOT_PRODUCT)


def base_directory(
    root: Path,
    models: Path | None,
    packs: Iterable[Path] = (),
    folder: str = "ComfyUI-Pascal-Attention",
    put: Callable[[Path], object] = copy_pack,
) -> Path:
    """A ``--base-directory``: our pack, the packs given, and the tiny models; the checkout stays untouched."""
    custom_nodes = root / "custom_nodes"
    custom_nodes.mkdir(parents=True)
    put(custom_nodes / folder)
    for pack in packs:
        shutil.copytree(pack, custom_nodes / pack.name, ignore=NOT_PRODUCT)
    (root / "models").mkdir()
    for name in MODEL_FOLDERS if models else ():
        (root / "models" / name).symlink_to(models / name, target_is_directory=True)
    (root / "user").mkdir()
    return root


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(host: Host, base: Path, *arguments: str) -> list[str]:
    fixed = ["--cpu", "--disable-api-nodes", "--base-directory", str(base), "--database-url", f"sqlite:///{base}/db"]
    return [host.python, str(host.path / "main.py"), *fixed, *arguments]


class ComfyServer:
    """One running server. ``run`` posts a prompt and waits; ``log`` holds every line so far."""

    def __init__(
        self, host: Host, base: Path, arguments: Sequence[str] = (), variables: dict[str, str] | None = None
    ) -> None:
        self.host, self.base, self.arguments = host, base, tuple(arguments)
        self.port = free_port()
        self.log_path = base / "server.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command(host, base, "--listen", "127.0.0.1", "--port", str(self.port), *arguments),
                cwd=host.path,
                env=host.environment(**(variables or {})),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> list[str]:
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return COLOUR.sub("", text).splitlines()

    def request(self, path: str, data: Any = None, timeout_s: float = 30) -> Any:
        """GET, or POST with ``data``; the decoded JSON, None for an empty answer."""
        body, url = None if data is None else json.dumps(data).encode(), f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def fetched(self, path: str) -> bytes:
        """GET a file; an error names the path."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.read()
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{path}: {refusal}") from None

    def wait_until_up(self, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n" + "\n".join(self.log[-40:]))
            try:
                self.request("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise TimeoutError(f"no answer from the server within {timeout_s} s:\n" + "\n".join(self.log[-40:]))

    def post(self, prompt: dict[str, Any]) -> str:
        """Queue a prompt in API format; its id."""
        try:
            return self.request("/prompt", {"prompt": prompt})["prompt_id"]
        except urllib.error.HTTPError as refusal:
            raise WorkflowError(f"the prompt was refused: {refusal.read().decode()[:2000]}") from None

    def wait(self, prompt_id: str, timeout_s: float = 300) -> dict[str, Any]:
        """The history entry of a prompt, when it has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            history = self.request(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            if self.process.poll() is not None:
                raise RuntimeError(f"the server died with {self.process.returncode}:\n" + "\n".join(self.log[-40:]))
            time.sleep(0.05)
        raise TimeoutError(f"the prompt did not end within {timeout_s} s")

    def run(self, prompt: dict[str, Any], timeout_s: float = 300) -> Outcome:
        """Post a prompt and wait for its end, whichever it is."""
        before = len(self.log)
        return self.outcome(self.wait(self.post(prompt), timeout_s), before)

    def outcome(self, entry: dict[str, Any], log_from: int) -> Outcome:
        messages = dict(entry["status"]["messages"])
        log = self.log[log_from:]
        if "execution_interrupted" in messages:
            return Outcome("interrupted", "", log, entry["outputs"])
        if "execution_error" in messages:
            error = messages["execution_error"]
            where = "".join(error.get("traceback", [])[-3:])
            text = f"{error['node_type']}: {error['exception_type']}: {error['exception_message']}\n{where}"
            return Outcome("error", text, log, entry["outputs"])
        return Outcome("success", "", log, entry["outputs"])

    def interrupt(self) -> None:
        self.request("/interrupt", {})

    def ask_to_stop(self) -> None:
        """Return what Ctrl+C does; returns at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Returns when the process is gone."""
        self.ask_to_stop()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
