"""The rules of Windows on Linux, for a process that believes in cards; paths keep their slashes."""

import contextlib
import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_BAD_NAME = re.compile(r'[<>:"|?*\\\x00-\x1f]|[ .]$|^(con|prn|aux|nul|(com|lpt)\d)(\.|$)', re.IGNORECASE)
_LONGEST_PATH, _LONGEST_COMMAND = 259, 32767
_PROFILE = r"C:\Users\A User Whose Name Is Long\AppData\Local"
_NOT_THERE = ("fork", "geteuid", "getgid", "killpg", "uname", "sysconf", "sched_getaffinity", "mkfifo")
problems: list[str] = []
modes: list[int] = []  # arguments of SetErrorMode


def follow(folder: Path) -> None:
    """Follow the rules from here on, with the user's folder for what programs store; this cannot be undone."""
    platform.uname()  # which is asked of os.uname once
    import torch._dynamo  # noqa: F401  torch's own code for Linux, which looks for these names when it is imported

    for name in _NOT_THERE:
        delattr(os, name)
    os.environ["LOCALAPPDATA"] = str(folder)
    sys.platform = "win32"
    ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(SetErrorMode=modes.append))  # type: ignore[attr-defined]
    sys.addaudithook(lambda event, arguments: _look(event, arguments, str(folder)))


def _look(event: str, arguments: Any, folder: str) -> None:
    path = str(arguments[0]) if arguments else ""
    if event == "open" and path.startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(path)
    if event in ("open", "os.mkdir") and path.startswith(folder):
        parts = Path(path).relative_to(folder).parts
        problems.extend(f"no name: {part!r}" for part in parts if _BAD_NAME.search(part))
        if len("\\".join([_PROFILE, *parts])) > _LONGEST_PATH:
            problems.append(f"too long: {path}")
    if event in ("os.rename", "os.remove"):
        named = [os.path.realpath(str(each)) for each in arguments[:2] if isinstance(each, (str, Path))]
        problems.extend(f"{event} of a file that is open: {each}" for each in set(_open_files()).intersection(named))
    if event == "subprocess.Popen" and len(subprocess.list2cmdline(map(str, arguments[1]))) > _LONGEST_COMMAND:
        problems.append(f"a command line of more than {_LONGEST_COMMAND} characters: {path}")


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{number}")
