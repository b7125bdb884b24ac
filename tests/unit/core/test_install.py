"""These tests check what pip does to the torch of a machine: with wheels that have nothing but their requirements."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from attn_support.randomness import some

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NVRTC = "nvidia-cuda-nvrtc-cu12"
# The NVRTC that builds of torch for CUDA 12 ask for.
NEEDS = {"2.4.1": "12.1.105", "2.6.0": "12.4.127", "2.8.0": "12.8.93", "2.13.0+cu126": "12.6.85"}


def _wheel(folder: Path, name: str, version: str, *metadata: str) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata, ""]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _of_extra(extra: str) -> Iterable[str]:
    """Return what an extra of ours asks for, as far as torch may ask for the same."""
    yield f"Provides-Extra: {extra}"
    for requirement in PROJECT["optional-dependencies"][extra]:
        if requirement.startswith(NVRTC):
            yield f"Requires-Dist: {requirement.partition(';')[0]}; extra == '{extra}'"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that pip can find: torch for CUDA 12 and, newer, for CUDA 13."""
    folder = tmp_path_factory.mktemp("shelf")
    for version, nvrtc in NEEDS.items():
        _wheel(folder, "torch", version, f"Requires-Dist: {NVRTC}=={nvrtc}")
    for nvrtc in {*NEEDS.values(), "12.9.86"}:
        _wheel(folder, NVRTC, nvrtc)
    _wheel(folder, "torch", "2.14.1")
    needed = [f"Requires-Dist: {each}" for each in PROJECT["dependencies"] if each.startswith("torch")]
    _wheel(folder, "pascal-attention", "1", *needed, *_of_extra("test"), *_of_extra("static"))
    return folder


@pytest.fixture(params=some(NEEDS, 3))
def torch_version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def python(torch_version: str, shelf: Path, tmp_path: Path) -> Path:
    """An environment that has this torch and the NVRTC that it needs."""
    home, scheme = tmp_path / "venv", "nt" if sys.platform == "win32" else "posix_prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = sysconfig.get_path("purelib", scheme, {"base": str(home), "platbase": str(home)})
    for stem in (f"torch-{torch_version}", f"{NVRTC.replace('-', '_')}-{NEEDS[torch_version]}"):
        with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl") as wheel:
            wheel.extractall(packages)
    return home / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def _installs(python: Path, shelf: Path, *what: str) -> dict[str, str]:
    """Package -> version of what pip would install."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--dry-run", "--no-index"]
    options = ["--find-links", str(shelf), "--report", "-", *what]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    installed = (each["metadata"] for each in json.loads(done.stdout)["install"])
    return {each["name"]: each["version"] for each in installed}


def test_the_torch_that_is_there_stays_beside_what_the_tests_need(
    python: Path, shelf: Path, torch_version: str, tmp_path: Path
) -> None:
    assert _installs(python, shelf, "pascal-attention[test]") == {"pascal-attention": "1"}
    constraint = tmp_path / "torch.txt"
    constraint.write_text(f"torch=={torch_version}\n")
    held = "-c", str(constraint), "pascal-attention[test,static]"
    if NEEDS[torch_version] == NEEDS["2.13.0+cu126"]:
        assert _installs(python, shelf, *held) == {"pascal-attention": "1"}
    else:
        with pytest.raises(subprocess.CalledProcessError):
            _installs(python, shelf, *held)


def test_after_torch_make_installs_nothing_without_the_constraint() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    free = [line for line in re.findall(r"^\t.*", makefile, re.MULTILINE) if "/pip install" in line]
    assert [line for line in free if "$(TORCH)" not in line and "docs = " not in line] == []
    assert "INSTALL = $(BIN)/pip install -q -c $(VENV)/torch.txt\n" in makefile
