"""Processes of their own, forked from one that has imported nothing but torch, or started where there is no fork."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("fresh_server.py")
TIMEOUT = 300.0
PLAIN = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


class Done(NamedTuple):
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def execute(
    code: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    paths: tuple[Path, ...] = (),
    stdin: str = "",
    cwd: Path | None = None,
    preload: Path | None = None,
) -> Done:
    """Run a program, dedented, in which nothing of this package is loaded; ``env`` is its whole environment (None =
    ours), ``paths`` are folders to import from first, ``preload`` is a shared library that is loaded first."""
    env = dict(os.environ) if env is None else {**PLAIN, **env}
    job = _job(code, arguments, env, paths, cwd)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_text(stdin, encoding="utf-8")
        job |= {name: str(path) for name, path in files.items()}
        returncode = _served(job, preload) if hasattr(os, "fork") else _started(job, preload)
        out, err = (files[name].read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return Done(returncode, out, err)


def _job(
    code: str, arguments: Sequence[str], env: dict[str, str], paths: tuple[Path, ...], cwd: Path | None
) -> dict[str, Any]:
    return {
        "code": textwrap.dedent(code),
        "arguments": arguments,
        "env": env,
        "paths": [str(path) for path in (*paths, ROOT)],
        "cwd": str(cwd or Path.cwd()),
        "timeout": TIMEOUT,
    }


class Started:
    """A process that :func:`start` has started: what is wanted of ``subprocess.Popen``."""

    def __init__(self, pid: int, folder: tempfile.TemporaryDirectory[str]):
        self.pid = pid
        self.returncode: int | None = None
        self._folder = folder

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        file = Path(self._folder.name) / "ended"
        if self.returncode is None and file.exists():
            self.returncode = int(file.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; ``subprocess.TimeoutExpired`` if it still runs then."""
        end = time.monotonic() + (TIMEOUT if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a program", TIMEOUT if timeout is None else timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def start(code: str, *arguments: str) -> Started | subprocess.Popen[str]:
    """Start a program, with this process's environment, without input and output, and do not wait for it."""
    job = _job(code, arguments, dict(os.environ), (), None)
    job |= dict.fromkeys(("stdin", "stdout", "stderr"), os.devnull)
    if not hasattr(os, "fork"):
        return _popen(job, None, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL))
    folder = tempfile.TemporaryDirectory()
    pid = _served({**job, "ended": str(Path(folder.name) / "ended")}, None)
    return Started(pid, folder)


def run(code: str, *arguments: str, **options: Any) -> str:
    """Return what a program that must end well printed, stripped; ``options`` of :func:`execute`."""
    done = execute(code, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def call(function: Callable[..., object], *arguments: str, **options: Any) -> Done:
    """Call a function of a test module in a process of its own by :func:`execute`; what it raises fails the test."""
    file = str(sys.modules[function.__module__].__file__)
    done = execute(
        """
        import importlib.util, sys, types
        file, name, support, *arguments = sys.argv[1:]
        shared = sys.modules["attn_support"] = types.ModuleType("attn_support")
        shared.__path__ = [support]
        spec = importlib.util.spec_from_file_location("the_tests", file)
        module = sys.modules["the_tests"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, name)
        getattr(function, "__wrapped__", function)(*arguments)
        """,
        *(file, function.__name__, str(Path(__file__).parent), *arguments),
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the test runs in a process of its own; its parameters are strings."""

    @functools.wraps(test)
    def run_alone(**arguments: str) -> None:
        call(test, *arguments.values())

    return run_alone


def _preloading(preload: Path | None) -> dict[str, str]:
    return {} if preload is None else {"LD_PRELOAD": str(preload), "ASAN_OPTIONS": "detect_leaks=0"}


def _started(job: dict[str, Any], preload: Path | None) -> int:
    with open(job["stdin"]) as stdin, open(job["stdout"], "w") as stdout, open(job["stderr"], "w") as stderr:
        return _popen(job, preload, stdin=stdin, stdout=stdout, stderr=stderr).wait(TIMEOUT)


def _popen(job: dict[str, Any], preload: Path | None, **streams: Any) -> subprocess.Popen[str]:
    env = {**job["env"], "PYTHONPATH": os.pathsep.join(job["paths"]), **_preloading(preload)}
    command = [sys.executable, "-c", job["code"], *job["arguments"]]
    return subprocess.Popen(command, env=env, cwd=job["cwd"], **streams)


def _served(job: dict[str, Any], preload: Path | None) -> int:
    server: Any = _server(preload)
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that has imported torch is gone"
    return json.loads(answer)


@functools.cache
def _server(preload: Path | None) -> subprocess.Popen[str]:
    """One for each process that runs tests."""
    env = {**os.environ, **_preloading(preload)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, str(SERVER)], env=env, **pipes)
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    server.stdin.close()  # type: ignore[union-attr]  # it ends where its input ends
    server.wait(10)
