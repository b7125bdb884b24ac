"""Every Python block of README and docs/ runs, page by page and in order, and every row of docs/coming-from.md."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support.fresh import run
from attn_support.markdown import ROOT, blocks, documents, table_rows

from pascal_attn_core.cli import main

PAGES = [page for page in documents() if blocks(page, "python")]
COMING_FROM = ROOT / "docs" / "coming-from.md"
ROWS = [row[-1] for row in table_rows(COMING_FROM) if row[-1].startswith("`")]
# Rows whose command takes minutes, and where it is tested.
ELSEWHERE = {
    "pascal-attn demo": "tests/unit/cli/test_demo.py",
    "pascal-attn bench --plot": "tests/unit/cli/test_bench.py",
}
EXPECTED = {
    "pytorch.md": ["route tiled"],
    "troubleshooting.md": ["attention calls", "needs a CUDA or ROCm device"],
    "vae.md": ["decode of 1x4x", "in bands"],
    "gguf.md": ["Q8_0"],
    "int8.md": ["linear layers in int8, not exact: relative error per layer"],
}


@pytest.fixture(scope="module")
def prepared(tiny: Any) -> dict[str, Any]:
    """The names that the documents take for granted; the tiny pipeline gets embeddings instead of the prompt."""
    pytest.importorskip("safetensors")
    pytest.importorskip("transformers", minversion="4.53")
    pytest.importorskip("pascal_attn_core.diffusers")  # gives pipelines their set_attn_processor
    return _names(tiny.BUILD["sd15"]())


def _names(pipeline: Any) -> dict[str, Any]:
    def generate(prompt: str) -> Any:
        return pipeline.pipe(**pipeline.arguments, **pipeline.text, output_type="pil")

    return {"pipe": pipeline.pipe, "generate": generate}


def _with_gguf_layers(pipeline: Any) -> Any:
    """The pipeline with the linear layers of its UNet as diffusers has them from a GGUF file."""
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    quant_type = gguf.GGMLQuantizationType.Q8_0
    layers = [m for m in pipeline.pipe.unet.modules() if type(m) is torch.nn.Linear and m.in_features % 32 == 0]
    assert layers
    for layer in layers:
        blocks = torch.from_numpy(gguf.quants.quantize(layer.weight.detach().numpy(), quant_type))
        layer.__class__, layer.compute_dtype = GGUFLinear, torch.float32
        layer.weight = GGUFParameter(blocks, quant_type=quant_type)
    return pipeline


def execute(code: str, page: Path, names: dict[str, Any]) -> None:
    exec(compile(re.sub(r"\bpipe\(", "generate(", code), page.name, "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page: Path, prepared, tmp_path, monkeypatch, capsys, tiny) -> None:
    monkeypatch.chdir(tmp_path)
    stock = torch.nn.functional.scaled_dot_product_attention
    names = _names(_with_gguf_layers(tiny.BUILD["sd15"]())) if page.name == "gguf.md" else dict(prepared)
    try:
        for block in blocks(page, "python"):
            execute(block.text, page, names)
    finally:
        prepared["pipe"].set_attn_processor(None)
    printed = capsys.readouterr().out
    assert [text for text in EXPECTED.get(page.name, []) if text not in printed] == []
    assert torch.nn.functional.scaled_dot_product_attention is stock


def test_the_pages_and_rows_with_code_are_found() -> None:
    assert len(ROWS) >= 20
    assert {"README.md", "diffusers.md", "pytorch.md", "troubleshooting.md", "algorithm.md", "coming-from.md"} <= {
        page.name for page in PAGES
    }
    assert set(EXPECTED) <= {page.name for page in PAGES}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what the first block of docs/coming-from.md defines."""
    found: dict[str, Any] = {}
    for block in blocks(COMING_FROM, "python"):
        execute(block.text, COMING_FROM, found)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_what_a_reader_of_another_project_looks_for_runs(row: str, names, monkeypatch, tmp_path, capsys) -> None:
    code = row.strip("`")
    monkeypatch.chdir(tmp_path)
    if any(code.startswith(command) for command in ELSEWHERE):
        assert all((ROOT / file).exists() for file in ELSEWHERE.values())
    elif code.startswith("pascal-attn "):
        assert main(shlex.split(code)[1:]) == 0
        assert capsys.readouterr().out
    elif " python -c " in code:
        variable, _, program = code.partition(" python -c ")
        name, _, value = variable.partition("=")
        run(shlex.split(program)[0], env={**os.environ, name: value})
    else:
        execute(code, COMING_FROM, dict(names))
