"""The nodes besides Pascal Attention Patch through the server of a real ComfyUI, on its tiny models."""

from __future__ import annotations

import pytest
from attn_support.comfy.graph import FAMILIES, Graph, attention_patch, capture, largest_difference, sample
from attn_support.comfy.server import ComfyServer

ROUNDING = 2e-5  # of the latent's largest value
ATTENTION = attention_patch(route="tiled", coverage="attention override")
CHUNKING = ("PascalFFNChunking", {"budget_mib": 1, "min_tokens": 2})
OPTIONS = {"max_error": 0.05, "include": "", "exclude": "", "weights": "host", "int8_files": "auto"}
INT8 = ("PascalInt8Linear", OPTIONS)


@pytest.mark.parametrize("family", ["sd15", "lumina2", "minimax_h3"], indirect=True)
def test_chunked_the_latent_is_the_same(server: ComfyServer, family: str) -> None:
    ours = sample(server, family, CHUNKING)
    assert largest_difference(ours, sample(server, family)) < ROUNDING
    line = next(line for line in ours.log if "feed-forward modules chunked" in line)
    assert "0 of" not in line, line


@pytest.mark.parametrize("family", ["sd15", "lumina2"], indirect=True)
def test_in_int8_the_latent_is_near_and_bypassed_it_is_the_same(server: ComfyServer, family: str) -> None:
    stock = sample(server, family)
    ours = sample(server, family, INT8)
    assert 0 < largest_difference(ours, stock) < 0.2
    assert ours.says("linear layers in int8, not exact: relative error per layer")
    assert not ours.says(": 0 of")
    assert largest_difference(sample(server, family), stock) == 0
    assert largest_difference(sample(server, family, INT8), ours) == 0


def test_patches_work_together_in_any_order(server: ComfyServer) -> None:
    stock, alone = sample(server, "sd15"), sample(server, "sd15", INT8)
    for patches in ((CHUNKING, ATTENTION), (ATTENTION, CHUNKING), (INT8, CHUNKING, ATTENTION)):
        ours, is_exact = sample(server, "sd15", *patches), INT8 not in patches
        assert ours.run.taken == stock.counts["sdpa"]
        assert ours.says("4 of 4 feed-forward modules chunked")
        assert is_exact or ours.says("linear layers in int8")
        assert largest_difference(ours, stock if is_exact else alone) < (ROUNDING if is_exact else 0.1)


def test_a_second_card_that_is_not_there_is_no_error(server: ComfyServer) -> None:
    ours = sample(server, "sd15", ("PascalSecondCard", {"device": "cuda:3", "least_tokens": 64}))
    assert largest_difference(ours, sample(server, "sd15")) == 0
    assert ours.says("the model is on cpu, not on a card: the model is returned unchanged")


def test_a_tile_size_goes_into_the_attention_patch(server: ComfyServer) -> None:
    graph, shape = Graph(), {"tokens": 96, "heads": 2, "head_dim": 40, "dtype": "float32", "budget_mib": 0}
    size = graph.add("PascalTileSize", mode="from the card", **shape)
    kind, inputs = ATTENTION
    model = graph.add(kind, model=graph.load("sd15"), **{**inputs, "tile_size": size})
    ours = capture(server, graph, graph.sample(model, FAMILIES["sd15"]))[0]
    assert largest_difference(ours, sample(server, "sd15")) < ROUNDING
    assert ours.says("tiles of 96 keys")


def test_the_estimate_reads_the_prompt_that_is_given(server: ComfyServer) -> None:
    graph, family = Graph(), FAMILIES["sd15"]
    class_type, inputs = family.latent
    text = graph.add(
        "PascalMemoryEstimate",
        model=graph.load("sd15"),
        latent=graph.add("ProbeFresh", value=graph.add(class_type, **inputs)),
        guidance=True,
        conditioning=graph.add("ProbeCond", tokens=77, dim=family.dim, pooled=family.pooled, mask=False, seed=1),
    )
    found = capture(server, graph, text)[0].text
    assert "8 calls, 2 different; the largest 2 x 8 heads x 256 queries x 256 keys of 40 in float32" in found, found
    assert "with the prompt given" in found
