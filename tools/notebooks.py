"""Runs the notebooks on a CPU and stores what they show in them.

    python tools/notebooks.py [names]

needs nbclient and ipykernel. Warnings are left out, and so are pictures of models with random weights, which are noise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOISE = {"cards.ipynb"}  # whose pictures are made by random weights on a CPU


def shown(name: str, cell: Any) -> list[dict[str, Any]]:
    """The outputs of a cell that are stored."""
    stored: list[dict[str, Any]] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            stored.append({**output, "text": output.text.rstrip().splitlines(keepends=True)})
        elif output.output_type == "execute_result" and name not in NOISE:
            stored.append({**output, "data": {kind: output.data[kind] for kind in ("image/png", "text/plain")}})
    return stored


def main() -> None:
    os.environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if sys.argv[1:] and file.name not in sys.argv[1:]:
            continue
        text = file.read_text(encoding="utf-8")
        notebook, stored = nbformat.reads(text, as_version=4), json.loads(text)
        with tempfile.TemporaryDirectory() as folder:
            place = {"metadata": {"path": folder}}
            NotebookClient(notebook, record_timing=False, coalesce_streams=True, resources=place).execute()
        for cell, ran in zip(stored["cells"], notebook.cells, strict=True):
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = shown(file.name, ran), ran.execution_count
        file.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(file.name)


if __name__ == "__main__":
    main()
