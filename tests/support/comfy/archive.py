"""The registry's archive: what git tracks, less what ``.comfyignore`` names."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def archive_files() -> list[str]:
    """Paths in the archive, as publishing this checkout would write them. Skips outside a git checkout."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout: the archive is made of what git tracks")
    tracked = set(_git("ls-files"))
    ignored = set(_git("ls-files", "--ignored", "--cached", "--exclude-from=.comfyignore"))
    return sorted(path for path in tracked - ignored if (ROOT / path).is_file())


def unpack_archive(folder: Path) -> Path:
    """Return what the archive would hold, in ``folder``."""
    for path in archive_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    return folder


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
