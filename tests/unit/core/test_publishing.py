"""These tests check wheel, sdist, what the registry reads (``[tool.comfy]``, ``.comfyignore``)."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from attn_support.comfy.archive import ROOT, archive_files, unpack_archive
from attn_support.fresh import run

from pascal_attn_core.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMFY = PROJECT["tool"]["comfy"]


def test_the_version_is_the_last_of_the_changelog_and_is_read_where_the_registry_looks() -> None:
    assert f'__version__ = "{__version__}"' in (ROOT / COMFY["version"]["path"]).read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == __version__


def test_the_archive_holds_the_pack_and_not_its_workshop() -> None:
    files = archive_files()
    for needed in ("__init__.py", "LICENSE", "README.md", "nodes/__init__.py", "pascal_attn_core/__init__.py"):
        assert needed in files
    assert any(path.startswith("nodes/web/docs/") for path in files)
    assert any(re.fullmatch(r"workflows/[^/]+\.json", path) for path in files)
    for left_out in ("tests/", "tools/", "docs/", "notebooks/", ".ci/", ".github/", "workflows/api/", "Makefile"):
        assert not any(path.startswith(left_out) for path in files), left_out
    assert sum((ROOT / path).stat().st_size for path in files) < 11 << 20
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == [], "it would change a host's torch"


def test_the_pack_loads_from_the_archive_alone(tmp_path: Path) -> None:
    code = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("the_pack", root + "/__init__.py", submodule_search_locations=[root])
pack = sys.modules["the_pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
assert pack.NODE_CLASS_MAPPINGS
print(sys.modules["the_pack.pascal_attn_core"].__file__)
"""
    found = run(code, str(unpack_archive(tmp_path / "pack")), cwd=tmp_path)
    assert Path(found).is_relative_to(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout and the wheel that is made of that sdist, as publishing makes them."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for; nothing is fetched here
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for path in archive_files():
        if path.startswith("pascal_attn_core/") or "/" not in path:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, source / path)
    _backend("build_sdist", source, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _backend("build_wheel", unpacked, folder)
    return folder


def _backend(step: str, source: Path, folder: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.{step}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"pascal_attention-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert names == {path for path in archive_files() if path.startswith("pascal_attn_core/")}
    assert "License-Expression: MIT" in metadata
    assert "Requires-Dist: torch>=2.4\n" in metadata
    assert "# Pascal" not in metadata.partition("\n\n")[0]  # the README is the description, not a field
    assert "## Install" in metadata


def test_the_wheel_alone_runs_beside_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # as pip installs it
        archive.extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="pascal-attn", module="pascal_attn_core.cli")
sys.argv[1:] = ["info"]
main = command.load()
assert sys.modules["pascal_attn_core"].__file__.startswith({str(tmp_path)!r})
sys.exit(main())
"""
    assert run(code, cwd=tmp_path).startswith(f"Pascal Attention {__version__}, Python ")


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.name)
def test_actions_are_pinned_by_hash(file: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", file.read_text(encoding="utf-8"))
    assert uses
    assert [name for name, note in uses if not (re.search(r"@[0-9a-f]{40}$", name) and re.search(r"# v\d", note))] == []
