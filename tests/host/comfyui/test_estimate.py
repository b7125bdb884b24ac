"""Pascal Memory Estimate on the tiny diffusion models of a real ComfyUI: what it foresees is what happens."""

from __future__ import annotations

from attn_support.comfy.graph import FAMILIES, Graph, capture
from attn_support.comfy.server import ComfyServer


def estimate(server: ComfyServer, name: str) -> str:
    graph, family = Graph(), FAMILIES[name]
    class_type, inputs = family.latent
    text = graph.add(
        "PascalMemoryEstimate",
        model=graph.load(name),
        latent=graph.add("ProbeFresh", value=graph.add(class_type, **inputs)),
        guidance=True,
        conditioning=graph.add("ProbeCond", tokens=77, dim=family.dim, pooled=family.pooled, mask=False, seed=1),
    )
    return capture(server, graph, text)[0].text


def test_through_the_server(server: ComfyServer) -> None:
    text = estimate(server, "sd15")
    assert "8 calls, 2 different; the largest 2 x 8 heads x 256 queries x 256 keys of 40 in float32" in text, text
    assert "with the prompt given" in text
