"""Small files of several processes: whole or as they were."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from pascal_attn_core.config import cache_folder
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
    [
        (b"[1]", "holds a list, not an object"),
        (b"{", "Expecting"),
        (b"\xff{}", "codec can't decode"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["a list", "half", "bytes", "nested"],
)
def test_other_content_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "known.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_object(path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_a_folder_or_a_pipe_in_its_place_is_an_oserror(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError):
            read_object(path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs modes of files")
def test_the_cache_folder_is_made_for_this_user_alone_and_used_only_while_it_is(tmp_path, monkeypatch, caplog) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    before = os.umask(0)
    try:
        write_object(folder / "known.json", {})
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    with caplog.at_level(logging.INFO, "pascal_attn"):
        for mode in (0o720, 0o702):
            folder.chmod(mode)
            assert cache_folder() is None
    assert caplog.text.count("other users may write to") == 1
    folder.chmod(0o755)
    assert cache_folder() == folder
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert cache_folder() is None


def test_a_failed_write_leaves_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known.json"
    write_object(path, {"a": 1})
    with pytest.raises(TypeError):
        write_object(path, {"a": object()})
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"half")
    assert read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["known.json"]
