"""The README is a program too: every Python block of it runs, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_every_python_block_of_the_readme_runs(tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    pytest.importorskip("transformers", minversion="4.53")
    monkeypatch.chdir(tmp_path)
    pipeline = tiny.BUILD["sd15"]()

    def generate(prompt: str, num_inference_steps: int):
        """The tiny pipeline has no text encoder: it gets embeddings instead of the prompt."""
        return pipeline.pipe(**pipeline.arguments, **pipeline.text, output_type="pil")

    names = {"pipe": pipeline.pipe, "generate": generate, "torch": torch}
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        exec(compile(re.sub(r"\bpipe\(", "generate(", block), README.name, "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "route tiled" in printed
    assert "attention calls" in printed
    assert (tmp_path / "calls.safetensors").stat().st_size > 0
