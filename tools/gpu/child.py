"""Processes with a time limit, which end with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRACE = 3.0  # seconds between asking a process to end and ending it
_POLL = 0.2
_TAIL = 16000


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status, negative: the signal that ended it, None: it was stopped at its limit.
        output: the last characters of what it wrote to stdout and stderr.
        seconds: that it took.
        remains: it could not be ended, which happens to a process that waits inside a driver.
    """

    status: int | None
    output: str
    seconds: float
    remains: bool = False

    @property
    def words(self) -> str:
        """``"exit status 1"``, ``"SIGSEGV"``, ``"stopped after 60 s"``."""
        if self.status is None:
            still = ", and still there" if self.remains else ""
            return f"stopped after {self.seconds:.0f} s{still}" if self.seconds else "cut short"
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

    @property
    def last_line(self) -> str:
        """The last line that it wrote."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")


CUT = Ended(None, "", 0.0)  # of a process that still runs: what is known if nothing more will be


def run(
    command: Sequence[str],
    seconds: float,
    output: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Ended:
    """Run a command and wait for it, at most this many seconds; whatever ends the wait, an interrupt included, ends the
    process and all that it has started.

    Args:
        output: the file for what it writes.
        stop: ends the wait when it is set.
    Raises:
        OSError: it cannot be started.
    """
    options: dict[str, Any] = {"cwd": cwd, "env": None if env is None else dict(env), "stdin": subprocess.DEVNULL}
    if sys.platform == "win32":
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        options["start_new_session"] = True
    began = time.monotonic()
    with output.open("wb") as file:
        child = subprocess.Popen(list(command), stdout=file, stderr=subprocess.STDOUT, **options)
    try:
        status = _wait(child, began + seconds, stop or threading.Event())
    finally:
        remains = not _end(child)
    return Ended(status, tail(output), time.monotonic() - began, remains)


def _wait(child: subprocess.Popen[bytes], end: float, stop: threading.Event) -> int | None:
    """The exit status; None at the end of the time, of ``time.monotonic``, or when it is to stop."""
    while True:
        left = end - time.monotonic()
        try:
            return child.wait(max(0.0, min(_POLL, left)))
        except subprocess.TimeoutExpired:
            if left <= _POLL or stop.is_set():
                return None


def _end(child: subprocess.Popen[bytes]) -> bool:
    """End a process, if it runs, and what it has left behind; whether they are gone."""
    if sys.platform == "win32":
        if child.poll() is None:
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(child.pid)], capture_output=True)
        return _gone(child)
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    _signal_group(child.pid, signal.SIGKILL)
    return _gone(child)


def _gone(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def tail(path: Path) -> str:
    """The last characters of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return file.read().decode(errors="replace")
