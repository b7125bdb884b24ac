"""Small files that several processes read and write: whole or as they were, never in part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees all of it, or what was there before. A missing folder is made, for this
    user alone.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def name_for(kind: str, conditions: dict[str, str]) -> str:
    """The name of a JSON file whose content holds under these conditions only: ``"timings-<hash>.json"``."""
    return f"{kind}-{hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]}.json"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; an empty one where there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object that a person can read, in one step as :func:`replace_file` does.

    Raises:
        OSError: it could not be written.
        TypeError: a value that JSON cannot hold; the file is left as it was.
    """
    replace_file(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
