"""The list of lines that only run on a card."""

from collections import Counter
from pathlib import Path

import pytest
from attn_support.fresh import run
from attn_support.randomness import at_night

from tools import device_lines


def test_words_in_comments_and_docstrings_do_not_count() -> None:
    text = (
        '"""cuda"""\n\ndef f(x):\n    """hip"""\n    # cuda\n    y = x.cuda()  # hip\n    return ["hip",\n        y]\n'
    )
    assert device_lines._says(text) == {6, 7}


@at_night
def test_lines_are_noted_when_they_run_and_not_before(tmp_path: Path) -> None:
    noted, where = tmp_path / "lines", "pascal_attn_core/machine/device.py"
    code = f"""
from tools import device_lines
from pascal_attn_core.machine import device
device_lines.watch({str(noted)!r})
device.free_bytes("cpu")
"""
    run(code, cwd=device_lines.ROOT)
    ran = {int(line.rpartition(":")[2]) for line in noted.read_text().splitlines() if where in line}
    texts = device_lines.device_lines()[where]
    assert [texts[number][1] for number in ran] == ['if device.type == "cuda":']


def test_what_is_said_to_be_unreached_is_there() -> None:
    counts = Counter(
        f"{file}:{name}" for file, lines in device_lines.device_lines().items() for name, _ in lines.values()
    )
    assert {name: count for name, (count, _) in device_lines.UNREACHED.items() if count > counts[name]} == {}


def test_another_line_that_is_not_reached_and_one_that_is_are_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lines, "UNREACHED", {"a.py:f": (2, "why"), "a.py:g": (1, "why")})
    assert device_lines.differences(["a.py:f", "a.py:g", "a.py:f"]) == []
    found = device_lines.differences(["a.py:f", "a.py:h"])
    assert [line.partition(" lines")[0] for line in found] == ["a.py:f: 1", "a.py:g: 0", "a.py:h: 1"]
