"""The list of lines that only run on a card."""

from __future__ import annotations

from pathlib import Path

from attn_support.fresh import run

from tools import device_lines


def test_words_in_comments_and_docstrings_do_not_count() -> None:
    text = (
        '"""cuda"""\n\ndef f(x):\n    """hip"""\n    # cuda\n    y = x.cuda()  # hip\n    return ["hip",\n        y]\n'
    )
    assert device_lines._says(text) == {6, 7}


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
    assert [texts[number] for number in ran] == ['if device.type != "cuda":']
