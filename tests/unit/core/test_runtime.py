"""All that is known of a device is one object, replaceable; files of several processes are whole or as before."""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from pascal_attn_core.config import cache_folder
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, runtime_of, runtimes, using
from pascal_attn_core.machine.storage import read_object, replace_file, write_object

CPU = torch.device("cpu")


class Part:
    def __init__(self, runtime: Runtime):
        self.runtime = runtime


class OtherPart(Part):
    pass


def test_a_part_is_made_once_from_its_runtime_by_the_class_or_what_is_given_for_it() -> None:
    runtime = Runtime(CPU)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtime.part(Part), range(8)))
    assert len(set(map(id, found))) == 1
    assert found[0].runtime is runtime
    runtime = Runtime(CPU, parts={Part: OtherPart})
    assert type(runtime.part(Part)) is OtherPart
    assert runtime.part(Part) is runtime.part(Part)
    ready = OtherPart(runtime)
    assert Runtime(CPU, parts={Part: lambda _: ready}).part(Part) is ready


def test_a_runtime_is_the_one_of_its_device_while_the_block_runs() -> None:
    before = runtime_of(CPU)
    card = DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28)
    with using(Runtime("cpu", card)) as runtime:
        assert runtime_of(CPU) is runtime
        assert runtime_of(CPU).info is card
        assert runtime in runtimes()
        with using(Runtime("cuda:3", card)) as other:
            assert runtime_of(torch.device("cuda", 3)) is other
        assert other not in runtimes()
    assert runtime_of(CPU) is before


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "known.json"
    assert read_object(path) == {}
    write_object(path, {"Größe": [1, 2.5, None]})
    write_object(path, {"Größe": {"µs": 3}})
    assert read_object(path) == {"Größe": {"µs": 3}}
    assert "Größe" in path.read_text(encoding="utf-8")  # for a person to read
    assert os.listdir(path.parent) == ["known.json"]


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
