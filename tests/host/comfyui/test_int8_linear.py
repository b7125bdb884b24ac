"""Pascal Int8 Linear on the tiny diffusion models of a real ComfyUI."""

from __future__ import annotations

import pytest
from attn_support.comfy.graph import largest_difference, sample
from attn_support.comfy.server import ComfyServer

OURS = {"max_error": 0.05, "include": "", "exclude": "", "weights": "host", "int8_files": "auto"}
NODE = ("PascalInt8Linear", OURS)


@pytest.mark.parametrize("family", ["sd15", "lumina2"], indirect=True)
def test_through_the_server_the_latent_is_near_and_bypassed_it_is_the_same(server: ComfyServer, family: str) -> None:
    stock = sample(server, family)
    ours = sample(server, family, NODE)
    assert 0 < largest_difference(ours, stock) < 0.2
    assert ours.says("linear layers in int8, not exact: relative error per layer")
    assert not ours.says(": 0 of")
    assert largest_difference(sample(server, family), stock) == 0
    assert largest_difference(sample(server, family, NODE), ours) == 0


def test_with_the_other_patches_in_any_order(server: ComfyServer) -> None:
    stock = sample(server, "sd15")
    alone = sample(server, "sd15", NODE)
    chunking = ("PascalFFNChunking", {"budget_mib": 1, "min_tokens": 2})
    defaults = {"route": "tiled", "budget_mib": 0, "tile_size": 0, "coverage": "attention override"}
    attention = ("PascalAttentionPatch", {**defaults, "min_keys": 0, "nan_guard": True})
    for patches in ((NODE, chunking, attention), (attention, chunking, NODE)):
        ours = sample(server, "sd15", *patches)
        assert 0 < largest_difference(ours, stock) < 0.2
        assert largest_difference(ours, alone) < 0.1, "codes that round the other way, no more"
        assert ours.run.taken == stock.counts["sdpa"]
        assert ours.says("4 of 4 feed-forward modules chunked")
        assert ours.says("linear layers in int8")
