"""Pascal VAE Attention, decoding and encoding in bands, on the tiny VAEs of a real ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_support.comfy.graph import Captured, attention_patch, capture, largest_difference, sample_graph
from attn_support.comfy.server import ComfyServer


def decoded(server: ComfyServer, tiny_model: Callable[[str], str], **inputs: Any) -> tuple[Captured, str]:
    """A picture by a patched model and a patched VAE, and the report behind it; without inputs the VAE as it is."""
    graph, latent = sample_graph("sd15", [attention_patch()], "")
    vae = graph.add("VAELoader", vae_name=tiny_model("vae_kl"))
    if inputs:
        vae = graph.add("PascalVAEAttention", vae=vae, **inputs)
    image = graph.add("VAEDecode", samples=latent, vae=vae)
    report = graph.add("PascalAttentionReport", exactness_check=True, value=image, output=2)
    picture, text = capture(server, graph, image, report)
    return picture, text.text


def test_a_workflow_with_a_patched_model_in_bands_and_one_saved_before_there_were_bands(
    server: ComfyServer, tiny_model: Callable[[str], str]
) -> None:
    stock, _ = decoded(server, tiny_model)
    old = {"route": "tiled", "budget_mib": 0, "nan_guard": True}
    saved, text = decoded(server, tiny_model, **old)
    assert largest_difference(saved, stock) < 2e-5
    assert "in bands:" not in text
    banded, text = decoded(server, tiny_model, **old, decode="always in bands")
    assert largest_difference(banded, stock) < 2e-5
    assert "decode of 1x4x16x16 in bands: " in text.partition("\n")[0], text[:500]
    assert banded.says("decode of 1x4x16x16 in bands: ")
