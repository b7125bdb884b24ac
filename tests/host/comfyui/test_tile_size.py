"""Pascal Tile Size in a real ComfyUI."""

from __future__ import annotations

import json
import re
from typing import Any

from attn_support.comfy.graph import FAMILIES, Graph, capture, largest_difference, sample
from attn_support.comfy.server import ComfyServer

INPUTS = {"tokens": 256, "heads": 2, "head_dim": 40, "dtype": "float32", "budget_mib": 0}


def explanation(server: ComfyServer, mode: str, **inputs: Any) -> str:
    graph = Graph()
    size = graph.add("PascalTileSize", mode=mode, **{**INPUTS, **inputs})
    return capture(server, graph, [size[0], 1])[0].text


def test_it_says_why_with_the_numbers(server: ComfyServer) -> None:
    text = explanation(server, "from the card")
    assert re.search(r"for 256 tokens, 2 heads of 40 in float32 the tiled route takes 256 keys per tile", text), text
    assert "256 x 256" in text


def test_a_measurement_is_remembered_in_the_user_folder(server: ComfyServer) -> None:
    text = explanation(server, "measure")
    (file,) = (server.base / "user").glob("pascal_attn_tile_sizes-*.json")
    (row,) = json.loads(file.read_text())["tile_sizes"]
    assert row["kind"] == {"dtype": "float32", "tokens": 256, "heads": 2, "head_dim": 40, "budget_mib": 0}
    assert f"as measured on {row['measured']}" in text
    assert all(f"{size}: {ms} ms" in text for size, ms in row["milliseconds"].items())
    assert explanation(server, "measure") == text


def test_its_number_goes_into_the_attention_patch(server: ComfyServer) -> None:
    stock, graph = sample(server, "sd15"), Graph()
    size = graph.add("PascalTileSize", mode="from the card", **{**INPUTS, "tokens": 96})
    patch = {"route": "tiled", "budget_mib": 0, "tile_size": size, "coverage": "attention override"}
    model = graph.add("PascalAttentionPatch", model=graph.load("sd15"), min_keys=0, nan_guard=True, **patch)
    ours = capture(server, graph, graph.sample(model, FAMILIES["sd15"]))[0]
    assert largest_difference(ours, stock) < 2e-5
    assert ours.says("tiles of 96 keys")
