"""What the registry reads: ``[tool.comfy]``, ``.comfyignore``, the requirements."""

from __future__ import annotations

import base64
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from attn_support.comfy.archive import ROOT, archive_files, unpack_archive
from attn_support.fresh import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMFY = PROJECT["tool"]["comfy"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_table_says_all_that_the_registry_asks() -> None:
    assert COMFY["PublisherId"]
    assert COMFY["DisplayName"] == "Pascal Attention"
    assert COMFY["requires-comfyui"] == ">=0.3.60"
    assert re.fullmatch(r"[a-z0-9-]+", PROJECT["project"]["name"])
    assert "comfyui" not in PROJECT["project"]["name"]


def test_the_version_is_the_one_in_the_code() -> None:
    text = (ROOT / COMFY["version"]["path"]).read_text(encoding="utf-8")
    from pascal_attn_core.version import __version__

    assert f'__version__ = "{__version__}"' in text


def test_the_icon_is_the_drawing_in_docs() -> None:
    kind, _, data = COMFY["Icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (ROOT / "docs" / "icon.svg").read_bytes().strip()


def test_requirements_install_nothing() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == []


def test_the_archive_holds_the_pack_and_not_its_workshop() -> None:
    files = archive_files()
    for needed in ("__init__.py", "LICENSE", "README.md", "nodes/__init__.py", "pascal_attn_core/__init__.py"):
        assert needed in files
    assert any(path.startswith("nodes/web/docs/") for path in files)
    assert any(re.fullmatch(r"workflows/[^/]+\.json", path) for path in files)
    for left_out in ("tests/", "tools/", "docs/", ".ci/", ".github/", "workflows/api/", "Makefile"):
        assert not any(path.startswith(left_out) for path in files), left_out
    assert sum((ROOT / path).stat().st_size for path in files) < 6 << 20


def test_the_pack_loads_from_the_archive_alone(tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
root = {str(unpack_archive(tmp_path / "pack"))!r}
spec = importlib.util.spec_from_file_location("the_pack", root + "/__init__.py", submodule_search_locations=[root])
pack = sys.modules["the_pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
assert pack.NODE_CLASS_MAPPINGS
print(sys.modules["the_pack.pascal_attn_core"].__file__)
"""
    assert Path(run(code, cwd=tmp_path)).is_relative_to(tmp_path)


def test_the_library_does_not_come_with_the_nodes() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["pascal_attn_core*"]
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=["pascal_attn_core*"])
    assert {name.partition(".")[0] for name in found} == {"pascal_attn_core"}


def test_the_package_is_typed_and_licensed_in_the_form_that_indexes_read() -> None:
    project = PROJECT["project"]
    assert (ROOT / "pascal_attn_core" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["pascal_attn_core"]
    assert project["license"] == "MIT"
    assert not [
        line for line in project["classifiers"] if line.startswith("License ::")
    ]  # refused beside an expression
    versions = [
        line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language ::")
    ]
    assert f">={versions[1]}" == project["requires-python"]


def test_ci_runs_what_the_package_claims() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    claimed = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"]))
    assert claimed is not None
    assert f'torch: "{claimed[1]}.' in text
    assert f'python: "{PROJECT["project"]["requires-python"].removeprefix(">=")}"' in text
    assert "windows-latest" in text


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_hash(file: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", file.read_text(encoding="utf-8"))
    assert uses
    assert [name for name, note in uses if not (re.search(r"@[0-9a-f]{40}$", name) and re.search(r"# v\d", note))] == []


def test_random_examples_are_drawn_every_night() -> None:
    (nightly,) = (file.read_text(encoding="utf-8") for file in WORKFLOWS if file.stem == "nightly")
    assert re.search(r"^  schedule:\n    - cron: ", nightly, re.MULTILINE)
    assert "HYPOTHESIS_PROFILE: nightly" in nightly
