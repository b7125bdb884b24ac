"""The import paths and names that programs may rely on: ``public_names.txt``. A name that leaves breaks a program."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

LINES = (Path(__file__).parent / "public_names.txt").read_text(encoding="utf-8").splitlines()
PUBLIC = {path: set(names.split()) for path, _, names in (line.partition(": ") for line in LINES)}


@pytest.mark.parametrize("path", PUBLIC)
def test_an_import_path_has_its_names_and_each_says_what_it_is(path: str) -> None:
    host = path.rpartition(".")[2]
    if host in ("diffusers", "transformers"):
        pytest.importorskip(host)
    importlib.import_module(path)
    module = sys.modules[path]  # also where the package has a function of the same name
    assert set(module.__all__) == PUBLIC[path]
    starred: dict[str, object] = {}
    exec(f"from {path} import *", starred)  # noqa: S102  # what a program writes
    assert all(starred[name] is getattr(module, name) for name in PUBLIC[path])
    assert [name for name in PUBLIC[path] if callable(starred[name]) and not starred[name].__doc__] == []
