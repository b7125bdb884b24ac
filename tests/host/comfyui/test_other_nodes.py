"""The nodes besides Pascal Attention Patch through the server of a real ComfyUI, on its tiny models."""

from itertools import count
from typing import Any

import pytest
import torch
from attn_support.comfy.graph import (
    CHUNKING,
    FAMILIES,
    INT8,
    Captured,
    Graph,
    Link,
    attention_patch,
    capture,
    largest_difference,
    sample,
    sample_graph,
)
from attn_support.comfy.server import ComfyServer, WorkflowError

ROUNDING = 2e-5  # of the latent's largest value
ATTENTION = attention_patch(route="tiled", coverage="attention override")


@pytest.mark.parametrize("family", ["minimax_h3"], indirect=True)
def test_chunked_the_latent_is_the_same(server: ComfyServer, family: str) -> None:
    ours = sample(server, family, CHUNKING)
    assert largest_difference(ours, sample(server, family)) < ROUNDING
    line = next(line for line in ours.log if "feed-forward modules chunked" in line)
    assert "0 of" not in line, line


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


def test_a_patched_vae_in_bands_and_one_saved_before_there_were_bands(server: ComfyServer, tiny_model: Any) -> None:
    def decoded(**inputs: Any) -> tuple[Captured, str]:
        """A picture by a patched model, with inputs through a patched VAE, and the report behind it."""
        graph, latent = sample_graph("sd15", [attention_patch()], "")
        vae = graph.add("VAELoader", vae_name=tiny_model("vae_kl"))
        if inputs:
            vae = graph.add("PascalVAEAttention", vae=vae, **inputs)
        image = graph.add("VAEDecode", samples=latent, vae=vae)
        report = graph.add("PascalAttentionReport", exactness_check=True, value=image, output=2)
        picture, text = capture(server, graph, image, report)
        return picture, text.text

    stock, _ = decoded()
    old = {"route": "tiled", "budget_mib": 0, "nan_guard": True}
    saved, text = decoded(**old)
    assert largest_difference(saved, stock) < ROUNDING
    assert "SD15, diffusion model, node" in text
    assert ", VAE, node" in text
    assert "in bands:" not in text
    banded, text = decoded(**old, decode="always in bands")
    assert largest_difference(banded, stock) < ROUNDING
    assert "decode of 1x4x16x16 in bands: " in text.partition("\n")[0], text[:500]
    assert banded.says("decode of 1x4x16x16 in bands: ")


SEEDS = count(1)


def flash_graph(*, enabled: bool | None) -> tuple[Graph, Link, int]:
    """A latent through our switch (None = without it) and the node of the other pack, which runs anew each time."""
    graph, seed = Graph(), next(SEEDS)
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    if enabled is not None:
        latent = graph.add("PascalFlashAttnFunctions", value=latent, enabled=enabled)
    return graph, graph.add("ProbeFlash", latent=latent, seed=seed), seed


def failure(server: ComfyServer, *, enabled: bool | None) -> str:
    graph, latent, _ = flash_graph(enabled=enabled)
    with pytest.raises(WorkflowError) as caught:
        capture(server, graph, latent)
    return str(caught.value)


def test_a_pack_works_while_it_is_on_and_the_report_counts_its_calls(server: ComfyServer) -> None:
    assert "flash_attn" in failure(server, enabled=None)
    graph, latent, seed = flash_graph(enabled=True)
    node, _ = graph.add("PascalAttentionReport", exactness_check=False, value=latent)
    found, text = capture(server, graph, latent, [node, 2])
    query = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found.tensors[0], expected)
    assert "flash_attn functions" in text.text
    assert "flash_attn.flash_attn_func" in text.text
    assert any("flash_attn, sageattention, xformers now find this pack's functions" in line for line in found.log)
    assert "flash_attn" in failure(server, enabled=False)


def test_steps_that_comfyui_skips_are_the_same_beside_us(server: ComfyServer) -> None:
    cache = ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False})
    whole, stock = sample(server, "sd15", steps=6), sample(server, "sd15", cache, steps=6)
    assert 0 < stock.counts["sdpa"] < whole.counts["sdpa"]
    for patches in ((cache, ATTENTION), (ATTENTION, cache)):
        ours = sample(server, "sd15", *patches, steps=6)
        assert ours.run.taken == stock.counts["sdpa"]
        assert largest_difference(ours, stock) < ROUNDING
