"""The tables of tile sizes as they are read from their files."""

from pathlib import Path

import pytest

from pascal_attn_core.fused.code.source import Geometry
from pascal_attn_core.fused.geometry import tables
from pascal_attn_core.fused.geometry.tables import read_tables


def test_a_line_is_a_geometry_of_its_head_dims_in_each_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# why\nhead_dims rows cols tx ty ahead\n[one, two]\n64,32 8 16 2 4 yes  # both\n[three]\n40 9 16 2 4 no\n"
    (tmp_path / "some.txt").write_text(text)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    first = Geometry(8, 16, 2, 4, ahead=True)
    found = read_tables("some", Geometry)
    assert found == {"one": {32: first, 64: first}, "two": {32: first, 64: first}, "three": {40: Geometry(9, 16, 2, 4)}}
    assert list(found["one"]) == [32, 64]
