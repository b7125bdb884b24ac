"""Small files of several processes: whole or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pascal_attn_core.machine.storage import read_object, replace_file, write_object


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "known.json"
    assert read_object(path) == {}
    write_object(path, {"Größe": [1, 2.5, None]})
    write_object(path, {"Größe": {"µs": 3}})
    assert read_object(path) == {"Größe": {"µs": 3}}
    assert "Größe" in path.read_text(encoding="utf-8")  # for a person to read
    assert os.listdir(path.parent) == ["known.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"[1]", "holds a list, not an object"), (b"{", "Expecting"), (b"\xff{}", "codec can't decode")],
)
def test_other_content_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "known.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_object(path)


def test_a_folder_in_its_place_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_object(tmp_path)


def test_a_failed_write_leaves_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known.json"
    write_object(path, {"a": 1})
    with pytest.raises(TypeError):
        write_object(path, {"a": object()})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"half")
    assert read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["known.json"]
