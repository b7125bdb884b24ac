"""The notebooks run from top to bottom on a CPU, with nothing downloaded."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.markdown import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A kernel that finds this package here, and neither a card nor a network.
START = """
import os, socket, sys
sys.path.insert(0, {root!r})

connect = socket.socket.connect

def refuse(self, address):
    if address[0] not in ("127.0.0.1", "localhost"):
        raise AssertionError(f"nothing may be downloaded here, got {{address}}")
    return connect(self, address)

socket.socket.connect = refuse
"""


def load(file: Path) -> Any:
    return pytest.importorskip("nbformat").read(file, as_version=4)


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[dict[str, Any]]]:
    """What the notebook prints, and what it displays: the data by type of each display."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = load(ROOT / "notebooks" / name)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(START.format(root=str(ROOT))))
    for variable, value in {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
    }.items():
        monkeypatch.setenv(variable, value)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return printed, [output["data"] for output in outputs if "data" in output]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the notebook downloads models")
def test_the_notebook_for_cards_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, _ = execute("cards.ipynb", tmp_path, monkeypatch)
    assert "PASS" in printed
    assert printed.count("torch's own") == 2
    assert printed.count("attention calls") == 2
    assert (tmp_path / "video.gif").stat().st_size > 0


@pytest.mark.slow
def test_the_notebook_of_the_algorithm_shows_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, shown = execute("attention.ipynb", tmp_path, monkeypatch)
    assert "the twenty lines and sdpa() agree" in printed
    stored, tiles = (
        [float(mib) for mib in re.findall(r"[\d.]+", printed.split(name)[1].split("MiB")[0])]
        for name in ("all scores", "in tiles")
    )
    assert stored[-1] / stored[0] > 60  # eight times as long: 64 times as much
    assert max(tiles) < 8
    assert sum("image/png" in data for data in shown) == 4  # memory, two of tiles, rows


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_stored_without_outputs_and_begins_with_the_wheel(file: Path) -> None:
    cells = [cell for cell in load(file).cells if cell.cell_type == "code"]
    assert [cell["id"] for cell in cells if cell.outputs or cell.execution_count] == []
    assert "https://download.pytorch.org/whl/cu126" in cells[0].source
    assert "import torch\n" not in cells[0].source
