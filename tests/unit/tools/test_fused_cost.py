"""tools/fused_cost.py counts up to the first launch of the fused route, by name and in auto."""

from __future__ import annotations

import pytest

from tools import fused_cost


def test_every_kind_of_call_reaches_its_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PASCAL_ATTN_NO_TIMING", raising=False)
    fused_cost.main(["--repeats", "3"])
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[3] for row in rows] == list(fused_cost.calls())
    assert all(int(row[0]) > 0 and int(row[1]) > int(row[2]) > 5 for row in rows)
