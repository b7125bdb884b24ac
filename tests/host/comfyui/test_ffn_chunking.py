"""Pascal FFN Chunking on the tiny diffusion models of a real ComfyUI."""

from __future__ import annotations

import pytest
from attn_support.comfy.graph import largest_difference, sample
from attn_support.comfy.server import ComfyServer

ROUNDING = 2e-5  # of the latent's largest value


@pytest.mark.parametrize("family", ["sd15", "lumina2", "minimax_h3"], indirect=True)
def test_through_the_server_the_latent_is_the_same(server: ComfyServer, family: str) -> None:
    stock = sample(server, family)
    ours = sample(server, family, ("PascalFFNChunking", {"budget_mib": 1, "min_tokens": 2}))
    assert largest_difference(ours, stock) < ROUNDING
    line = next(line for line in ours.log if "feed-forward modules chunked" in line)
    assert "0 of" not in line, line


def test_with_the_attention_patch_before_and_after(server: ComfyServer) -> None:
    stock = sample(server, "sd15")
    chunking = ("PascalFFNChunking", {"budget_mib": 1, "min_tokens": 2})
    defaults = {"route": "tiled", "budget_mib": 0, "tile_size": 0, "coverage": "attention override"}
    attention = ("PascalAttentionPatch", {**defaults, "min_keys": 0, "nan_guard": True})
    for patches in ((chunking, attention), (attention, chunking)):
        ours = sample(server, "sd15", *patches)
        assert largest_difference(ours, stock) < ROUNDING
        assert ours.run.taken == stock.counts["sdpa"]
        assert ours.says("4 of 4 feed-forward modules chunked")
