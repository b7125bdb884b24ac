"""The notebooks run from top to bottom on a CPU, with nothing downloaded."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support import fresh
from attn_support.markdown import ROOT
from attn_support.randomness import at_night

# Runs cells as Jupyter does, without a network, and prints how many of them show a picture. Commands of the package
# are run in this process.
SHELL = """
import json, socket, sys
from IPython.core.interactiveshell import InteractiveShell
from pascal_attn_core.cli import main

connect = socket.socket.connect

def refuse(self, address):
    if address[0] not in ("127.0.0.1", "localhost"):
        raise AssertionError(f"nothing may be downloaded here, got {address}")
    return connect(self, address)

class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        pass

socket.socket.connect = refuse
shell, pictures = Shell(), 0
for cell in json.load(sys.stdin):
    done = shell.run_cell(cell)
    done.raise_error()
    if "python" in shell.user_ns:
        shell.user_ns["python"] = lambda dash_m, package, *arguments: main(list(arguments))
    pictures += "image/png" in shell.display_formatter.format(done.result)[0]
print("pictures", pictures)
"""


def code_cells(file: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def execute(name: str, folder: Path) -> str:
    """Return what the notebook prints, and at the end how many pictures it shows."""
    pytest.importorskip("IPython")
    cells = ["".join(cell["source"]) for cell in code_cells(ROOT / "notebooks" / name)]
    env = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(folder / "ipython"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
    }
    return fresh.run(SHELL, env=env, cwd=folder, stdin=json.dumps(cells))


def stored(name: str) -> str:
    """Return what the notebook's cells have printed, as it is stored in it."""
    outputs = [output for cell in code_cells(ROOT / "notebooks" / name) for output in cell["outputs"]]
    return "\n".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def outline(printed: str, words: int | None) -> list[str]:
    """Return the first ``words`` of each line (None = all), without numbers and rulers, which depend on the machine."""
    lines = re.sub(r"-{4,}", "", re.sub(r"[-+.,\d]*\d(e[-+]\d+)?", "#", printed)).splitlines()
    return [" ".join(line.split()[:words]) for line in lines if line.strip() and not line.startswith("Out[")]


@at_night
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the notebook downloads models")
def test_the_notebook_for_cards_runs_on_a_cpu(tmp_path: Path) -> None:
    printed = execute("cards.ipynb", tmp_path)
    assert "PASS" in printed
    assert (printed.count("torch's own"), printed.count("attention calls")) == (2, 2)
    assert (tmp_path / "video.gif").stat().st_size > 0
    assert outline(printed.rpartition("pictures")[0], 1) == outline(stored("cards.ipynb"), 1)


@at_night
@pytest.mark.slow
def test_the_notebook_of_the_algorithm_shows_its_pictures(tmp_path: Path) -> None:
    printed = execute("attention.ipynb", tmp_path)
    assert "the twenty lines and sdpa() agree" in printed
    all_scores, tiles = (
        [float(mib) for mib in re.findall(r"[\d.]+", printed.split(name)[1].split("MiB")[0])]
        for name in ("all scores", "in tiles")
    )
    assert all_scores[-1] / all_scores[0] > 60  # eight times as long: 64 times as much
    assert max(tiles) < 8
    assert printed.endswith("pictures 4")  # memory, two of tiles, rows
    assert outline(printed.rpartition("pictures")[0], None) == outline(stored("attention.ipynb"), None)


@pytest.mark.parametrize(("name", "pictures"), [("attention.ipynb", 4), ("cards.ipynb", 0)])
def test_a_notebook_is_stored_as_one_run_left_it_and_begins_with_the_wheel(name: str, pictures: int) -> None:
    cells = code_cells(ROOT / "notebooks" / name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    first = "".join(cells[0]["source"])
    assert "https://download.pytorch.org/whl/cu126" in first
    assert "import torch\n" not in first
