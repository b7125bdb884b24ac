"""The files in docs/gpu: one folder for each card, one file for each part, and what each holds for."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pascal_attn_core.machine.storage import read_object, write_object

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "gpu"
# The facts without which a result says nothing of the present. What else is written down is for the reader.
_CONDITIONS = ("torch", "cuda", "driver", "nvrtc", "pascal-attention")
_IGNORED = {"__pycache__", ".pytest_cache"}


def folder_for(card: str, out: Path) -> Path:
    """The folder of a card: ``docs/gpu/nvidia-geforce-gtx-1080-ti``."""
    return out / (re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") or "unknown")


def conditions(facts: dict[str, Any], made_from: Iterable[str], sizes: str) -> dict[str, str]:
    """The conditions that a result holds for: card, versions, the content of the files that it depends on, and how
    large it was run.

    Args:
        facts: of :mod:`.card`.
        made_from: files and folders of the repository.
    """
    chosen = {name: str(facts["versions"].get(name, "")) for name in _CONDITIONS}
    return {"card": str(facts["card"]["name"]), **chosen, "code": hash_of(made_from), "sizes": sizes}


def hash_of(made_from: Iterable[str]) -> str:
    """Hash of files, by name and content, whether git knows them or not."""
    found = hashlib.sha256()
    for name in made_from:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not _IGNORED.intersection(path.parts):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                found.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return found.hexdigest()[:16]


def commit() -> str:
    """The commit that is checked out, with a plus where files differ from it; "" without git."""
    try:
        described = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(described, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def read(path: Path) -> dict[str, Any]:
    """A result; empty where there is none, or it cannot be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def write(path: Path, content: dict[str, Any], private: dict[str, str]) -> None:
    """Write a result in one step: an interrupt leaves what was there before.

    Args:
        private: paths of this machine -> what is written in their place.
    Raises:
        OSError: it could not be written.
    """
    text = json.dumps(content)
    for folder, word in private.items():
        text = text.replace(json.dumps(folder)[1:-1], word)
    write_object(path, json.loads(text))
