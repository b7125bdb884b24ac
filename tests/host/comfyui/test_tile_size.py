"""Pascal Tile Size in a real ComfyUI."""

from __future__ import annotations

from attn_support.comfy.graph import FAMILIES, Graph, capture, largest_difference, sample
from attn_support.comfy.server import ComfyServer

INPUTS = {"tokens": 256, "heads": 2, "head_dim": 40, "dtype": "float32", "budget_mib": 0}


def test_its_number_goes_into_the_attention_patch(server: ComfyServer) -> None:
    stock, graph = sample(server, "sd15"), Graph()
    size = graph.add("PascalTileSize", mode="from the card", **{**INPUTS, "tokens": 96})
    patch = {"route": "tiled", "budget_mib": 0, "tile_size": size, "coverage": "attention override"}
    model = graph.add("PascalAttentionPatch", model=graph.load("sd15"), min_keys=0, nan_guard=True, **patch)
    ours = capture(server, graph, graph.sample(model, FAMILIES["sd15"]))[0]
    assert largest_difference(ours, stock) < 2e-5
    assert ours.says("tiles of 96 keys")
